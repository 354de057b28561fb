// RMSNorm and the gated activation, one row at a time: what the fused ops and the plain ones share, so that a
// model gives the same bits whichever of them runs it.
#pragma once

#include <cmath>
#include <type_traits>

#include "cpu/isa.h"
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

template <class T>
FP8_INLINE void norm_row(const T* x, const T* weight, T* y, int64_t n, float eps) {
  const float factor = norm_factor(x, n, eps);
  for (int64_t i = 0; i < n; ++i) store(load(weight[i]) * rounded<T>(load(x[i]) * factor), y + i);
}

template <class T>
FP8_INLINE void silu_mul_row_plain(const T* gate, const T* up, T* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float x = load(gate[i]);
    store(rounded<T>(x / (1.0f + exp_of(-x))) * load(up[i]), y + i);
  }
}

// The same bits with AVX-512.
void silu_mul_row_zmm(const BF16* gate, const BF16* up, BF16* y, int64_t n);

template <class T>
FP8_INLINE void silu_mul_row(const T* gate, const T* up, T* y, int64_t n) {
#if FP8_X86
  if constexpr (std::is_same_v<T, BF16>) {
    if (isa() >= Isa::avx512) return silu_mul_row_zmm(gate, up, y, n);
  }
#endif
  silu_mul_row_plain(gate, up, y, n);
}

}  // namespace fp8serve
