// RMSNorm, the gated activation and rotary, one row at a time. The fused ops and the plain ones share them,
// so that a model gives the same bits with either.
#pragma once

#include <cmath>
#include <type_traits>

#include "cpu/features.h"
#include "cpu/rows.h"
#include "cpu/vectormath.h"

namespace fp8serve {

// 1 / sqrt(mean of squares + eps): 16 running sums, added as a tree.
template <class T>
FP8_INLINE float norm_factor(const T* x, int64_t n, float eps) {
  float lanes[16] = {};
  const int64_t whole = n / 16 * 16;
  for (int64_t i = 0; i < whole; i += 16) {
    for (int j = 0; j < 16; ++j) lanes[j] += load(x[i + j]) * load(x[i + j]);
  }
  for (int64_t i = whole; i < n; ++i) lanes[i - whole] += load(x[i]) * load(x[i]);
  return 1.0f / std::sqrt(lane_sum(lanes) / static_cast<float>(n) + eps);
}

// The loops over BF16 with AVX-512, with the same bits, for whole strips of values (elementwise_zmm.cpp).
constexpr int64_t kStrip = 32;
void norm_row_zmm(const BF16* x, const BF16* weight, BF16* y, int64_t n, float factor);
void silu_mul_row_zmm(const BF16* gate, const BF16* up, BF16* y, int64_t n);
void rotate_heads_zmm(const BF16* x, const BF16* cos, const BF16* sin, BF16* y, int64_t heads, int64_t dim);

// Returns how many of n values these loops process.
template <class T>
FP8_INLINE int64_t in_strips(int64_t n) {
  return FP8_X86 && std::is_same_v<T, BF16> && has(kAvx512) ? n / kStrip * kStrip : 0;
}

template <class T>
FP8_INLINE void norm_row_plain(const T* x, const T* weight, T* y, int64_t n, float factor) {
  for (int64_t i = 0; i < n; ++i) store(load(weight[i]) * rounded<T>(load(x[i]) * factor), y + i);
}

template <class T>
FP8_INLINE void norm_row(const T* x, const T* weight, T* y, int64_t n, float eps) {
  const float factor = norm_factor(x, n, eps);
  const int64_t strips = in_strips<T>(n);
#if FP8_X86
  if constexpr (std::is_same_v<T, BF16>) {
    if (strips > 0) norm_row_zmm(x, weight, y, strips, factor);
  }
#endif
  norm_row_plain(x + strips, weight + strips, y + strips, n - strips, factor);
}

template <class T>
FP8_INLINE void silu_mul_row_plain(const T* gate, const T* up, T* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float x = load(gate[i]);
    store(rounded<T>(x / (1.0f + exp_of(-x))) * load(up[i]), y + i);
  }
}

template <class T>
FP8_INLINE void silu_mul_row(const T* gate, const T* up, T* y, int64_t n) {
  const int64_t strips = in_strips<T>(n);
#if FP8_X86
  if constexpr (std::is_same_v<T, BF16>) {
    if (strips > 0) silu_mul_row_zmm(gate, up, y, strips);
  }
#endif
  silu_mul_row_plain(gate + strips, up + strips, y + strips, n - strips);
}

// Half a head: a * cos + sign * b * sin. The arrays do not overlap; `__restrict` lets the compiler vectorise
// the loop.
template <class T>
FP8_INLINE void rotate_half(const T* __restrict a, const T* __restrict b, const T* __restrict cos,
                            const T* __restrict sin, T* __restrict y, float sign, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    store(rounded<T>(load(a[i]) * load(cos[i])) + rounded<T>(sign * load(b[i]) * load(sin[i])), y + i);
  }
}

// One token's heads: x * cos + (-second half, first half) * sin.
template <class T>
FP8_INLINE void rotate_heads(const T* x, const T* cos, const T* sin, T* y, int64_t heads, int64_t dim) {
  const int64_t half = dim / 2;
#if FP8_X86
  if constexpr (std::is_same_v<T, BF16>) {
    if (half > 0 && in_strips<T>(half) == half) return rotate_heads_zmm(x, cos, sin, y, heads, dim);
  }
#endif
  for (int64_t h = 0; h < heads; ++h) {
    const T *first = x + h * dim, *second = first + half;
    rotate_half(first, second, cos, sin, y + h * dim, -1.0f, half);
    rotate_half(second, first, cos + half, sin + half, y + h * dim + half, 1.0f, half);
  }
}

}  // namespace fp8serve
