// Blocks of one launch that work together: they wait for each other's results in global memory, or access
// each other's shared memory.
//
// The blocks of a cooperative launch are all resident, so one may wait for another. What a thread wrote
// before store_release() or add_release(), and what the threads of its block wrote before a __syncthreads()
// that came first, is visible to a thread that reads the value with load_acquire(), and after another
// __syncthreads() to its block. It must not be read with ld.global.nc (`load_once`).
//
// A cluster is a number of blocks with neighbouring blockIdx.x. Between cluster_arrive() and cluster_wait(),
// which all threads call in turn, a thread may do what concerns no other block. After cluster_wait() it sees
// what all threads of the cluster did before they arrived. A block must not access the shared memory of
// another that has not begun or has ended: a barrier of the cluster comes before the first access and after
// the last.
#pragma once

#include "cuda/device.h"

namespace fp8serve {

template <class... P, class... A>
void launch_with(const cudaLaunchAttribute& attribute, void (*kernel)(P...), dim3 grid, int threads,
                 int shared_bytes, Stream stream, const A&... args) {
  shared_memory.need(reinterpret_cast<const void*>(kernel), shared_bytes);
  cudaLaunchAttribute attributes[] = {attribute};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...));
}

// The grid must fit the device: CUDA refuses a cooperative launch of which not all blocks can be resident.
template <class... P, class... A>
void launch_cooperative(void (*kernel)(P...), dim3 grid, int threads, int shared_bytes, Stream stream,
                        const A&... args) {
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  launch_with(cooperative, kernel, grid, threads, shared_bytes, stream, args...);
}

// grid.x must be a multiple of `cluster`, the number of blocks of a cluster.
template <class... P, class... A>
void launch_clusters(void (*kernel)(P...), dim3 grid, int cluster, int threads, int shared_bytes,
                     Stream stream, const A&... args) {
  cudaLaunchAttribute clusters{};
  clusters.id = cudaLaunchAttributeClusterDimension;
  clusters.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  launch_with(clusters, kernel, grid, threads, shared_bytes, stream, args...);
}

#ifdef __CUDACC__

__device__ __forceinline__ unsigned load_acquire(const unsigned* at) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(unsigned* at, unsigned value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ void add_release(unsigned* at, unsigned value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ int rank_in_cluster() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Whole warps call these together.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Returns where the variable `shared` of this block lies in the block of that rank in the cluster.
template <class T>
__device__ __forceinline__ T* shared_of_rank(T* shared, int rank) {
  T* mapped;
  asm("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(shared), "r"(rank));
  return mapped;
}
#endif

#endif  // __CUDACC__

}  // namespace fp8serve
