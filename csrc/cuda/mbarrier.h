// Barriers in shared memory (mbarrier), bulk copies that arrive at them, and barriers of some warps of a
// block: for a warp that loads what the others compute with.
//
// A phase of an Mbarrier ends when all its arrivals have come, and all bytes that they expect. Its phases
// have parities 0, 1, 0 ... mbarrier_wait(at, p) waits until the current phase has another parity than p, and
// then sees what the threads that arrived in the phase before did. One thread initializes it; a
// __syncthreads() must follow.
//
// A bulk copy reads global memory by the asynchronous proxy, so only what was written before the launch.
#pragma once

#include "cuda/device.h"

namespace fp8serve {

using Mbarrier = uint64_t;

#if defined(__CUDACC__) && (!defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900)
__device__ __forceinline__ uint32_t address_of(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

__device__ __forceinline__ void mbarrier_init(Mbarrier* at, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address_of(at)), "r"(arrivals) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // for the copies that arrive at it
}
__device__ __forceinline__ void mbarrier_arrive(Mbarrier* at) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(address_of(at)) : "memory");
}
// Arrives, and makes the phase last until so many bytes have been copied.
__device__ __forceinline__ void mbarrier_arrive_expecting(Mbarrier* at, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(address_of(at)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void mbarrier_wait(Mbarrier* at, int parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(address_of(at)),
      "r"(parity)
      : "memory");
}

// Copies a multiple of 16 bytes from global to shared memory; both are aligned to 16 bytes.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, int bytes, Mbarrier* at) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          address_of(shared)),
      "l"(global), "r"(bytes), "r"(address_of(at))
      : "memory");
}
#endif

#ifdef __CUDACC__
// A barrier of so many threads, whole warps of the block. `id`: 1 to 15; 0 is __syncthreads().
__device__ __forceinline__ void sync_warps(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
#endif

}  // namespace fp8serve
