// What the GEMM levels for NEON share: FP32 sums of four columns in four registers, and FP8 -> FP16 -> BF16.
// Both conversions are exact, and instructions of every 64-bit ARM processor.
#pragma once

#include "cpu/features.h"
#include "cpu/gemm_epilogue.h"

#if FP8_NEON
#include <arm_neon.h>

namespace fp8serve::gemm {

struct Quads {
  float32x4_t quad[4];  // four lanes of each column
};
using Vector = Quads;
using Sums = Quads;

// The sums of a tile take at most 24 of the 32 registers.
constexpr int kTileRows = kMaxRows, kStreamRows = 4;
template <int R>
constexpr int kVectors = R > 2 ? 1 : 4 / R;

FP8_INLINE Quads same_quad(float32x4_t x) { return {{x, x, x, x}}; }
FP8_INLINE Vector zero() { return same_quad(vdupq_n_f32(0.0f)); }
FP8_INLINE Vector same_scale(float scale) { return same_quad(vdupq_n_f32(scale)); }
FP8_INLINE Vector scales_of(float a_scale, const float* b_scale, int i) {
  Vector scales;
  for (int q = 0; q < 4; ++q) scales.quad[q] = vdupq_n_f32(a_scale * b_scale[4 * q + i]);
  return scales;
}
FP8_INLINE Vector promote(Vector total, const Vector& partial, const Vector& scales) {
  for (int q = 0; q < 4; ++q)
    total.quad[q] = vaddq_f32(total.quad[q], vmulq_f32(partial.quad[q], scales.quad[q]));
  return total;
}
// The sums of four quads: [a b c d], each (lane 0 + lane 2) + (lane 1 + lane 3).
FP8_INLINE float32x4_t add_lanes(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d) {
  const float64x2_t ab = vreinterpretq_f64_f32(vaddq_f32(vzip1q_f32(a, b), vzip2q_f32(a, b)));
  const float64x2_t cd = vreinterpretq_f64_f32(vaddq_f32(vzip1q_f32(c, d), vzip2q_f32(c, d)));
  return vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(ab, cd)), vreinterpretq_f32_f64(vzip2q_f64(ab, cd)));
}
FP8_INLINE Sums reduce(const Vector (&v)[4]) {
  Sums sums;
  for (int q = 0; q < 4; ++q)
    sums.quad[q] = add_lanes(v[0].quad[q], v[1].quad[q], v[2].quad[q], v[3].quad[q]);
  return sums;
}
FP8_INLINE Sums plus(Sums a, const Sums& b) {
  for (int q = 0; q < 4; ++q) a.quad[q] = vaddq_f32(a.quad[q], b.quad[q]);
  return a;
}
FP8_INLINE Sums load_sums(const float* p) {
  return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}
FP8_INLINE void store_sums(float* p, const Sums& sums) {
  for (int q = 0; q < 4; ++q) vst1q_f32(p + 4 * q, sums.quad[q]);
}
template <int R>
FP8_INLINE void apply_epilogue_to_rows(const Epilogue& e, int row, const Sums (&sums)[R]) {
  for (int r = 0; r < R; ++r) {
    float values[kGroup];
    store_sums(values, sums[r]);
    apply_epilogue(e, row + r, values);
  }
}

struct Runs {
  uint16x8_t run[4];  // BF16 or FP16, of columns i, i + 4, i + 8 and i + 12
};

FP8_INLINE Runs load_a(const uint16_t* p) {
  const uint16x8_t x = vld1q_u16(p);
  return {{x, x, x, x}};
}
FP8_INLINE Runs load_b(const uint16_t* p) {
  return {{vld1q_u16(p), vld1q_u16(p + 8), vld1q_u16(p + 16), vld1q_u16(p + 24)}};
}
FP8_INLINE void store(uint16_t* p, const Runs& x) {
  for (int q = 0; q < 4; ++q) vst1q_u16(p + 8 * q, x.run[q]);
}
FP8_INLINE void load_values(const uint16_t* const* from, Runs (&runs)[2]) {
  for (int q = 0; q < 4; ++q) {
    runs[0].run[q] = vld1q_u16(from[q]);
    runs[1].run[q] = vld1q_u16(from[q] + kRun);
  }
}

// 16 FP8 values -> FP16. E5M2 is the upper half of FP16. E4M3 has an exponent of one bit less, whose bias is
// less by 8: the bits of FP16 are those of value / 256, subnormal or not, but for NaN.
template <class F>
constexpr float kFp16Factor = F::mantissa == 2 ? 1.0f : 256.0f;
template <class F>
FP8_INLINE uint16x8x2_t to_fp16(uint8x16_t x) {
  uint8x16_t low = vdupq_n_u8(0), high = x;
  if constexpr (F::mantissa == 3) {
    const uint8x16_t twice = vaddq_u8(x, x), nan = vceqq_u8(twice, vdupq_n_u8(0xfe));
    high = vbslq_u8(vdupq_n_u8(0x80), x, vorrq_u8(vshrq_n_u8(twice, 2), nan));
    low = vshlq_n_u8(x, 7);
  }
  return {{vreinterpretq_u16_u8(vzip1q_u8(low, high)), vreinterpretq_u16_u8(vzip2q_u8(low, high))}};
}

// Eight FP16 values times the factor -> BF16: the upper halves of FP32, if BF16 holds the products.
template <class F>
FP8_INLINE uint16x8_t to_bf16(uint16x8_t x) {
  float32x4_t low = vcvt_f32_f16(vget_low_f16(vreinterpretq_f16_u16(x))),
              high = vcvt_high_f32_f16(vreinterpretq_f16_u16(x));
  if constexpr (kFp16Factor<F> != 1.0f) {
    low = vmulq_n_f32(low, kFp16Factor<F>);
    high = vmulq_n_f32(high, kFp16Factor<F>);
  }
  return vuzp2q_u16(vreinterpretq_u16_f32(low), vreinterpretq_u16_f32(high));
}

template <class F>
FP8_INLINE void load_as_bf16(const uint8_t* const* from, Runs (&runs)[2]) {
  for (int q = 0; q < 4; ++q) {
    const uint16x8x2_t values = to_fp16<F>(vld1q_u8(from[q]));
    runs[0].run[q] = to_bf16<F>(values.val[0]);
    runs[1].run[q] = to_bf16<F>(values.val[1]);
  }
}

}  // namespace fp8serve::gemm
#endif
