// What the GEMM levels for NEON share: FP32 sums of four columns in four registers, and FP8 -> BF16.
#pragma once

#include "cpu/features.h"
#include "cpu/gemm_epilogue.h"
#include "cpu/gemm_fp32.h"

#if FP8_NEON
#include <arm_neon.h>

namespace fp8serve::gemm {

struct Quads {
  float32x4_t quad[4];  // four lanes of each column
};
using Vector = Quads;
using Sums = Quads;

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
  uint16x8_t run[4];  // BF16, of columns i, i + 4, i + 8 and i + 12
};

// Eight FP8 values -> BF16: (magnitude << shift) + bias; subnormal values, infinity and NaN from a table of
// the low three bits of the magnitude.
template <class F>
FP8_INLINE uint16x8_t widen(uint8x8_t values) {
  using Code = Bf16Code<F>;
  const uint16x8_t x = vmovl_u8(values), magnitude = vandq_u16(x, vdupq_n_u16(0x7f));
  const uint16x8_t normal =
      vaddq_u16(vshlq_n_u16(magnitude, Code::shift), vdupq_n_u16(static_cast<uint16_t>(Code::bias)));
  const uint16x8_t subnormal = vcltq_u16(magnitude, vdupq_n_u16(Code::first_normal));
  const uint16x8_t above = vcgtq_u16(magnitude, vdupq_n_u16(Code::last_normal));
  // the two bytes of entry m are bytes 2 m and 2 m + 1 of the table
  const uint16x8_t bytes = vmlaq_n_u16(vdupq_n_u16(0x0100), vandq_u16(magnitude, vdupq_n_u16(7)), 0x0202);
  const uint8x16_t table = vreinterpretq_u8_u16(vld1q_u16(kLow<F>.special));
  const uint16x8_t entry = vreinterpretq_u16_u8(vqtbl1q_u8(table, vreinterpretq_u8_u16(bytes)));
  uint16x8_t value;
  if constexpr (F::mantissa == 3) {
    value = vbslq_u16(subnormal, entry, normal);
    value = vbslq_u16(above, vdupq_n_u16(Code::nan), value);
  } else {
    value = vbslq_u16(vorrq_u16(subnormal, above), entry, normal);
  }
  return vorrq_u16(value, vandq_u16(vshlq_n_u16(x, 8), vdupq_n_u16(0x8000)));
}

template <class F>
FP8_INLINE void load_fp8(const uint8_t* const* from, Runs (&runs)[2]) {
  for (int q = 0; q < 4; ++q) {
    const uint8x16_t values = vld1q_u8(from[q]);
    runs[0].run[q] = widen<F>(vget_low_u8(values));
    runs[1].run[q] = widen<F>(vget_high_u8(values));
  }
}
FP8_INLINE void load_values(const uint16_t* const* from, Runs (&runs)[2]) {
  for (int q = 0; q < 4; ++q) {
    runs[0].run[q] = vld1q_u16(from[q]);
    runs[1].run[q] = vld1q_u16(from[q] + kRun);
  }
}

}  // namespace fp8serve::gemm
#endif
