// The threads of an emulated GPU: fibers on one processor, and the barriers at which they wait for each
// other. A thread runs until it reaches a barrier or a warp-wide instruction, and continues when the other
// threads have reached it. grid.h decides which block runs.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <source_location>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "races.h"
#include "settings.h"
#include "stack.h"

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}  // NOLINT: as in CUDA
};

namespace fp8serve::emulator {

enum class State { ready, at_block_barrier, at_warp_barrier, at_warps_barrier, at_cluster_barrier, done };

struct Copy {
  void* to;
  const void* from;
  bool valid;
};

// A thread's part of a warpgroup's product (wgmma.h), between its issue and the end of the wait for it.
struct Product {
  float* sums;           // of `count`, in the thread's registers
  const uint32_t* left;  // the left operand's registers, or null for a matrix in shared memory
  uint64_t a, b;         // descriptors
  int count;
  bool adds, columns_of_k;    // adds to the sums; b's columns, not its rows, are the dimension K
  std::vector<float> addend;  // the sums before the product, if it is the first in flight that writes them
};
struct Products {
  std::vector<Product> issued;
  std::unique_ptr<char> done = std::make_unique<char>();  // a point in time, for ThreadSanitizer
};

struct Thread {
  Stack stack;
  void* fiber = nullptr;  // as ThreadSanitizer knows it
  State state = State::done;
  std::vector<std::vector<Copy>> copies;  // by group; the last one is open
  alignas(16) unsigned char slot[96];     // the value that this lane passes to its warp
  unsigned block_barriers = 0, warp_barriers = 0;
  unsigned cluster_arrivals = 0, cluster_waits = 0;
  bool has_waited = false;         // for earlier kernels
  std::vector<Products> products;  // by group; the last one is open
  bool fenced = false;             // wgmma_fence() was called
  // Fibers for the asynchronous accesses of the thread's products: to its registers, and to shared memory.
  void *of_registers = nullptr, *of_memory = nullptr;
  char fence, proxy_fence;  // points in time
  // Fibers that carry what __threadfence() orders to and from atomic operations (races.h), and their points.
  void *of_releases = nullptr, *of_acquires = nullptr;
  char before_fence, after_fence;
  // Fibers for the accesses of the thread's bulk copies (mbarrier.h), and the point of their issue.
  void *of_copy_reads = nullptr, *of_copy_writes = nullptr;
  char copy_issue;
  int warps_barrier = 0;  // the one at which it waits
};

struct BulkCopy {
  void* to;
  const void* from;
  size_t bytes;
};

// A barrier in shared memory (mbarrier.h). Copies are issued in a phase, and land after it.
struct MbarrierState {
  int arrivals = 0, missing = 0;
  size_t expected = 0;  // bytes
  unsigned phase = 0;
  std::vector<BulkCopy> issued, landing;
  char point[2];
};

// A barrier of some warps of a block.
struct WarpsBarrier {
  int waiting = 0;
  unsigned turn = 0;
  char point[2];
};

// A block that is resident on the GPU, or a free slot for one.
struct Block {
  std::deque<Thread> threads;
  std::vector<unsigned char> shared = std::vector<unsigned char>(kMostShared + 1024);
  // Points in time, for ThreadSanitizer. Barriers have two in turn: a thread may reach the next barrier
  // before another leaves this one.
  char start, finish;
  char block_barrier[2], warp_barrier[32][2];
  char proxy_barrier[2];  // as block_barrier, for the products' accesses to shared memory
  char cluster_barrier[2];
  WarpsBarrier warps_barriers[16];
  std::map<const void*, MbarrierState> mbarriers;
  void* owner = nullptr;  // the fiber that owns the shared memory before the block begins and after it ends
  int running = 0;        // the thread
  dim3 thread_index, index;
  unsigned number = 0, place = 0;  // in the grid, in Machine::blocks
  bool resident = false;           // it has begun, and has not ended
  std::source_location polled;     // where a thread last read a word that another block may write
  Thread& self() { return threads[static_cast<size_t>(running)]; }
  unsigned char* dynamic_shared() {
    return reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(shared.data()) + 1023) / 1024 *
                                            1024);
  }
};

// The running launch.
struct Machine {
  std::deque<Block> blocks = std::deque<Block>(1);  // places of resident blocks
  Block* block = &blocks.front();                   // that runs
  Stack::Place scheduler;
  void *scheduler_fiber = nullptr, *earlier_fiber = nullptr;
  char start, finish, earlier;  // points in time, for ThreadSanitizer; `earlier`: writes of preceding kernels
  bool early = false;           // the kernel was launched while preceding ones run
  bool concurrent = false;      // several blocks are resident
  unsigned cluster = 1;         // blocks of a cluster, whose places are neighbours
  int count = 0, shared_bytes = 0;  // of a block: threads, dynamic shared memory
  std::function<void()> body;
  bool did_not_wait = false;  // some thread of the launch did not wait for preceding kernels
  bool has_products = false;  // some thread ended with products that it had not waited for
  std::string refused;        // the error that stopped a thread; a fiber cannot throw it out of itself
  unsigned long polls = 0;    // since a thread ended or wrote a word atomically
  dim3 block_size, grid_size;
  Thread& self() { return block->self(); }
  int lane() const { return block->running % 32; }
};

inline Machine machine;

inline void to_scheduler() {
  races::before_switch_to(machine.scheduler_fiber);
  switch_stack(machine.self().stack.place, machine.scheduler);
}

// Ends the launch with this error. The thread never continues.
[[noreturn]] inline void refuse(const char* why) {
  races::stop_watching();
  machine.refused = std::string("emulator: ") + why;
  machine.self().state = State::done;
  races::watch();
  for (;;) to_scheduler();
}

inline bool has_products(const Thread& thread) {
  return thread.products.size() > 1 || !thread.products.back().issued.empty();
}

inline void enter() {
  races::happens_after(&machine.start);
  races::happens_after(&machine.block->start);
  if (!machine.early) races::happens_after(&machine.earlier);
  machine.body();
  races::happens_before(&machine.finish);
  races::happens_before(&machine.block->finish);
  races::stop_watching();
  machine.polls = 0;
  machine.did_not_wait |= machine.early && !machine.self().has_waited;
  machine.has_products |= has_products(machine.self());
  machine.self().state = State::done;
  races::watch();
  to_scheduler();
}

// If the wait is left out (not `executed`), it counts as called, but orders nothing.
inline void wait_for_earlier_kernels(bool executed) {
  races::stop_watching();
  machine.self().has_waited = true;
  races::watch();
  if (executed) races::happens_after(&machine.earlier);
}

// Writes this memory as a preceding kernel would, on a fiber of its own, which only `earlier` orders before
// later kernels. Its variables have to be in registers, because the fiber must not read what the host wrote.
inline void write_earlier(void* at, size_t bytes) {
  void *const here = races::this_fiber(), *const other = machine.earlier_fiber;
  races::before_switch_to(other);
  races::happens_after(&machine.finish);
  races::writes(at, bytes);
  races::happens_before(&machine.earlier);
  races::before_switch_to(here);
}

inline void run_earlier_kernel() {
  if (machine.earlier_fiber == nullptr) machine.earlier_fiber = races::new_fiber();
  for (const Memory& memory : settings.earlier) write_earlier(memory.at, memory.bytes);
}

// Suspends the thread until all others have reached such a barrier. Orders no accesses to memory.
inline void wait(State barrier) {
  races::stop_watching();
  machine.self().state = barrier;
  races::watch();
  to_scheduler();
}

// Calls f on the fiber `other`, so that its accesses are in that fiber's order. f's variables have to be in
// registers, because the fiber must not read what the thread wrote.
template <class F>
__attribute__((always_inline)) inline void as(void* other, const F& f) {
  void* const here = races::this_fiber();
  races::before_switch_to(other);
  f();
  races::before_switch_to(here);
}

inline void wait_for_block() {
  const unsigned turn = machine.self().block_barriers++ % 2;
  char *const point = &machine.block->block_barrier[turn], *const proxy = &machine.block->proxy_barrier[turn];
  void* const memory = machine.self().of_memory;  // products see what all threads fenced before the barrier
  races::happens_before(point);
  if (memory != nullptr) as(memory, [&]() __attribute__((always_inline)) { races::happens_before(proxy); });
  wait(State::at_block_barrier);
  races::happens_after(point);
  if (memory != nullptr) as(memory, [&]() __attribute__((always_inline)) { races::happens_after(proxy); });
}

inline void wait_for_warp() {
  Block& block = *machine.block;
  char* const point = &block.warp_barrier[block.running / 32][block.self().warp_barriers++ % 2];
  races::happens_before(point);
  wait(State::at_warp_barrier);
  races::happens_after(point);
}

// Suspends the thread until so many have reached the block's barrier `id`.
inline void wait_for_warps(int id, int threads) {
  WarpsBarrier& barrier = machine.block->warps_barriers[id];
  char* const point = &barrier.point[barrier.turn % 2];
  races::happens_before(point);
  races::stop_watching();
  machine.self().warps_barrier = id;
  const bool complete = ++barrier.waiting == threads;
  if (complete) {
    barrier.waiting = 0, ++barrier.turn;
    for (Thread& thread : machine.block->threads) {
      if (thread.state == State::at_warps_barrier && thread.warps_barrier == id) thread.state = State::ready;
    }
  }
  races::watch();
  if (!complete) wait(State::at_warps_barrier);
  races::happens_after(point);
}

// Lets other threads, also of other blocks, run first. Orders nothing.
inline void poll(const std::source_location& site) {
  races::stop_watching();
  ++machine.polls;
  machine.block->polled = site;
  races::watch();
  wait(State::ready);
}

// A fiber begins after what its creator has done, so the scheduler creates these.
inline void need_fence_fibers(Thread& thread) {
  as(machine.scheduler_fiber, [&]() __attribute__((always_inline)) {
    if (thread.of_releases == nullptr) thread.of_releases = races::new_fiber();
    if (thread.of_acquires == nullptr) thread.of_acquires = races::new_fiber();
  });
}

// An atomic operation of one block may be read by one of another: what the thread did before its last
// __threadfence() is then ordered before what the other thread does after its next one.
inline void carry_release(void* at) {
  if (!machine.concurrent) return;
  races::stop_watching();
  machine.polls = 0;
  need_fence_fibers(machine.self());
  races::watch();
  as(machine.self().of_releases, [&]() __attribute__((always_inline)) { races::happens_before(at); });
}
inline void carry_acquire(void* at) {
  if (!machine.concurrent) return;
  races::stop_watching();
  need_fence_fibers(machine.self());
  races::watch();
  as(machine.self().of_acquires, [&]() __attribute__((always_inline)) { races::happens_after(at); });
}

inline void note_atomic(void* at) {
  carry_release(at);
  carry_acquire(at);
}

inline void fence_device() {
  races::stop_watching();
  Thread& self = machine.self();
  need_fence_fibers(self);
  races::watch();
  char *const before = &self.before_fence, *const after = &self.after_fence;
  races::happens_before(before);
  as(self.of_releases, [&]() __attribute__((always_inline)) { races::happens_after(before); });
  as(self.of_acquires, [&]() __attribute__((always_inline)) { races::happens_before(after); });
  races::happens_after(after);
}

inline void resume(Block& block, int i) {
  machine.block = &block;
  block.running = i;
  block.thread_index = dim3(static_cast<unsigned>(i), 0, 0);
  races::before_switch_to(block.self().fiber);
  switch_stack(machine.scheduler, block.self().stack.place);
}

// Lets threads [begin, end) pass if all that are not done wait at `barrier`; at a warp's barrier only if none
// is done. Returns whether they pass.
inline bool release(Block& block, int begin, int end, State barrier) {
  int waiting = 0, live = 0;
  for (int i = begin; i < end; ++i) {
    const State state = block.threads[static_cast<size_t>(i)].state;
    waiting += state == barrier;
    live += state != State::done;
  }
  const bool whole = barrier == State::at_block_barrier || live == end - begin;
  if (waiting == 0 || waiting != live || !whole) return false;
  for (int i = begin; i < end; ++i) {
    Thread& thread = block.threads[static_cast<size_t>(i)];
    if (thread.state == barrier) thread.state = State::ready;
  }
  return true;
}

inline void start_thread(Thread& thread) {
  if (thread.fiber == nullptr) thread.fiber = races::new_fiber();
  thread.state = State::ready;
  thread.copies.resize(1);
  thread.copies[0].clear();
  thread.block_barriers = thread.warp_barriers = thread.cluster_arrivals = thread.cluster_waits = 0;
  thread.has_waited = thread.fenced = false;
  thread.products.resize(1);
  thread.products[0].issued.clear();
  thread.stack.begin_with(enter);
}

// Runs every ready thread once. Returns whether there was one.
inline bool run_ready(Block& block) {
  bool ran = false;
  for (int turn = 0; turn < machine.count; ++turn) {
    const int i = settings.backwards ? machine.count - 1 - turn : turn;
    if (block.threads[static_cast<size_t>(i)].state == State::ready) resume(block, i), ran = true;
  }
  return ran;
}

inline bool release_all(Block& block) {
  bool released = release(block, 0, machine.count, State::at_block_barrier);
  for (int w = 0; w < machine.count; w += 32) {
    released |= release(block, w, std::min(w + 32, machine.count), State::at_warp_barrier);
  }
  return released;
}

inline bool any_alive(const Block& block) {
  for (int i = 0; i < machine.count; ++i) {
    if (block.threads[static_cast<size_t>(i)].state != State::done) return true;
  }
  return false;
}

inline Thread& lane(int i) {
  return machine.block->threads[static_cast<size_t>(machine.block->running / 32 * 32 + i)];
}

// Every lane of the warp passes its value. Returns f(of), where of(i) is the value of lane i.
template <class T, class F>
auto exchange(const T& mine, const F& f) {
  static_assert(sizeof(T) <= sizeof(Thread::slot));
  const races::Unwatched bookkeeping;
  std::memcpy(machine.self().slot, &mine, sizeof(T));
  wait(State::at_warp_barrier);
  const auto result =
      f([](int i) -> const T& { return *std::launder(reinterpret_cast<const T*>(lane(i).slot)); });
  wait(State::at_warp_barrier);
  return result;
}

}  // namespace fp8serve::emulator
