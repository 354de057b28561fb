// Where the blocks of a launch bring their amax together, so that no memory is set to zero before it.
//
// A stream has such a room of its own, which holds zeros between launches: every part of a launch raises what
// is there and counts itself, and the last one moves the maxima out and leaves zeros behind. Launches of one
// stream do not meet there, because none looks into it before those before it have ended. A graph may be
// replayed on another stream than it was captured on: under capture there is no room, and memory is set to
// zero as a node of the graph.
#pragma once

#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "cuda/cast.h"

namespace fp8serve {

constexpr int kPlaces = 256;  // maxima that a launch may have

struct Room {
  float* maxima = nullptr;  // [kPlaces]; null: there is none
  unsigned* arrived = nullptr;
};

// The rooms of all streams, made when they are first asked for.
class Rooms {
 public:
  Room of(const OnDevice& device, const Tensor& like) {
    const std::lock_guard guard(mutex_);
    const auto [entry, is_new] = memory_.try_emplace({device.index(), device.stream()}, nullptr);
    if (is_new) {
      entry->second = new Tensor(empty(like, {kPlaces + 1}, ScalarType::Float));  // until the process ends
      set_zero(entry->second->data_ptr(), (kPlaces + 1) * sizeof(float), device.stream());
    }
    auto* maxima = data<float>(*entry->second);
    return {maxima, reinterpret_cast<unsigned*>(maxima + kPlaces)};
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, Stream>, Tensor*> memory_;
};
inline Rooms rooms;

// Counters of arrivals, for launches whose blocks meet in many groups. They hold zeros between launches. A
// stream has some of its own, and so has a graph: it may be replayed beside other launches of the stream on
// which it was captured. A capture cannot make the memory, because there it could not be set to zero once for
// all.
class Arrivals {
 public:
  // `count` counters for a launch on the device's current stream; null if there are none left.
  unsigned* of(const OnDevice& device, const Tensor& like, int64_t count) {
    const std::lock_guard guard(mutex_);
    Range& range = ranges_[{device.index(), device.stream(), device.capture()}];
    if (range.count < count)
      range = {taken(device, like, count), count};  // null again if there are none left
    return range.first;
  }

 private:
  static constexpr int64_t kCounters = int64_t{1} << 20;  // on each device, until the process ends
  struct Range {
    unsigned* first = nullptr;
    int64_t count = 0;
  };
  // At a multiple of 16 bytes.
  unsigned* taken(const OnDevice& device, const Tensor& like, int64_t wanted) {
    const int64_t count = ceil_over(wanted, 4) * 4;
    Range& free = free_[device.index()];
    const bool capturing = device.capture() != 0;
    if (free.first == nullptr && !capturing) {
      const auto* memory = new Tensor(empty(like, {kCounters}, ScalarType::Float));
      free = {static_cast<unsigned*>(memory->data_ptr()), kCounters};
      set_zero(free.first, kCounters * sizeof(unsigned), device.stream());
    }
    if (free.count < count) return nullptr;
    unsigned* const first = free.first;
    free = {first + count, free.count - count};
    if (!capturing) set_zero(first, static_cast<size_t>(count) * sizeof(unsigned), device.stream());
    return first;
  }

  std::mutex mutex_;
  std::map<std::tuple<int, Stream, uint64_t>, Range> ranges_;
  std::map<int, Range> free_;
};
inline Arrivals arrivals;

// Room on the device's current stream; none while that is captured.
inline Room room_of(const OnDevice& device, const Tensor& like) {
  return device.is_capturing() ? Room{} : rooms.of(device, like);
}

// Whether the caller is the last of `all` parts of the launch, each of which calls this once: then it sees
// what the others did before.
__device__ __forceinline__ bool is_last(const Room& room, unsigned all) {
  __threadfence();
  const bool last = atomicInc(room.arrived, all - 1) == all - 1;
  __threadfence();
  return last;
}

// The maximum of a place, which is zero afterwards.
__device__ __forceinline__ float taken_from(float* place) {
  return __int_as_float(atomicExch(reinterpret_cast<int*>(place), 0));
}

// One of `all` parts brings what it has seen; the last writes *amax.
__device__ __forceinline__ void bring(const Room& room, float* amax, float seen, unsigned all) {
  raise(room.maxima, seen);
  if (is_last(room, all)) *amax = taken_from(room.maxima);
}

}  // namespace fp8serve
