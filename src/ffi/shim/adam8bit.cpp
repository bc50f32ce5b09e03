// AdamW with quantised moments: decoded, moved and encoded in cache, one block after the other.
#include "mixed.h"
#include "quantile.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "no-trapping-math", "fp-contract=off")
#endif

namespace {

using memfit::Adam;
using memfit::kBlock;
using memfit::Row;
using memfit::Walked;

static_assert(memfit::kRow % kBlock == 0);

// The moments of one block.
struct Block {
  uint8_t *first, *second;
  float *first_scale, *second_scale;
};

MEMFIT_INLINE void move_block(
    float *w, const float *g, const Block &block, int64_t length, const Adam<float> &k,
    float *m, float *v) {
  memfit::decode<true>(block.first, length, *block.first_scale, m);
  memfit::decode<false>(block.second, length, *block.second_scale, v);
  memfit::adam<true>(w, g, m, v, length, k);
  memfit::encode<true>(m, length, block.first, block.first_scale);
  memfit::encode<false>(v, length, block.second, block.second_scale);
}

MEMFIT_CLONES void whole_block(float *w, const float *g, const Block &block, const Adam<float> &k) {
  alignas(64) float m[kBlock], v[kBlock];
  move_block(w, g, block, kBlock, k, m, v);
}

MEMFIT_CLONES void last_block(
    float *w, const float *g, const Block &block, int64_t length, const Adam<float> &k) {
  alignas(64) float m[kBlock], v[kBlock];
  move_block(w, g, block, length, k, m, v);
}

MEMFIT_CLONES void encode_block(
    const float *numbers, int64_t length, bool with_sign, uint8_t *codes, float *scale) {
  if (with_sign) return memfit::encode<true>(numbers, length, codes, scale);
  memfit::encode<false>(numbers, length, codes, scale);
}

MEMFIT_CLONES void decode_block(
    const uint8_t *codes, int64_t length, bool with_sign, float scale, float *numbers) {
  if (with_sign) return memfit::decode<true>(codes, length, scale, numbers);
  memfit::decode<false>(codes, length, scale, numbers);
}

template <class Element>
Element *in_state(const Walked &of, int index, int64_t at) {
  return static_cast<Element *>(of.moving->state[index]->data_ptr()) + at;
}

void move(
    const Walked &of, int64_t start, int64_t length, const mf_adam &options,
    const mf_rounding &rounding) {
  const mf_moving &moving = *of.moving;
  const Adam<float> k({moving.lr, moving.weight_decay, moving.count}, options);
  Row<float> weight, slope;
  float *w = weight.read(of, of.weight, start, length);
  const float *g = slope.read(of, of.slope, start, length);
  for (int64_t at = 0; at < length; at += kBlock) {
    int64_t number = (start + at) / kBlock;
    Block block{
        in_state<uint8_t>(of, 0, start + at), in_state<uint8_t>(of, 2, start + at),
        in_state<float>(of, 1, number), in_state<float>(of, 3, number)};
    if (length - at >= kBlock) {
      whole_block(w + at, g + at, block, k);
    } else {
      last_block(w + at, g + at, block, length - at, k);
    }
  }
  weight.write(of, of.weight, start, length, memfit::of_weights(rounding));
}

bool quantised(const mf_moving &moving) { return moving.state[2] != nullptr; }

void check(const Walked &of) {
  int64_t blocks = (of.numel + kBlock - 1) / kBlock;
  for (int i = 0; i < 4; ++i) {
    const mf_tensor state = of.moving->state[i];
    bool codes = i % 2 == 0;
    TORCH_CHECK(
        state && state->is_contiguous() && state->numel() == (codes ? of.numel : blocks) &&
            state->scalar_type() == (codes ? at::kByte : at::kFloat),
        "memfit: quantised state that does not fit its parameter");
  }
  TORCH_CHECK(of.weight.type != at::kDouble, "memfit: quantised state for a double parameter");
}

}  // namespace

int mf_adam8bit_step(
    mf_moving *moving, size_t count, const mf_adam *options, const mf_rounding *rounding,
    size_t *moved) noexcept {
  return memfit::guarded([&] {
    *moved = 0;
    auto walked = memfit::walked_of(moving, count, 2, quantised);
    for (const Walked &of : walked) {
      if (quantised(*of.moving)) check(of);
    }
    memfit::walk(walked, moved, [&](const Walked &of, int64_t start, int64_t length) {
      if (quantised(*of.moving)) return move(of, start, length, *options, *rounding);
      memfit::move_mixed(of, start, length, *options, *rounding);
    });
  });
}

void mf_quantise(
    const float *numbers, size_t count, int with_sign, uint8_t *codes, float *scales) noexcept {
  auto length = static_cast<int64_t>(count);
  for (int64_t at = 0; at < length; at += kBlock) {
    encode_block(
        numbers + at, std::min(kBlock, length - at), with_sign != 0, codes + at, scales + at / kBlock);
  }
}

void mf_dequantise(
    const uint8_t *codes, const float *scales, size_t count, int with_sign,
    float *numbers) noexcept {
  auto length = static_cast<int64_t>(count);
  for (int64_t at = 0; at < length; at += kBlock) {
    decode_block(
        codes + at, std::min(kBlock, length - at), with_sign != 0, scales[at / kBlock], numbers + at);
  }
}
