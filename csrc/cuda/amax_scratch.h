// Scratch memory in which the blocks of a launch combine their amax, so that no memset has to come first.
//
// Every stream has one scratch, which holds zeros between launches. Each part of a launch, a block or a
// warp, raises a maximum there and counts itself. The last part writes the maxima to the output and leaves
// zeros behind. Launches of one stream do not share the scratch at the same time, because each accesses it
// only after the launches before it have ended. A graph may be replayed on another stream than the one it
// was captured on, so a captured launch has no scratch: a node of the graph sets its output to zero
// instead.
#pragma once

#include <map>
#include <mutex>
#include <utility>

#include "cuda/cast.h"

namespace fp8serve {

constexpr int kMaxima = 256;  // maxima that one launch can combine

struct AmaxScratch {
  float* maxima = nullptr;      // [kMaxima]; null: there is no scratch
  unsigned* arrived = nullptr;  // [] how many parts of the launch have reported
};

// The scratches of all streams, each allocated when it is first needed.
class AmaxScratches {
 public:
  AmaxScratch of(const OnDevice& device, const Tensor& like) {
    const std::lock_guard guard(mutex_);
    const auto [entry, is_new] = memory_.try_emplace({device.index(), device.stream()}, nullptr);
    if (is_new) {
      entry->second = new Tensor(empty(like, {kMaxima + 1}, ScalarType::Float));  // never freed
      set_zero(entry->second->data_ptr(), (kMaxima + 1) * sizeof(float), device.stream());
    }
    auto* maxima = data<float>(*entry->second);
    return {maxima, reinterpret_cast<unsigned*>(maxima + kMaxima)};
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, Stream>, Tensor*> memory_;
};
inline AmaxScratches amax_scratches;

// Returns the scratch of the device's current stream, or an empty one while that stream is captured.
inline AmaxScratch amax_scratch_of(const OnDevice& device, const Tensor& like) {
  return device.is_capturing() ? AmaxScratch{} : amax_scratches.of(device, like);
}

// Returns whether the caller is the last of the `all` parts of the launch, each of which calls this once.
// The last part sees what the others wrote before their calls.
__device__ __forceinline__ bool is_last(const AmaxScratch& scratch, unsigned all) {
  __threadfence();
  const bool last = atomicInc(scratch.arrived, all - 1) == all - 1;
  __threadfence();
  return last;
}

// Returns *maximum and sets it to zero.
__device__ __forceinline__ float take_maximum(float* maximum) {
  return __int_as_float(atomicExch(reinterpret_cast<int*>(maximum), 0));
}

// Called once by each of the `all` parts of a launch. seen: the part's largest magnitude. The last call
// writes the largest of all to *amax.
__device__ __forceinline__ void combine_amax(const AmaxScratch& scratch, float* amax, float seen,
                                             unsigned all) {
  atomic_max_float(scratch.maxima, seen);
  if (is_last(scratch, all)) *amax = take_maximum(scratch.maxima);
}

}  // namespace fp8serve
