// The BF16 counterpart of `mma` in device.h. Its fragments hold the same bytes in the same lanes, with k
// counted in bytes, so a kernel written for FP8 can multiply BF16 with this instruction instead.
#pragma once

#include "cuda/device.h"

namespace fp8serve {

#ifdef __CUDACC__
// c[16 x 8] += a[16 x 16] b[8 x 16]^T in BF16 with FP32 sums.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

}  // namespace fp8serve
