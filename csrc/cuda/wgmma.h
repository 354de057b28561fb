// Hopper's products of warpgroups (wgmma) in BF16 with FP32 sums, and the fences and waits that order their
// asynchronous reads and writes. Four warps compute a matrix of 64 rows together; each holds 16 rows of it,
// in the fragments of mma.
//
// wgmma() issues a product, which then runs asynchronously. Before it, the threads call wgmma_fence(), which
// orders their accesses to the product's registers. If they have written its shared memory, they first make
// the writes visible with fence_async_proxy(), and then pass a barrier. wgmma_commit() makes a group of the
// products issued so far. Until wgmma_wait<>() has waited for the group, the threads must not touch the
// registers of sums and of left operands, nor the shared memory. `hold` keeps the compiler from moving
// accesses to these registers past an instruction that does not name them.
#pragma once

#include "cuda/device.h"
#include "cuda/wgmma_matrix.h"

namespace fp8serve {

#ifdef __CUDACC__
__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

template <int kEights>
__device__ __forceinline__ void hold(float (&sums)[kEights][4]) {
#pragma unroll
  for (int n = 0; n < kEights; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(sums[n][e])::"memory");
  }
}
template <int kSteps>
__device__ __forceinline__ void hold(uint32_t (&words)[kSteps][4]) {
#pragma unroll
  for (int n = 0; n < kSteps; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(words[n][e])::"memory");
  }
}

#define FP8SERVE_FOUR(c, n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define FP8SERVE_32(c)                                                                                     \
  FP8SERVE_FOUR(c, 0), FP8SERVE_FOUR(c, 1), FP8SERVE_FOUR(c, 2), FP8SERVE_FOUR(c, 3), FP8SERVE_FOUR(c, 4), \
      FP8SERVE_FOUR(c, 5), FP8SERVE_FOUR(c, 6), FP8SERVE_FOUR(c, 7)
#define FP8SERVE_64(c)                                                                                  \
  FP8SERVE_32(c), FP8SERVE_FOUR(c, 8), FP8SERVE_FOUR(c, 9), FP8SERVE_FOUR(c, 10), FP8SERVE_FOUR(c, 11), \
      FP8SERVE_FOUR(c, 12), FP8SERVE_FOUR(c, 13), FP8SERVE_FOUR(c, 14), FP8SERVE_FOUR(c, 15)
#define FP8SERVE_NAMES_32                                                                            \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FP8SERVE_NAMES_64                                                              \
  FP8SERVE_NAMES_32                                                                    \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// c[64 x 64] (+)= a[64 x 16] b[64 x 16]^T, both in shared memory; kAdd: adds to c instead of replacing it.
template <bool kAdd>
__device__ __forceinline__ void wgmma(float (&c)[8][4], uint64_t a, uint64_t b) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " FP8SERVE_NAMES_32
      "}, %32, %33, p, 1, 1, 0, 0; }"
      : FP8SERVE_32(c)
      : "l"(a), "l"(b), "n"(kAdd ? 1 : 0)
      : "memory");
}

// c[64 x N] += a[64 x 16] b[16 x N], a in registers, b in shared memory with N contiguous; N is 64 or 128.
__device__ __forceinline__ void wgmma(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " FP8SERVE_NAMES_32
               "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
               : FP8SERVE_32(c)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
               : "memory");
}
__device__ __forceinline__ void wgmma(float (&c)[16][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " FP8SERVE_NAMES_64
               "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
               : FP8SERVE_64(c)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
               : "memory");
}
#undef FP8SERVE_FOUR
#undef FP8SERVE_32
#undef FP8SERVE_64
#undef FP8SERVE_NAMES_32
#undef FP8SERVE_NAMES_64
#endif

}  // namespace fp8serve
