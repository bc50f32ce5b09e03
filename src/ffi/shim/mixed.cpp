// AdamW whose moments have a dtype of their own.
#include "mixed.h"

namespace {

using memfit::Adam;
using memfit::Row;
using memfit::Walked;

template <class Number>
void move(
    const Walked &of, int64_t start, int64_t length, const mf_adam &options,
    const mf_rounding &rounding) {
  const mf_moving &moving = *of.moving;
  const Adam<Number> k({moving.lr, moving.weight_decay, moving.count}, options);
  Row<Number> weight, slope, first, second;
  Number *w = weight.read(of, of.weight, start, length);
  const Number *g = slope.read(of, of.slope, start, length);
  Number *m = first.read(of, of.kept[0], start, length);
  Number *v = second.read(of, of.kept[1], start, length);
  memfit::adam_row(w, g, m, v, length, k, options.decoupled != 0);
  weight.write(of, of.weight, start, length, memfit::of_weights(rounding));
  first.write(of, of.kept[0], start, length, {true, rounding.seed, memfit::kFirst});
  second.write(of, of.kept[1], start, length, {true, rounding.seed, memfit::kSecond});
}

}  // namespace

void memfit::move_mixed(
    const Walked &of, int64_t start, int64_t length, const mf_adam &options,
    const mf_rounding &rounding) {
  if (of.weight.type == at::kDouble) return move<double>(of, start, length, options, rounding);
  move<float>(of, start, length, options, rounding);
}

int mf_adam_mixed_step(
    mf_moving *moving, size_t count, const mf_adam *options, const mf_rounding *rounding,
    size_t *moved) noexcept {
  return memfit::guarded([&] {
    *moved = 0;
    auto never = [](const mf_moving &) { return false; };
    auto walked = memfit::walked_of(moving, count, 2, never);
    memfit::walk(walked, moved, [&](const Walked &of, int64_t start, int64_t length) {
      memfit::move_mixed(of, start, length, *options, *rounding);
    });
  });
}
