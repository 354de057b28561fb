// A kernel that calls every function of cooperative.h and mbarrier.h, and its launches: no kernel of the
// library uses them yet, and the emulator has its own, so only this file compiles them.
#include "cuda/cooperative.h"
#include "cuda/mbarrier.h"

using namespace fp8serve;

__global__ void probe_blocks(unsigned* counter, const float* x, float* out) {
  __shared__ Mbarrier landed;
  __shared__ alignas(16) float values[32];
  if (threadIdx.x == 0) mbarrier_init(&landed, 2);
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expecting(&landed, sizeof(values));
    bulk_copy(values, x, sizeof(values), &landed);
    mbarrier_arrive(&landed);
  }
  mbarrier_wait(&landed, 0);
  sync_warps(1, 32);
  cluster_arrive();
  cluster_wait();
  out[threadIdx.x] = *shared_of_rank(&values[threadIdx.x], rank_in_cluster() ^ 1);
  cluster_arrive();
  cluster_wait();
  if (load_acquire(counter) == 0) store_release(counter, 1);
  add_release(counter, 1);
}

void launch_probes(unsigned* counter, const float* x, float* out, Stream stream) {
  launch_cooperative(probe_blocks, dim3(1), 32, 0, stream, counter, x, out);
  launch_clusters(probe_blocks, dim3(2), 2, 32, 0, stream, counter, x, out);
}
