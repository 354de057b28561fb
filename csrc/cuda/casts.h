// The casts by a given scale, and what they say of their values: the amax and, where serving watches an
// input, how many values were cut off.
//
// Nothing is counted in a block whose own amax fits the format. In the rare one whose amax does not, the
// values are read, or computed, again.
#pragma once

#include "cuda/amax_scratch.h"
#include "cuda/rows.h"

namespace fp8serve {

struct CastCounters {
  float* amax;                    // [] rises to the largest magnitude; NaN is none
  bool is_fresh = false;          // amax holds nothing yet
  AmaxScratch scratch = {};       // where the blocks of a fresh amax bring theirs together, if they are many
  int64_t* saturated = nullptr;   // [] rises by the number of values that were cut off; null: nobody counts
  const int64_t* rows = nullptr;  // [] how many rows are seen and counted, the first ones; null: all

  __device__ __forceinline__ int64_t counted_rows(int64_t all) const {
    return rows == nullptr ? all : min(all, *rows);
  }
};

// For a launch of `blocks` blocks. Of a fresh amax one alone writes it, and many need a room or a zero.
inline CastCounters prepared(CastCounters out, int64_t blocks, const OnDevice& device, const Tensor& like) {
  if (!out.is_fresh || blocks == 1) return out;
  out.scratch = amax_scratch_of(device, like);
  if (out.scratch.maxima == nullptr) set_zero(out.amax, sizeof(float), device.stream());
  return out;
}

// One thread of every block calls this, with the block's amax.
__device__ __forceinline__ void report_amax(const CastCounters& out, float seen) {
  const unsigned blocks = gridDim.x * gridDim.y;
  if (out.is_fresh && blocks == 1) {
    *out.amax = seen;
  } else if (out.scratch.maxima != nullptr) {
    combine_amax(out.scratch, out.amax, seen, blocks);
  } else {
    atomic_max_float(out.amax, seen);
  }
}

// How many of a chunk's first `count` values a cast by `scale` cuts off.
template <class F>
__device__ __forceinline__ unsigned cut_off(const Chunk& x, float scale, int64_t count = kChunk) {
  unsigned found = 0;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) found += i < count && is_cut_off<F>(x.value[i] * scale);
  return found;
}

// Whole warps call this: `found` values of the thread were cut off.
__device__ __forceinline__ void add_cut_off(const CastCounters& out, unsigned found) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) found += __shfl_xor_sync(kAllLanes, found, step);
  if (threadIdx.x % 32 == 0 && found > 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(out.saturated), static_cast<unsigned long long>(found));
  }
}

// Whole blocks call this, once. `seen`: the thread's amax; count(): how many of the thread's values were cut
// off; `memory` holds 32 floats.
template <class F, class Count>
__device__ __forceinline__ void report_cast(const CastCounters& out, float seen, float scale, float* memory,
                                            const Count& count) {
  seen = block_max(seen, memory);
  if (threadIdx.x == 0) report_amax(out, seen);
  if (out.saturated == nullptr || !is_cut_off<F>(seen * scale)) return;
  add_cut_off(out, count());
}

// q = x, rms_norm(x, weight, eps) or silu(x) * up, cast by `scale` [], for checked arguments of at least one
// element; all but `scale` have two dimensions, in cast_plain any number.
void cast_plain(const Tensor& x, const Tensor& scale, const Tensor& q, const CastCounters& out,
                const OnDevice& device);
void cast_norm(const Tensor& x, const Tensor& weight, double eps, const Tensor& scale, const Tensor& q,
               const CastCounters& out, const OnDevice& device);
void cast_gated(const Tensor& gate, const Tensor& up, const Tensor& scale, const Tensor& q,
                const CastCounters& out, const OnDevice& device);

// What delayed scaling does after a cast: the amax [] raises the history's staging slot, if there is a
// history. Returns the inverse of the scale, NaN for an infinite amax if `infinity_is_nan`.
Tensor recorded(const Tensor& amax, const Tensor& scale, const std::optional<Tensor>& history,
                bool infinity_is_nan, const OnDevice& device);
void check_history(const DeviceContract& check, const char* name, const std::optional<Tensor>& history);

// The op, for others that are made of it (watch.cu).
Tensor quantize_watched(const Tensor& x, const std::optional<Tensor>& other, const std::optional<double>& eps,
                        const Tensor& scale, const Tensor& seen, const Tensor& saturated,
                        const std::optional<Tensor>& rows);
// Where a watched cast counts, by checked arguments.
inline CastCounters counters(const Tensor& seen, const Tensor& saturated, const std::optional<Tensor>& rows) {
  return {.amax = data<float>(seen),
          .saturated = data<int64_t>(saturated),
          .rows = rows ? data<const int64_t>(*rows) : nullptr};
}

}  // namespace fp8serve
