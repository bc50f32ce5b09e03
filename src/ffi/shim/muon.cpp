// Muon on the CPU: momentum, the Newton-Schulz iteration in the gradient's own memory where
// that can be used up, and the step. Products are cut in tiles of fixed sizes, symmetric ones
// computed by half.
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <stdexcept>

#include "copying.h"
#include "moving.h"
#include "parallel.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "no-trapping-math", "fp-contract=off")
#endif

namespace {

using memfit::Divide;
using memfit::Double16;
using memfit::Part;
using memfit::Rows;
using memfit::Taken;
using memfit::Wide;
using memfit::kPart;
using memfit::copy_without_memory;
using memfit::load;
using memfit::narrow;
using memfit::random_of;
using memfit::Rounder;
using memfit::rounder_of;
using memfit::store;
using memfit::sum_of;
using memfit::widen;

constexpr int64_t kChunk = 1 << 14;
// Elements of a block of columns, and most tiles beside each other in a symmetric product.
constexpr int64_t kBlock = 1 << 18;
constexpr int64_t kTiles = 8;

int64_t parts(int64_t of, int64_t by) { return (of + by - 1) / by; }
// Libraries round differently where memory begins elsewhere in a cache line.
int64_t lines(int64_t bytes) { return parts(bytes, 64) * 64; }

template <class Body>
void each(int64_t count, Body &&body) {
  memfit::parallel(count, [&](int64_t from, int64_t to) {
    at::AutoDispatchBelowADInplaceOrView below;
    for (int64_t i = from; i < to; ++i) body(i);
  });
}

// ---- memory ---------------------------------------------------------------------------------

// A matrix and how its update is cut. The iteration runs on its short side: `rows` <= `cols`.
struct Matrix {
  Taken taken;
  at::ScalarType type;
  int64_t tall, wide;  // as it is
  int64_t rows, cols, width, lanes;
  bool formed;   // bA + cA^2 is a matrix of its own
  bool uses_up;  // the gradient's memory

  explicit Matrix(const Taken &from) : taken(from), type(memfit::wide_type(from.parameter)) {
    tall = taken.parameter.size(0);
    wide = tall == 0 ? 0 : taken.parameter.numel() / tall;
    rows = std::min(tall, wide);
    cols = std::max(tall, wide);
    width = std::min(cols, std::max<int64_t>(32, kBlock / std::max<int64_t>(1, rows) / 16 * 16));
    lanes = rows == 0 ? 0 : std::min<int64_t>(at::get_num_threads(), parts(cols, width));
    formed = 2 * rows <= cols;
    const at::Tensor &grad = taken.grad;
    uses_up = grad.scalar_type() == type && grad.is_contiguous() && !grad.requires_grad() &&
        grad.storage().use_count() == 1;
  }

  int64_t number() const { return type == at::kDouble ? 8 : 4; }
  int64_t chunks() const { return parts(rows * cols, kChunk); }
  int64_t lane() const { return parts(rows * width, 16) * 16; }
  int64_t scratch() const {
    int64_t square = lines(rows * rows * number());
    return lines(chunks() * 8) + (uses_up ? 0 : lines(rows * cols * number())) +
        square * (formed ? 2 : 1) + lanes * lane() * number();
  }
};

// Hands out parts of the scratch, from its start.
struct Memory {
  char *next;
  double *sums(int64_t count) {
    double *found = reinterpret_cast<double *>(next);
    next += lines(count * 8);
    return found;
  }
  at::Tensor tensor(const Matrix &matrix, at::IntArrayRef sizes) {
    at::Tensor made = at::from_blob(next, sizes, at::TensorOptions(matrix.type));
    next += lines(made.numel() * matrix.number());
    return made;
  }
};

// ---- loops ----------------------------------------------------------------------------------

template <class Number>
struct Blend {
  Divide<Number> divide;
  Number keep, rise;
  bool nesterov;
};

// x is the gradient and becomes what the iteration starts from; the sum of its squares.
template <class Number>
MEMFIT_INLINE double blend(
    Number *__restrict x, Number *__restrict m, int64_t n, const Blend<Number> &k) {
  Double16 sums = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    auto grad = k.divide(load(x + i));
    auto momentum = load(m + i) * k.keep + grad * k.rise;
    store(m + i, momentum);
    if (k.nesterov) momentum = grad * k.rise + momentum * k.keep;
    store(x + i, momentum);
    Double16 wide = __builtin_convertvector(momentum, Double16);
    sums += wide * wide;
  }
  double sum = sum_of(sums);
  for (; i < n; ++i) {
    Number grad = k.divide(x[i]);
    m[i] = m[i] * k.keep + grad * k.rise;
    x[i] = k.nesterov ? grad * k.rise + m[i] * k.keep : m[i];
    sum += double(x[i]) * x[i];
  }
  return sum;
}

template <class Number>
MEMFIT_INLINE void multiply(Number *x, int64_t n, Number by) {
  for (int64_t i = 0; i < n; ++i) x[i] *= by;
}

template <class Element, class Number>
MEMFIT_INLINE void apply(
    Element *__restrict w, const Number *__restrict x, int64_t n, Number shrink, Number step,
    const Rounder &round) {
  if (round.random) {
    for (int64_t i = 0; i < n; ++i) {
      Number moved = Number(widen(w[i])) * shrink - step * x[i];
      narrow(w + i, moved, random_of(round.draw, round.index + uint32_t(i)));
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i) narrow(w + i, Number(widen(w[i])) * shrink - step * x[i]);
}

// A function must be no template to be compiled for several instruction sets.
#define MEMFIT_BLEND(Number)                                                               \
  MEMFIT_CLONES double blend_of(Number *x, Number *m, int64_t n, const Blend<Number> &k) { \
    return blend(x, m, n, k);                                                              \
  }                                                                                        \
  MEMFIT_CLONES void multiply_of(Number *x, int64_t n, Number by) { multiply(x, n, by); }
MEMFIT_BLEND(float)
MEMFIT_BLEND(double)
#undef MEMFIT_BLEND
#define MEMFIT_APPLY(Element, Number)                                              \
  MEMFIT_CLONES void apply_of(                                                     \
      Element *w, const Number *x, int64_t n, Number shrink, Number step,          \
      const Rounder &round) {                                                      \
    apply(w, x, n, shrink, step, round);                                           \
  }
MEMFIT_APPLY(float, float)
MEMFIT_APPLY(double, double)
MEMFIT_APPLY(c10::BFloat16, float)
MEMFIT_APPLY(c10::Half, float)
#undef MEMFIT_APPLY

// ---- Newton-Schulz ----------------------------------------------------------------------------

// out = beta * base + alpha * a * a^T, both symmetric; the tiles below the diagonal are copies.
void symmetric(
    const at::Tensor &out, const at::Tensor &a, const at::Tensor *base, double beta, double alpha) {
  int64_t size = out.size(0);
  int64_t tiles = std::max<int64_t>(1, std::min(kTiles, size / 64));
  int64_t side = parts(parts(size, tiles), 16) * 16;
  tiles = parts(size, side);
  std::vector<std::pair<int64_t, int64_t>> pairs;
  for (int64_t i = 0; i < tiles; ++i) {
    for (int64_t j = i; j < tiles; ++j) pairs.emplace_back(i * side, j * side);
  }
  each(static_cast<int64_t>(pairs.size()), [&](int64_t index) {
    auto [i, j] = pairs[index];
    int64_t height = std::min(side, size - i), width = std::min(side, size - j);
    at::Tensor left = a.narrow(0, i, height), right = a.narrow(0, j, width).t();
    at::Tensor tile = out.narrow(0, i, height).narrow(1, j, width);
    if (base == nullptr) {
      at::mm_out(tile, left, right);
    } else {
      at::addmm_out(tile, base->narrow(0, i, height).narrow(1, j, width), left, right, beta, alpha);
    }
    if (i != j) copy_without_memory(out.narrow(0, j, width).narrow(1, i, height), tile.t());
  });
}

// What the iteration works in: x is rows x cols, the others are scratch.
struct Iteration {
  at::Tensor x, gram, polynomial, lanes;
};

// x = a x + (b A + c A^2) x with A = x x^T, column by column, each block in a lane's memory.
void iterate(const Matrix &matrix, const Iteration &on, const mf_muon &options) {
  symmetric(on.gram, on.x, nullptr, 0, 1);
  if (matrix.formed) symmetric(on.polynomial, on.gram, &on.gram, options.b, options.c);
  each(matrix.lanes, [&](int64_t lane) {
    for (int64_t at = lane * matrix.width; at < matrix.cols; at += matrix.lanes * matrix.width) {
      int64_t width = std::min(matrix.width, matrix.cols - at);
      at::Tensor x = on.x.narrow(1, at, width);
      at::Tensor copy =
          on.lanes.select(0, lane).narrow(0, 0, matrix.rows * width).view({matrix.rows, width});
      if (matrix.formed) {
        copy_without_memory(copy, x);
        x.addmm_(on.polynomial, copy, options.a, 1);
      } else {
        at::mm_out(copy, on.gram, x);
        x.addmm_(on.gram, copy, options.a, options.c);
        x.add_(copy, options.b);
      }
    }
  });
}

// ---- one matrix -------------------------------------------------------------------------------

// The momentum moves; x becomes what it says, divided by its norm.
template <class Number>
void start(const Matrix &matrix, const at::Tensor &x, double *sums, const mf_muon &options) {
  Blend<Number> k{
      Divide<Number>(options.divisor), Number(options.momentum), Number(1 - options.momentum),
      options.nesterov != 0};
  auto *values = static_cast<Number *>(x.data_ptr());
  auto *momentum = static_cast<Number *>(matrix.taken.moving->state[0]->data_ptr());
  int64_t numel = x.numel();
  each(matrix.chunks(), [&](int64_t i) {
    int64_t from = i * kChunk;
    sums[i] = blend_of(values + from, momentum + from, std::min(kChunk, numel - from), k);
  });
  double sum = 0;
  for (int64_t i = 0; i < matrix.chunks(); ++i) sum += sums[i];
  Number by = static_cast<Number>(1 / std::max(std::sqrt(sum), options.epsilon));
  each(matrix.chunks(), [&](int64_t i) {
    multiply_of(values + i * kChunk, std::min(kChunk, numel - i * kChunk), by);
  });
}

template <class Element>
void finish(
    const Matrix &matrix, const at::Tensor &x, double step, const mf_rounding &rounding) {
  using Number = Wide<Element>;
  const mf_moving &moving = *matrix.taken.moving;
  const at::Tensor &parameter = matrix.taken.parameter;
  const auto *update = static_cast<const Number *>(x.data_ptr());
  Number shrink = Number(1 - moving.lr * moving.weight_decay), by = Number(step);
  if (parameter.is_contiguous()) {
    auto *w = static_cast<Element *>(parameter.data_ptr());
    int64_t numel = parameter.numel();
    return each(matrix.chunks(), [&](int64_t i) {
      int64_t from = i * kChunk;
      apply_of(w + from, update + from, std::min(kChunk, numel - from), shrink, by,
               rounder_of(moving, rounding, from));
    });
  }
  Rows<Element> rows(parameter);
  each(parameter.numel() / rows.cols, [&](int64_t row) {
    Part<Element> part;
    for (int64_t col = 0; col < rows.cols; col += kPart) {
      int64_t n = std::min(kPart, rows.cols - col);
      int64_t from = row * rows.cols + col;
      apply_of(part.of(rows, row, col, n), update + from, n, shrink, by,
               rounder_of(moving, rounding, from));
      part.put_back();
    }
  });
}

void finish(
    const Matrix &matrix, const at::Tensor &x, double step, const mf_rounding &rounding) {
  switch (matrix.taken.parameter.scalar_type()) {
    case at::kFloat: return finish<float>(matrix, x, step, rounding);
    case at::kDouble: return finish<double>(matrix, x, step, rounding);
    case at::kBFloat16: return finish<c10::BFloat16>(matrix, x, step, rounding);
    case at::kHalf: return finish<c10::Half>(matrix, x, step, rounding);
    default: TORCH_CHECK(false, "memfit: Muon moves Float, Double, BFloat16 and Half");
  }
}

double scale_of(const Matrix &matrix, const mf_muon &options) {
  double tall = static_cast<double>(matrix.tall), wide = static_cast<double>(matrix.wide);
  return options.match_adam ? 0.2 * std::sqrt(std::max(tall, wide))
                            : std::sqrt(std::max(1.0, tall / wide));
}

void move(
    const Matrix &matrix, Memory memory, const mf_muon &options, const mf_rounding &rounding) {
  double *sums = memory.sums(matrix.chunks());
  at::Tensor x;
  if (matrix.uses_up) {
    x = matrix.taken.grad.view({matrix.tall, matrix.wide});
  } else {
    x = memory.tensor(matrix, {matrix.tall, matrix.wide});
    copy_without_memory(x.view(matrix.taken.grad.sizes()), matrix.taken.grad);
  }
  if (matrix.type == at::kDouble) {
    start<double>(matrix, x, sums, options);
  } else {
    start<float>(matrix, x, sums, options);
  }
  Iteration on;
  on.x = matrix.tall > matrix.wide ? x.t() : x;
  on.gram = memory.tensor(matrix, {matrix.rows, matrix.rows});
  if (matrix.formed) on.polynomial = memory.tensor(matrix, {matrix.rows, matrix.rows});
  on.lanes = memory.tensor(matrix, {matrix.lanes, matrix.lane()});
  for (int i = 0; i < options.steps; ++i) iterate(matrix, on, options);
  finish(matrix, x, matrix.taken.moving->lr * scale_of(matrix, options), rounding);
  if (matrix.uses_up) matrix.taken.grad.unsafeGetTensorImpl()->bump_version();
}

std::vector<Matrix> matrices_of(std::vector<mf_moving> &moving) {
  std::vector<Matrix> matrices;
  for (const Taken &taken : memfit::take(moving.data(), moving.size())) {
    TORCH_CHECK(taken.parameter.dim() > 1, "memfit: a matrix of shape ", taken.parameter.sizes());
    memfit::check_state(taken, taken.moving->state[0], taken.parameter.numel());
    matrices.emplace_back(taken);
  }
  return matrices;
}

}  // namespace

int mf_muon_step(
    mf_moving *moving, size_t count, const mf_muon *options, const mf_adam *others,
    const mf_rounding *rounding, size_t *moved) noexcept {
  return memfit::guarded([&] {
    *moved = 0;
    at::AutoDispatchBelowADInplaceOrView below;
    std::vector<mf_moving> lists[2];
    std::vector<size_t> places[2];
    for (size_t i = 0; i < count; ++i) {
      int list = moving[i].state[1] == nullptr ? 0 : 1;
      lists[list].push_back(moving[i]);
      places[list].push_back(i);
    }
    std::vector<Matrix> matrices = matrices_of(lists[0]);
    int64_t bytes = 0;
    for (const Matrix &matrix : matrices) bytes = std::max(bytes, matrix.scratch());
    at::Tensor scratch = at::empty({bytes}, at::TensorOptions(at::kByte));
    auto told = [&](int list) {
      for (size_t i = 0; i < places[list].size(); ++i) {
        moving[places[list][i]].count = lists[list][i].count;
      }
    };
    mf_moving *adams = lists[1].data();
    size_t many = lists[1].size();
    int status = options->mixed ? mf_adam_mixed_step(adams, many, others, rounding, moved)
                                : mf_adam_step(adams, many, others, moved);
    told(1);
    if (status != 0) throw std::runtime_error(mf_last_error());
    try {
      for (const Matrix &matrix : matrices) {
        if (matrix.rows > 0) move(matrix, {static_cast<char *>(scratch.data_ptr())}, *options, *rounding);
        memfit::count_moved(matrix.taken, moved);
      }
    } catch (...) {
      // Part of a parameter, or its momentum, may have moved.
      *moved = std::max<size_t>(*moved, 1);
      told(0);
      throw;
    }
    told(0);
    // Casts of the old weights must not serve the next forward of this autocast scope.
    if (*moved > 0) mf_autocast_clear();
  });
}
