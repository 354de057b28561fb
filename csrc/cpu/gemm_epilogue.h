// The epilogue of a GEMM: scales, bias, rounding, residual, store. A tile applies it while its sums are in
// registers or in the first-level cache: a separate pass over the sums took a sixth of the time of a GEMM
// with K = 256. This is plain C++; gemm_zmm.h has the AVX-512 version.
#pragma once

#include "cpu/gemm.h"
#include "cpu/tensors.h"

namespace fp8serve::gemm {

template <class T>
FP8_INLINE void apply_epilogue_as(const Epilogue& e, int64_t row, const float* sums) {
  const int64_t at = row * e.stride;
  const float a_scale = e.a_scale[row];
  T results[kGroup];
  for (int64_t c = 0; c < e.columns; ++c) store(sums[c] * a_scale * e.b_scale[c] + e.bias[c], results + c);
  const T* residual = static_cast<const T*>(e.residual) + (e.residual == nullptr ? 0 : at);
  for (int64_t c = 0; c < e.columns && residual != nullptr; ++c)
    store(load(residual[c]) + load(results[c]), results + c);
  std::copy_n(results, e.columns, static_cast<T*>(e.out) + at);
}

// Applies the epilogue to `sums` [16] of the tile's row `row`.
FP8_INLINE void apply_epilogue(const Epilogue& e, int64_t row, const float* sums) {
  if (e.type == ScalarType::BFloat16) return apply_epilogue_as<BF16>(e, row, sums);
  if (e.type == ScalarType::Half) return apply_epilogue_as<F16>(e, row, sums);
  apply_epilogue_as<float>(e, row, sums);
}

}  // namespace fp8serve::gemm
