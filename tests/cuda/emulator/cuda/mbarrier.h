// The emulated counterpart of csrc/cuda/mbarrier.h.
//
// A bulk copy lands when its phase is waited for, and poisons its destination until then. For ThreadSanitizer
// (races.h) it reads on a fiber that knows only what was written before the launch, and writes on one that is
// ordered after its issue; both are ordered before what follows a wait for the phase.
#pragma once

#include "cuda/device.h"

namespace fp8serve {

using Mbarrier = uint64_t;

namespace emulator {

inline MbarrierState& state_of(const Mbarrier* at) {
  races::reads(at, sizeof(Mbarrier));  // after its initialization
  const races::Unwatched bookkeeping;
  const auto entry = machine.block->mbarriers.find(at);
  if (entry == machine.block->mbarriers.end()) refuse("this mbarrier is not initialized");
  return entry->second;
}

inline void land(MbarrierState& state) {
  for (const BulkCopy& copy : std::exchange(state.landing, {})) std::memcpy(copy.to, copy.from, copy.bytes);
}

// Ends the phase if nothing is missing.
inline void advance(MbarrierState& state) {
  machine.polls = 0;
  size_t issued = 0;
  for (const BulkCopy& copy : state.issued) issued += copy.bytes;
  if (state.missing > 0 || issued < state.expected) return;
  if (issued > state.expected) refuse("more bytes arrive at an mbarrier than it expects");
  land(state);
  state.landing = std::exchange(state.issued, {});
  state.missing = state.arrivals;
  state.expected = 0;
  ++state.phase;
}

inline void arrive(const Mbarrier* at, int bytes, bool executed) {
  MbarrierState& state = state_of(at);
  const races::Unwatched bookkeeping;
  if (executed) races::happens_before(&state.point[state.phase % 2]);
  --state.missing;
  state.expected += static_cast<size_t>(bytes);
  advance(state);
}

inline void need_copy_fibers(Thread& thread) {
  as(machine.scheduler_fiber, [&]() __attribute__((always_inline)) {
    if (thread.of_copy_reads == nullptr) thread.of_copy_reads = races::new_fiber();
    if (thread.of_copy_writes == nullptr) thread.of_copy_writes = races::new_fiber();
  });
}

inline void note_accesses(const BulkCopy& copy, Thread& self, char* end) {
  char* const issue = &self.copy_issue;
  const void* const from = copy.from;
  void* const to = copy.to;
  const size_t bytes = copy.bytes;
  races::happens_before(issue);
  as(self.of_copy_reads, [&]() __attribute__((always_inline)) {
    races::happens_after(&machine.start);
    races::reads(from, bytes);
    races::happens_before(end);
  });
  as(self.of_copy_writes, [&]() __attribute__((always_inline)) {
    races::happens_after(issue);
    races::writes(to, bytes);
    races::happens_before(end);
  });
}

}  // namespace emulator

inline void mbarrier_init(Mbarrier* at, int arrivals) {
  emulator::races::writes(at, sizeof(Mbarrier));
  const emulator::races::Unwatched bookkeeping;
  emulator::MbarrierState& state = emulator::machine.block->mbarriers[at];
  state.arrivals = state.missing = arrivals;
}
inline void mbarrier_arrive(Mbarrier* at, const Site& site = Site::current()) {
  emulator::arrive(at, 0, emulator::is_executed(site));
}
inline void mbarrier_arrive_expecting(Mbarrier* at, int bytes) { emulator::arrive(at, bytes, true); }
inline void mbarrier_wait(Mbarrier* at, int parity, const Site& site = Site::current()) {
  emulator::MbarrierState& state = emulator::state_of(at);
  const bool executed = emulator::is_executed(site);
  const emulator::races::Unwatched bookkeeping;
  while (static_cast<int>(state.phase % 2) == parity) emulator::poll(site);
  emulator::land(state);
  if (executed) emulator::races::happens_after(&state.point[parity]);
}

inline void bulk_copy(void* shared, const void* global, int bytes, Mbarrier* at) {
  const auto address = reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global);
  if (address % 16 != 0 || bytes % 16 != 0) emulator::refuse("a bulk copy is not aligned to 16 bytes");
  emulator::MbarrierState& state = emulator::state_of(at);
  const emulator::races::Unwatched bookkeeping;
  const emulator::BulkCopy copy{shared, global, static_cast<size_t>(bytes)};
  emulator::need_copy_fibers(emulator::machine.self());
  emulator::note_accesses(copy, emulator::machine.self(), &state.point[state.phase % 2]);
  std::memset(shared, 0xff, copy.bytes);
  state.issued.push_back(copy);
  emulator::advance(state);
}

inline void sync_warps(int id, int threads, const Site& site = Site::current()) {
  if (emulator::is_executed(site)) emulator::wait_for_warps(id, threads);
}

}  // namespace fp8serve
