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
