// The end of a sum: scales, bias, rounding, residual, store. It runs right after the tile, while the sums
// are in registers or the nearest cache: as a separate pass over the finished sums it took a sixth of a K =
// 256 GEMM. This is plain C++; gemm_zmm.h has the AVX-512 version.
#pragma once

#include "cpu/gemm.h"
#include "cpu/tensors.h"

namespace fp8serve::gemm {

template <class T>
FP8_INLINE void end_row_as(const Ending& e, int64_t row, const float* sums) {
  const int64_t at = row * e.stride;
  const float a_scale = e.a_scale[row];
  T done[kGroup];
  for (int64_t c = 0; c < e.columns; ++c) store(sums[c] * a_scale * e.b_scale[c] + e.bias[c], done + c);
  const T* residual = static_cast<const T*>(e.residual) + (e.residual == nullptr ? 0 : at);
  for (int64_t c = 0; c < e.columns && residual != nullptr; ++c)
    store(load(residual[c]) + load(done[c]), done + c);
  std::copy_n(done, e.columns, static_cast<T*>(e.out) + at);
}

// sums [16] of the tile's row `row`.
FP8_INLINE void end_row(const Ending& e, int64_t row, const float* sums) {
  if (e.type == ScalarType::BFloat16) return end_row_as<BF16>(e, row, sums);
  if (e.type == ScalarType::Half) return end_row_as<F16>(e, row, sums);
  end_row_as<float>(e, row, sums);
}

}  // namespace fp8serve::gemm
