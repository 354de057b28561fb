// The blocks of an emulated launch: which of them are resident, in which order they run, and what orders
// their accesses to global memory.
//
// The blocks of an ordinary launch run one after the other. Those of a cooperative launch are all resident,
// as many as the chip can hold, and clusters begin as soon as there is space for all of their blocks.
// Resident blocks take turns: a block runs until its threads have passed a number of barriers, or cannot go
// on. The order and the numbers depend on `settings.seed` alone, so a failure can be repeated. Resident
// blocks must not use static shared memory, of which the emulator has one copy.
#pragma once

#include <algorithm>
#include <numeric>

#include "threads.h"

namespace fp8serve::emulator {

// Threads that poll this often, while no thread ends or writes a word atomically, are taken to poll for ever.
constexpr unsigned long kMostPolls = 1 << 18;

inline unsigned blocks_of(const dim3& grid) { return grid.x * grid.y * grid.z; }

// Returns how many blocks of the launch the chip can hold, a multiple of the cluster (by CUDA's programming
// guide, without registers).
inline unsigned most_resident() {
  const Chip& chip = settings.chip;
  const int threads = chip.capability / 10 == 9 || chip.capability / 10 == 10 ? 2048 : 1536;
  const int by_threads = threads / (32 * ((machine.count + 31) / 32));
  const int by_memory = (chip.shared_bytes + 1024) / (machine.shared_bytes + 1024);
  const auto all = static_cast<unsigned>(chip.multiprocessors * std::min({by_threads, by_memory, 32}));
  return all / machine.cluster * machine.cluster;
}

// Writes the block's shared memory as its owner does, which has it before the block's threads begin and after
// they end: an access of another block at such a time is a race.
inline void write_as_owner(Block& block, char* after, char* before) {
  if (block.owner == nullptr) block.owner = races::new_fiber();
  unsigned char* const memory = block.dynamic_shared();
  const auto bytes = static_cast<size_t>(machine.shared_bytes);
  as(block.owner, [&]() __attribute__((always_inline)) {
    races::happens_after(after);
    races::writes(memory, bytes);
    races::happens_before(before);
  });
}

inline void poison(Block& block) { std::fill(block.shared.begin(), block.shared.end(), 0xff); }

inline void begin_block(Block& block, unsigned number) {
  const dim3& grid = machine.grid_size;
  block.number = number;
  block.mbarriers.clear();
  for (WarpsBarrier& barrier : block.warps_barriers) barrier.waiting = 0;
  block.index = dim3(number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y);
  poison(block);  // NaN, in FP8 and in FP32
  while (block.threads.size() < static_cast<size_t>(machine.count)) block.threads.emplace_back();
  for (int i = 0; i < machine.count; ++i) start_thread(block.threads[static_cast<size_t>(i)]);
  if (machine.cluster > 1) write_as_owner(block, &machine.start, &block.start);
  if (!machine.concurrent) {  // blocks are ordered, and share static memory
    for (const Memory& memory : settings.declared) std::memset(memory.at, 0xff, memory.bytes);
    races::happens_before(&machine.start);
  }
  block.resident = true;
}

inline void end_block(Block& block) {
  block.resident = false;
  if (!machine.concurrent) races::happens_after(&machine.finish);
  if (machine.cluster == 1) return;
  write_as_owner(block, &block.finish, &machine.finish);
  poison(block);
}

// Returns the blocks of the cluster to which `block` belongs.
inline std::vector<Block*> cluster_of(const Block& block) {
  std::vector<Block*> blocks;
  const unsigned first = block.place / machine.cluster * machine.cluster;
  for (unsigned i = 0; i < machine.cluster; ++i) blocks.push_back(&machine.blocks[first + i]);
  return blocks;
}

// Begins blocks from number `next` on in the first `most` places, while there is space for a whole cluster.
// Returns the number of the next block.
inline unsigned begin_blocks(unsigned next, unsigned most) {
  for (unsigned place = 0; place < most && next < blocks_of(machine.grid_size); place += machine.cluster) {
    const std::vector<Block*> cluster = cluster_of(machine.blocks[place]);
    if (std::any_of(cluster.begin(), cluster.end(), [](Block* b) { return b->resident; })) continue;
    for (Block* block : cluster) begin_block(*block, next++);
  }
  return next;
}

// The first block of a cluster stores the two points in time of the cluster's barrier.
inline char* cluster_point(unsigned turn) {
  return &machine.blocks[machine.block->place / machine.cluster * machine.cluster].cluster_barrier[turn % 2];
}

// If the barrier is not `executed`, both functions wait as usual, but order nothing.
inline void arrive_at_cluster(bool executed) {
  Thread& self = machine.self();
  if (self.cluster_arrivals != self.cluster_waits) refuse("a thread arrives twice at its cluster's barrier");
  char* const point = cluster_point(self.cluster_arrivals);
  if (executed) races::happens_before(point);
  races::stop_watching();
  ++self.cluster_arrivals;
  races::watch();
}
inline void wait_for_cluster(bool executed) {
  Thread& self = machine.self();
  if (self.cluster_arrivals == self.cluster_waits) refuse("a thread waits for its cluster before it arrives");
  char* const point = cluster_point(self.cluster_waits);
  wait(State::at_cluster_barrier);
  if (executed) races::happens_after(point);
  races::stop_watching();
  ++self.cluster_waits;
  races::watch();
}

inline unsigned char* shared_of_rank(const unsigned char* shared, int rank) {
  if (rank < 0 || rank >= static_cast<int>(machine.cluster)) refuse("a cluster has no block of this rank");
  const auto offset = shared - machine.block->dynamic_shared();
  if (offset < 0 || offset >= machine.shared_bytes) refuse("this is not in dynamic shared memory");
  return cluster_of(*machine.block)[static_cast<size_t>(rank)]->dynamic_shared() + offset;
}

// Lets the threads pass that wait until all threads of the cluster have arrived. Returns whether there are
// any.
inline bool release_cluster(Block& first) {
  unsigned arrived = ~0u;
  std::vector<Thread*> waiting;
  for (Block* block : cluster_of(first)) {
    if (!block->resident) continue;
    for (int i = 0; i < machine.count; ++i) {
      Thread& thread = block->threads[static_cast<size_t>(i)];
      if (thread.state != State::done) arrived = std::min(arrived, thread.cluster_arrivals);
      if (thread.state == State::at_cluster_barrier) waiting.push_back(&thread);
    }
  }
  bool released = false;
  for (Thread* thread : waiting) {
    if (thread->cluster_arrivals <= arrived) thread->state = State::ready, released = true;
  }
  return released;
}

// Returns where the resident blocks wait, as "0 at file.cu:12, 3 at a barrier".
inline std::string waiting_blocks() {
  std::string out;
  for (const Block& block : machine.blocks) {
    if (!block.resident) continue;
    const auto polls = [](const Thread& thread) { return thread.state == State::ready; };
    const bool polling = std::any_of(block.threads.begin(), block.threads.begin() + machine.count, polls);
    out += (out.empty() ? "" : ", ") + std::to_string(block.number) + " at ";
    out += polling ? name_of(block.polled) : "a barrier";
  }
  return out;
}

[[noreturn]] inline void give_up(const std::string& why) {
  for (Block& block : machine.blocks) {
    for (Thread& thread : block.threads) thread.fiber = nullptr;  // a waiting fiber cannot be used again
    block.resident = false;
  }
  machine.has_products = machine.did_not_wait = false;
  throw std::runtime_error(why);
}

// The order of the resident blocks and the lengths of their turns: xorshift, and with seed 0 in order of
// their places, one step a turn.
class Order {
 public:
  explicit Order(unsigned seed) : state_(seed) {}

  void shuffle(std::vector<Block*>& blocks) {
    if (settings.backwards) std::reverse(blocks.begin(), blocks.end());
    if (state_ == 0) return;
    for (size_t i = blocks.size(); i > 1; --i) std::swap(blocks[i - 1], blocks[draw() % i]);
  }
  int steps() { return state_ == 0 ? 1 : 1 << draw() % 8; }

 private:
  unsigned draw() {
    state_ ^= state_ << 13, state_ ^= state_ >> 17, state_ ^= state_ << 5;
    return state_ >> 8;
  }
  unsigned state_;
};

// Runs the block for some steps, in each of which its threads run to the next barrier. Returns whether a
// thread ran.
inline bool take_turn(Block& block, int steps) {
  for (int step = 0; step < steps; ++step) {
    const bool ran = run_ready(block);
    if (!machine.refused.empty()) give_up(std::exchange(machine.refused, {}));
    if (!release_all(block) && !ran) return step > 0;
  }
  return true;
}

// Gives each resident block a turn. Returns whether a thread ran or passed a barrier.
inline bool run_round(Order& order) {
  std::vector<Block*> resident;
  for (Block& block : machine.blocks) {
    if (block.resident) resident.push_back(&block);
  }
  order.shuffle(resident);
  bool ran = false;
  for (Block* block : resident) {
    ran |= take_turn(*block, resident.size() == 1 ? 1024 : order.steps());
    if (!any_alive(*block)) end_block(*block);
  }
  if (machine.cluster == 1) return ran;
  for (Block* block : resident) ran |= release_cluster(*block);
  return ran;
}

inline void run_blocks(unsigned most) {
  while (machine.blocks.size() < most) machine.blocks.emplace_back();
  for (unsigned place = 0; place < most; ++place) machine.blocks[place].place = place;
  Order order(settings.seed);
  unsigned next = 0;
  machine.polls = 0;
  for (;;) {
    next = begin_blocks(next, most);
    const bool ran = run_round(order);
    if (std::none_of(machine.blocks.begin(), machine.blocks.end(), [](Block& b) { return b.resident; })) {
      if (next == blocks_of(machine.grid_size)) return;
    } else if (!ran || machine.polls > kMostPolls) {
      give_up("emulator: blocks wait for each other for ever: " + waiting_blocks());
    }
  }
}

inline bool is_declared_used() {
  return std::any_of(settings.declared.begin(), settings.declared.end(), [](const Memory& memory) {
    const auto* bytes = static_cast<const unsigned char*>(memory.at);
    return std::any_of(bytes, bytes + memory.bytes, [](unsigned char byte) { return byte != 0xff; });
  });
}

// Runs the kernel whose shape and body are in `machine`.
inline void run_grid(bool concurrent) {
  const races::Unwatched bookkeeping;
  machine.scheduler_fiber = races::this_fiber();
  machine.concurrent = concurrent;
  for (const Memory& memory : settings.declared) std::memset(memory.at, 0xff, memory.bytes);
  races::happens_before(&machine.start);
  run_blocks(concurrent ? std::min(blocks_of(machine.grid_size), most_resident()) : 1);
  races::happens_after(&machine.finish);
  if (concurrent && is_declared_used()) {
    throw std::runtime_error("emulator: blocks that run at once use static shared memory");
  }
  if (std::exchange(machine.has_products, false)) {
    throw std::runtime_error("emulator: a kernel ends without waiting for its products");
  }
  if (std::exchange(machine.did_not_wait, false)) {
    throw std::runtime_error(
        "emulator: a kernel that was launched early ends without waiting for those before");
  }
}

}  // namespace fp8serve::emulator
