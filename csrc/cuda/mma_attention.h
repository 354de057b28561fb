// The instructions that attention on tensor cores needs beyond those of device.h and mma_bf16.h.
#pragma once

#include "cuda/mma_bf16.h"

namespace fp8serve {

#ifdef __CUDACC__
// An address in shared memory as a number, so that swizzled addresses can be computed from another by xor.
using Place = uint32_t;
__device__ __forceinline__ Place place_of(const void* shared) {
  return static_cast<Place>(__cvta_generic_to_shared(shared));
}

// Returns `place`, hidden from the compiler, which then computes the addresses that follow from it anew in
// every iteration of a loop instead of keeping them in registers.
__device__ __forceinline__ Place found_anew(Place place) {
  asm volatile("" : "+r"(place));
  return place;
}

// As `copy_async` (device.h), to an address in shared memory.
__device__ __forceinline__ void copy_async_to(Place to, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

// Loads four 8 x 8 matrices of 16-bit elements. Lane i passes the address of row i%8 of matrix i/8. Lane 4g
// + t gets columns 2t and 2t + 1 of row g; transposed, rows 2t and 2t + 1 of column g.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices_at(uint32_t (&r)[4], Place row) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
  }
}

// Converts two FP32 numbers to two BF16 numbers, low first, to nearest even.
__device__ __forceinline__ uint32_t bfloat_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Returns 2^x within 2 units in the last place; 0 for minus infinity and for results below the normal
// numbers.
__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

}  // namespace fp8serve
