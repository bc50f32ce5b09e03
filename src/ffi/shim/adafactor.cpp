// Adafactor on the CPU: three passes over the gradient, two over the parameter, in scratch of
// the size of a few rows. Work is cut the same way whatever the number of threads, and sums
// are finished in one order.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "adafactor.h"
#include "moving.h"
#include "parallel.h"

namespace {

using memfit::Divide;
using memfit::Part;
using memfit::Rows;
using memfit::Taken;
using memfit::Wide;
using memfit::kPart;
using memfit::adafactor::Found;
using memfit::adafactor::Step;
using memfit::adafactor::apply_of;
using memfit::adafactor::apply_vector_of;
using memfit::adafactor::moment_of;
using memfit::adafactor::squares_of;
using memfit::adafactor::updates_of;

// Elements that a thread takes at a time, most blocks of rows that sum a matrix's columns
// side by side, and columns that are finished at a time.
constexpr int64_t kTask = 1 << 16;
constexpr int64_t kBlocks = 32;
constexpr int64_t kColumns = 1 << 12;

int64_t parts(int64_t of, int64_t by) { return (of + by - 1) / by; }

// A stretch of rows of one slice, or of a vector's elements.
struct Stretch {
  int64_t slice, block, from, to;
};

// A parameter is slices of rows x cols, a slice blocks of rows; a vector is its elements.
struct Cut {
  bool factored;
  int64_t rows, cols, slices, blocks = 1, group = 1, tasks;

  explicit Cut(const at::Tensor &parameter) : factored(parameter.dim() > 1) {
    cols = parameter.dim() > 0 ? parameter.size(-1) : 1;
    rows = factored ? parameter.size(-2) : 1;
    int64_t size = std::max<int64_t>(1, rows * cols);
    slices = parameter.numel() / size;
    if (!factored) {
      tasks = parts(cols, kTask);
    } else if (size > kTask) {
      blocks = std::min({kBlocks, parts(rows, 16), parts(size, kTask)});
      tasks = slices * blocks;
    } else {
      group = kTask / size;
      tasks = parts(slices, group);
    }
  }

  // The numbers that columns are summed in, a row of them for each block.
  int64_t sums() const { return factored ? slices * blocks * cols : 0; }

  template <class Body>
  void each(int64_t task, Body &&body) const {
    if (!factored) return body(Stretch{0, 0, task * kTask, std::min(cols, (task + 1) * kTask)});
    if (blocks > 1) {
      int64_t block = task % blocks, some = parts(rows, blocks);
      int64_t from = std::min(rows, block * some);
      return body(Stretch{task / blocks, block, from, std::min(rows, from + some)});
    }
    int64_t end = std::min(slices, (task + 1) * group);
    for (int64_t slice = task * group; slice < end; ++slice) body(Stretch{slice, 0, 0, rows});
  }
};

int64_t number_bytes(const at::Tensor &parameter) {
  return parameter.scalar_type() == at::kDouble ? 8 : 4;
}

int64_t scratch_of(const at::Tensor &parameter) {
  Cut cut(parameter);
  int64_t found = cut.tasks * static_cast<int64_t>(sizeof(Found));
  return found + cut.sums() * number_bytes(parameter);
}

// ---- one parameter ----------------------------------------------------------------------------

template <class Element>
class Update {
 public:
  using Number = Wide<Element>;

  Update(
      const Taken &taken, const mf_adafactor &options, const mf_rounding &rounding, char *scratch)
      : taken_(taken), options_(options), rounding_(rounding), cut_(taken.parameter), weights_(taken.parameter),
        grads_(taken.grad), divide_(options.divisor),
        found_(reinterpret_cast<Found *>(scratch)),
        columns_(reinterpret_cast<Number *>(scratch + cut_.tasks * sizeof(Found))) {
    double forgets = std::pow(static_cast<double>(taken.moving->count + 1), -options.decay);
    beta_ = 1 - forgets;
    rise_ = forgets;
    auto state = [&](int i) { return static_cast<Number *>(taken.moving->state[i]->data_ptr()); };
    second_ = state(0);
    if (cut_.factored) second_columns_ = state(1);
    if (options.beta1 != 0) momentum_ = state(cut_.factored ? 2 : 1);
  }

  void run() {
    run_tasks([this](int64_t task) { found_[task] = measure(task); });
    if (cut_.factored) {
      finish_columns();
      run_tasks([this](int64_t task) { found_[task].update = size(task); });
    }
    Step<Number> step = decide();
    run_tasks([&](int64_t task) { move(task, step); });
  }

 private:
  template <class Body>
  void run_tasks(Body &&body) {
    memfit::parallel(cut_.tasks, [&](int64_t from, int64_t to) {
      for (int64_t task = from; task < to; ++task) body(task);
    });
  }

  // Calls body(row of the whole parameter, first column, columns) for parts of rows.
  template <class Body>
  void each_part(const Stretch &stretch, Body &&body) {
    bool factored = cut_.factored;
    int64_t from = factored ? 0 : stretch.from, to = factored ? cut_.cols : stretch.to;
    int64_t first = factored ? stretch.from : 0, last = factored ? stretch.to : 1;
    for (int64_t row = first; row < last; ++row) {
      for (int64_t col = from; col < to; col += kPart) {
        body(stretch.slice * cut_.rows + row, col, std::min(kPart, to - col));
      }
    }
  }

  Number *columns(const Stretch &stretch) {
    return columns_ + (stretch.slice * cut_.blocks + stretch.block) * cut_.cols;
  }

  // Rows of the second moment, or all of a vector's; the sums of columns.
  Found measure(int64_t task) {
    Found all{0, 0};
    Part<Element> grad, weight;
    Number epsilon = options_.epsilon1;
    cut_.each(task, [&](const Stretch &stretch) {
      Number *sums = columns(stretch);
      if (cut_.factored) std::fill(sums, sums + cut_.cols, Number(0));
      double sum = 0;
      each_part(stretch, [&](int64_t row, int64_t col, int64_t n) {
        const Element *g = grad.of(grads_, row, col, n), *w = weight.of(weights_, row, col, n);
        Found found = cut_.factored
            ? squares_of(g, w, sums + col, n, divide_)
            : moment_of(g, w, second_ + col, n, divide_, beta_, rise_, epsilon);
        all.parameter += found.parameter;
        if (!cut_.factored) {
          all.update += found.update;
          return;
        }
        sum += found.update;
        if (col + n < cut_.cols) return;
        second_[row] = second_[row] * beta_ + (sum / cut_.cols + epsilon) * rise_;
        sum = 0;
      });
    });
    return all;
  }

  // Columns of the second moment; the first block's sums become the factor of each column in
  // the update, sqrt(mean of rows / column).
  void finish_columns() {
    int64_t pieces = parts(cut_.cols, kColumns);
    memfit::parallel(cut_.slices * pieces, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        int64_t slice = i / pieces, col = i % pieces * kColumns;
        const Number *rows = second_ + slice * cut_.rows;
        double mean = 0;
        for (int64_t row = 0; row < cut_.rows; ++row) mean += rows[row];
        finish_columns(slice, col, std::min(cut_.cols, col + kColumns), mean / cut_.rows);
      }
    });
  }

  void finish_columns(int64_t slice, int64_t from, int64_t to, double mean) {
    Number *sums = columns_ + slice * cut_.blocks * cut_.cols;
    Number *kept = second_columns_ + slice * cut_.cols;
    for (int64_t block = 1; block < cut_.blocks; ++block) {
      for (int64_t col = from; col < to; ++col) sums[col] += sums[block * cut_.cols + col];
    }
    for (int64_t col = from; col < to; ++col) {
      double square = double(sums[col]) / cut_.rows + options_.epsilon1;
      kept[col] = kept[col] * beta_ + square * rise_;
      sums[col] = std::sqrt(mean / kept[col]);
    }
  }

  Number row_factor(int64_t row) { return 1 / std::sqrt(second_[row]); }

  double size(int64_t task) {
    double all = 0;
    Part<Element> grad;
    cut_.each(task, [&](const Stretch &stretch) {
      const Number *factors = columns_ + stretch.slice * cut_.blocks * cut_.cols;
      each_part(stretch, [&](int64_t row, int64_t col, int64_t n) {
        const Element *g = grad.of(grads_, row, col, n);
        all += updates_of(g, factors + col, n, divide_, row_factor(row));
      });
    });
    return all;
  }

  Step<Number> decide() {
    Found all{0, 0};
    for (int64_t task = 0; task < cut_.tasks; ++task) {
      all.update += found_[task].update;
      all.parameter += found_[task].parameter;
    }
    double numel = static_cast<double>(taken_.parameter.numel());
    double lr = taken_.moving->lr, rate = lr;
    if (options_.relative) {
      rate = std::min(lr, 1 / std::sqrt(static_cast<double>(taken_.moving->count + 1)));
      double size = std::sqrt(all.parameter / numel);
      rate *= size <= options_.epsilon2 ? options_.epsilon2 : size;
    }
    // A comparison that a NaN passes would leave the update unclipped.
    double over = std::sqrt(all.update / numel) / options_.clip;
    double clip = over <= 1 ? 1 : 1 / over;
    double shrink = 1 - lr * taken_.moving->weight_decay;
    return {divide_, Number(1), Number(clip), Number(rate), Number(shrink), Number(options_.beta1),
            Number(1 - options_.beta1), {}};
  }

  void move(int64_t task, Step<Number> step) {
    Part<Element> grad, weight;
    cut_.each(task, [&](const Stretch &stretch) {
      const Number *factors = columns_ + stretch.slice * cut_.blocks * cut_.cols;
      each_part(stretch, [&](int64_t row, int64_t col, int64_t n) {
        const Element *g = grad.of(grads_, row, col, n);
        Element *w = weight.of(weights_, row, col, n);
        step.round = memfit::rounder_of(*taken_.moving, rounding_, row * cut_.cols + col);
        Number *m = momentum_ == nullptr ? nullptr : momentum_ + row * cut_.cols + col;
        if (cut_.factored) {
          step.row = row_factor(row);
          apply_of(w, g, factors + col, m, n, step);
        } else {
          apply_vector_of(w, g, second_ + col, m, n, step);
        }
        weight.put_back();
      });
    });
  }

  const Taken &taken_;
  const mf_adafactor &options_;
  const mf_rounding &rounding_;
  Cut cut_;
  Rows<Element> weights_, grads_;
  Divide<Number> divide_;
  Found *found_;
  Number *columns_;
  double beta_, rise_;
  Number *second_, *second_columns_ = nullptr, *momentum_ = nullptr;
};

void check(const Taken &taken, const mf_adafactor &options) {
  const at::Tensor &parameter = taken.parameter;
  int64_t numel = parameter.numel();
  const mf_tensor *state = taken.moving->state;
  if (parameter.dim() > 1) {
    memfit::check_state(taken, state[0], numel / parameter.size(-1));
    memfit::check_state(taken, state[1], numel / parameter.size(-2));
  } else {
    memfit::check_state(taken, state[0], numel);
  }
  if (options.beta1 != 0) memfit::check_state(taken, state[parameter.dim() > 1 ? 2 : 1], numel);
}

void move(
    const Taken &taken, const mf_adafactor &options, const mf_rounding &rounding, char *scratch) {
  switch (taken.parameter.scalar_type()) {
    case at::kFloat: return Update<float>(taken, options, rounding, scratch).run();
    case at::kDouble: return Update<double>(taken, options, rounding, scratch).run();
    case at::kBFloat16: return Update<c10::BFloat16>(taken, options, rounding, scratch).run();
    case at::kHalf: return Update<c10::Half>(taken, options, rounding, scratch).run();
    default: TORCH_CHECK(false, "memfit: Adafactor moves Float, Double, BFloat16 and Half");
  }
}

}  // namespace

int mf_adafactor_step(
    mf_moving *moving, size_t count, const mf_adafactor *options, const mf_rounding *rounding,
    size_t *moved) noexcept {
  return memfit::guarded([&] {
    *moved = 0;
    at::AutoDispatchBelowADInplaceOrView below;
    std::vector<Taken> all = memfit::take(moving, count);
    int64_t bytes = 0;
    for (const Taken &taken : all) {
      if (taken.parameter.numel() == 0) continue;
      check(taken, *options);
      bytes = std::max(bytes, scratch_of(taken.parameter));
    }
    at::Tensor memory = at::empty({bytes}, at::TensorOptions(at::kByte));
    char *scratch = static_cast<char *>(memory.data_ptr());
    try {
      for (const Taken &taken : all) {
        if (taken.parameter.numel() > 0) move(taken, *options, *rounding, scratch);
        memfit::count_moved(taken, moved);
      }
    } catch (...) {
      // Part of a parameter may have moved.
      *moved = std::max<size_t>(*moved, 1);
      throw;
    }
    // Casts of the old weights must not serve the next forward of this autocast scope.
    if (*moved > 0) mf_autocast_clear();
  });
}
