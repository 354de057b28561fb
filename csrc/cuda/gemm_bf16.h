// BF16 products by the kernels for FP8: a and b hold BF16, k is the number of bytes in a row, and the scales
// are not used.
#pragma once

#include "cuda/gemm.h"
#include "cuda/mma_bf16.h"

namespace fp8serve {

enum class Element { e4m3, e5m2, bf16 };

template <Element kA, Element kB>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (kA == Element::bf16) {
    mma_bf16(c, a, b);
  } else {
    mma<kA == Element::e5m2, kB == Element::e5m2>(c, a, b);
  }
}

void gemm_mma_bf16(const Gemm& g, const OnDevice& device);
void gemm_skinny_bf16(const Gemm& g, const OnDevice& device);
void gemm_tall_bf16(const Gemm& g, const OnDevice& device);

}  // namespace fp8serve
