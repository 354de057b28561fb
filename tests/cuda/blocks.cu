// Small kernels whose blocks work together: a program (emulator/program.h) that runs the kernel of a name,
// and returns its results (test_blocks.py).
#include <functional>
#include <map>
#include <memory>
#include <sstream>

#include "cuda/amax_scratch.h"
#include "cuda/cooperative.h"
#include "cuda/mbarrier.h"
#include "program.h"

namespace fp8serve {
namespace {

constexpr int kBlocks = 4, kThreads = 64, kPages = 5, kStages = 2;

// What the blocks of a launch share in global memory.
struct Work {
  int values[kBlocks][kThreads];
  unsigned ready[kBlocks];
  unsigned arrived;
  int sum;
  unsigned order[4 * kBlocks];
  alignas(16) int pages[kPages][kThreads];
};

__device__ void wait_until(const unsigned* counter, unsigned target) {
  while (load_acquire(counter) < target) {
  }
}

// A block adds one to each value of the block before it.
__global__ void pass_along(Work* work) {
  const int block = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  if (block > 0 && thread == 0) wait_until(&work->ready[block - 1], 1);
  __syncthreads();
  // the threads of a block read each other's values
  const int before = block == 0 ? thread : work->values[block - 1][(thread + 32) % kThreads];
  work->values[block][thread] = before + 1;
  __syncthreads();
  if (thread == 0) store_release(&work->ready[block], 1);
}

// The first block adds the values of all others, which count themselves.
__global__ void gather(Work* work) {
  const int block = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  work->values[block][thread] = block;
  __syncthreads();
  if (thread != 0) return;
  if (block != 0) return add_release(&work->arrived, 1);
  wait_until(&work->arrived, kBlocks - 1);
  for (const auto& values : work->values) work->sum += values[kThreads - 1];
}

// The last block to arrive adds the values of all others.
__global__ void last_adds(Work* work) {
  work->values[blockIdx.x][threadIdx.x] = static_cast<int>(blockIdx.x);
  __syncthreads();
  if (threadIdx.x != 0 || !is_last({nullptr, &work->arrived}, kBlocks)) return;
  for (const auto& values : work->values) work->sum += values[kThreads - 1];
}

// Each block adds to its values those that the other block of its cluster has in shared memory.
__global__ void exchange_in_cluster(Work* work) {
  int* const own = reinterpret_cast<int*>(dynamic_shared());
  const int thread = static_cast<int>(threadIdx.x), rank = rank_in_cluster();
  own[thread] = static_cast<int>(100 * blockIdx.x) + thread;
  cluster_arrive();
  cluster_wait();
  const int* const other = shared_of_rank(own, 1 - rank);
  work->values[blockIdx.x][thread] = own[thread] + other[(thread + 1) % kThreads];
  cluster_arrive();
  cluster_wait();
}

// Two warps add pages that a third one loads into a ring, and pass each other the sums.
struct Ring {
  alignas(16) int pages[kStages][kThreads];
  int sums[kThreads];
  Mbarrier full[kStages], free[kStages];
};

__device__ void load_pages(const Work* work, Ring& ring) {
  for (int page = 0; page < kPages; ++page) {
    const int stage = page % kStages;
    mbarrier_wait(&ring.free[stage], 1 - page / kStages % 2);
    mbarrier_arrive_expecting(&ring.full[stage], sizeof(ring.pages[0]));
    bulk_copy(ring.pages[stage], work->pages[page], sizeof(ring.pages[0]), &ring.full[stage]);
  }
}

__global__ void stream_pages(Work* work) {
  Ring& ring = *reinterpret_cast<Ring*>(dynamic_shared());
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kStages) {
    mbarrier_init(&ring.full[thread], 1);
    mbarrier_init(&ring.free[thread], kThreads);
  }
  __syncthreads();
  if (thread == kThreads) load_pages(work, ring);
  if (thread >= kThreads) return;
  int sum = 0;
  for (int page = 0; page < kPages; ++page) {
    const int stage = page % kStages;
    mbarrier_wait(&ring.full[stage], page / kStages % 2);
    sum += ring.pages[stage][(thread + 1) % kThreads];
    mbarrier_arrive(&ring.free[stage]);
  }
  ring.sums[thread] = sum;
  sync_warps(1, kThreads);
  work->values[blockIdx.x][thread] = ring.sums[(thread + 1) % kThreads];
}

// Copies a page that another thread of the block has written.
__global__ void copy_new_page(Work* work) {
  Ring& ring = *reinterpret_cast<Ring*>(dynamic_shared());
  if (threadIdx.x == 0) mbarrier_init(&ring.full[0], 1);
  work->pages[0][threadIdx.x] = 1;
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expecting(&ring.full[0], sizeof(ring.pages[0]));
    bulk_copy(ring.pages[0], work->pages[0], sizeof(ring.pages[0]), &ring.full[0]);
  }
  mbarrier_wait(&ring.full[0], 0);
  work->values[blockIdx.x][threadIdx.x] = ring.pages[0][threadIdx.x];
}

// Every block waits for the next one.
__global__ void wait_in_circle(Work* work) {
  wait_until(&work->ready[(blockIdx.x + 1) % kBlocks], 1);
  store_release(&work->ready[blockIdx.x], 1);
}

// One block of a cluster waits for the other, which waits at the cluster's barrier.
__global__ void miss_a_barrier(Work* work) {
  if (blockIdx.x == 1) wait_until(&work->ready[0], 1);
  cluster_arrive();
  cluster_wait();
}

__global__ void arrive_twice(Work*) {
  cluster_arrive();
  cluster_arrive();
}

// Writes the order in which blocks take their turns.
__global__ void take_turns(Work* work) {
  for (int turn = 0; turn < 4; ++turn) {
    if (threadIdx.x == 0) work->order[atomicAdd(&work->arrived, 1u)] = blockIdx.x;
    __syncthreads();
  }
}

int declared[kThreads];  // static shared memory, as tests/cuda/emulated.py finds it

__global__ void use_declared(Work*) { declared[threadIdx.x] = 1; }

using Kernel = void (*)(Work*);
using Launch = std::function<void(Work*)>;

Launch cooperative(Kernel kernel, int blocks = kBlocks) {
  return [=](Work* work) {
    launch_cooperative(kernel, dim3(static_cast<unsigned>(blocks)), kThreads, 0, nullptr, work);
  };
}
Launch cluster(Kernel kernel) {
  return
      [=](Work* work) { launch_clusters(kernel, dim3(kBlocks), 2, kThreads, 4 * kThreads, nullptr, work); };
}

const std::map<std::string, Launch> kLaunches{
    {"pass_along", cooperative(pass_along)},
    {"gather", cooperative(gather)},
    {"last_adds", cooperative(last_adds)},
    {"exchange_in_cluster", cluster(exchange_in_cluster)},
    {"stream_pages",
     [](Work* work) { launch(stream_pages, dim3(kBlocks), kThreads + 32, sizeof(Ring), nullptr, work); }},
    {"copy_new_page",
     [](Work* work) { launch(copy_new_page, dim3(1), kThreads, sizeof(Ring), nullptr, work); }},
    {"wait_in_circle", cooperative(wait_in_circle)},
    {"miss_a_barrier", cluster(miss_a_barrier)},
    {"arrive_twice", cluster(arrive_twice)},
    {"take_turns", cooperative(take_turns)},
    {"use_declared", cooperative(use_declared)},
    {"too many blocks", cooperative(last_adds, 4 * 32 + 1)},
    {"pass_along, ordinary",
     [](Work* work) { launch(pass_along, dim3(kBlocks), kThreads, 0, nullptr, work); }},
    {"wait_in_circle, ordinary",
     [](Work* work) { launch(wait_in_circle, dim3(kBlocks), kThreads, 0, nullptr, work); }},
};

std::string results(const Work& work) {
  std::ostringstream out;
  for (const auto& values : work.values) out << values[0] << ' ' << values[kThreads - 1] << ' ';
  out << "sum " << work.sum << " order";
  for (const unsigned block : work.order) out << ' ' << block;
  return out.str();
}

std::string run(const char* kernel) {
  auto work = std::make_unique<Work>();
  for (int i = 0; i < kPages * kThreads; ++i) work->pages[i / kThreads][i % kThreads] = i;
  kLaunches.at(kernel)(work.get());
  return results(*work);
}

}  // namespace
}  // namespace fp8serve

int main(int, char** arguments) {
  using fp8serve::emulator::settings;
  settings.declared = {{fp8serve::declared, sizeof(fp8serve::declared)}};
  settings.chip = {90, 4, 227 * 1024};
  fp8serve::emulator::run_program(arguments, fp8serve::run);
}
