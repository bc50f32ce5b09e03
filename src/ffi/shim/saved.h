// The chain of saved-tensor links, for the .cpp files only. src/saved/mod.rs tells the rules.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <cstdint>
#include <string>

namespace memfit {

// Gives tensors back in backward, on the thread of the node that asks.
struct Holder : c10::intrusive_ptr_target {
  virtual at::Tensor unpack(uint32_t slot) = 0;
};

// One saved tensor: in the hands of a link, or kept by reference with its version.
class Saved {
 public:
  Saved() = default;
  // Asks the links of this thread, from the innermost outward. A region's input passes by
  // none that recomputes: it is kept where the chain comes to one.
  enum class As { Operand, RegionInput };
  static Saved pack(const at::Tensor &tensor, As as = As::Operand);
  // Keeps the tensor itself, detached.
  static Saved keep(const at::Tensor &tensor);
  static Saved hold(c10::intrusive_ptr<Holder> holder, uint32_t slot);

  // Throws CallbackError with a parked Error::Modified where a kept tensor has changed.
  at::Tensor unpack() const;
  explicit operator bool() const { return holder_.defined() || kept_.defined(); }

 private:
  c10::intrusive_ptr<Holder> holder_;
  at::Tensor kept_;
  uint32_t number_ = 0;  // the holder's slot, or the version of kept_
};

// May itself be the holder of what it takes.
struct Link : Holder {
  enum class Kind {
    Other,    // never sees parameters
    Region,   // takes everything and keeps nothing
    Collect,  // takes everything, while a region is recomputed
  };
  virtual Kind kind() const { return Kind::Other; }
  // Takes the tensor into `into`, or declines.
  virtual bool take(const at::Tensor &tensor, Saved &into) = 0;
  at::Tensor unpack(uint32_t) override { return {}; }
};

// A link's place in this thread's chain, for the life of the object. A place without a link
// is a wall: the places outside it are hidden. Places may end in any order, on their thread.
class Place {
 public:
  explicit Place(c10::intrusive_ptr<Link> link);
  ~Place();
  Place(const Place &) = delete;
  Place &operator=(const Place &) = delete;

  // The innermost place of this thread, or null.
  static Place *innermost() noexcept;
  Link *link() const { return link_.get(); }
  Place *outer() const { return outer_; }

 private:
  c10::intrusive_ptr<Link> link_;
  Place *outer_;
};


// Whether a storage is a registered one, or the tensor is a leaf that requires a gradient or
// a view of such a leaf.
bool is_parameter(const at::Tensor &tensor);
// Whether the tensor's storage is registered; of any thread's registrations.
bool is_registered(const at::Tensor &tensor);
// Whether a registered tensor requires no gradient: a frozen parameter or a buffer.
bool any_registered_frozen();
// How an error names the tensor: its registered name, or its shape and dtype.
std::string describe(const at::Tensor &tensor);
// Throws the CallbackError of an Error::Modified.
[[noreturn]] void throw_modified(const std::string &what, uint64_t expected, uint64_t found);

at::Tensor detached(const at::Tensor &tensor);
uint32_t version_of(const at::Tensor &tensor);

}  // namespace memfit
