// Casts by a given scale, and what they report of their values: the amax and, if serving watches an input,
// how many values were cut off.
//
// A block whose own amax fits the format counts nothing. In the rare case that it does not fit, the block
// reads or computes its values again to count them.
#pragma once

#include "cuda/amax_scratch.h"
#include "cuda/rows.h"

namespace fp8serve {

struct CastCounters {
  float* amax;                    // [] is raised to the largest magnitude; NaN is ignored
  bool is_fresh = false;          // amax is not initialized
  AmaxScratch scratch = {};       // combines a fresh amax of several blocks
  int64_t* saturated = nullptr;   // [] is raised by the number of values cut off; null: not counted
  const int64_t* rows = nullptr;  // [] how many rows, from the first on, are reported; null: all

  __device__ __forceinline__ int64_t counted_rows(int64_t all) const {
    return rows == nullptr ? all : min(all, *rows);
  }
};

// Returns `out` prepared for a launch of `blocks` blocks. A single block writes a fresh amax directly.
// Several blocks need a scratch, or an amax that is set to zero before the launch.
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

// Returns how many of a chunk's first `count` values are cut off by a cast with `scale`.
template <class F>
__device__ __forceinline__ unsigned cut_off(const Chunk& x, float scale, int64_t count = kChunk) {
  unsigned num_saturated = 0;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) num_saturated += i < count && is_cut_off<F>(x.value[i] * scale);
  return num_saturated;
}

// All lanes of a warp call this. num_saturated: how many of the thread's values were cut off.
__device__ __forceinline__ void add_cut_off(const CastCounters& out, unsigned num_saturated) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) num_saturated += __shfl_xor_sync(kAllLanes, num_saturated, step);
  if (threadIdx.x % 32 == 0 && num_saturated > 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(out.saturated),
              static_cast<unsigned long long>(num_saturated));
  }
}

// All threads of a block call this, once. seen: the thread's amax; count(): how many of the thread's values
// were cut off; `memory` holds 32 floats.
template <class F, class Count>
__device__ __forceinline__ void report_cast(const CastCounters& out, float seen, float scale, float* memory,
                                            const Count& count) {
  seen = block_max(seen, memory);
  if (threadIdx.x == 0) report_amax(out, seen);
  if (out.saturated == nullptr || !is_cut_off<F>(seen * scale)) return;
  add_cut_off(out, count());
}

// Set q to x, rms_norm(x, weight, eps) or silu(gate) * up, cast by `scale` []. The arguments are checked
// and have at least one element and two dimensions; in cast_plain any number of dimensions.
void cast_plain(const Tensor& x, const Tensor& scale, const Tensor& q, const CastCounters& out,
                const OnDevice& device);
void cast_norm(const Tensor& x, const Tensor& weight, double eps, const Tensor& scale, const Tensor& q,
               const CastCounters& out, const OnDevice& device);
void cast_gated(const Tensor& gate, const Tensor& up, const Tensor& scale, const Tensor& q,
                const CastCounters& out, const OnDevice& device);

// The step of delayed scaling after a cast: raises the history's staging slot to amax [], if there is a
// history. Returns the inverse of the scale, NaN for an infinite amax if `infinity_is_nan`.
Tensor recorded(const Tensor& amax, const Tensor& scale, const std::optional<Tensor>& history,
                bool infinity_is_nan, const OnDevice& device);
void check_history(const DeviceContract& check, const char* name, const std::optional<Tensor>& history);

// The op, defined in watch.cu, for other ops that call it.
Tensor quantize_watched(const Tensor& x, const std::optional<Tensor>& other, const std::optional<double>& eps,
                        const Tensor& scale, const Tensor& seen, const Tensor& saturated,
                        const std::optional<Tensor>& rows);
// Returns the counters of a watched cast. The arguments are checked.
inline CastCounters counters(const Tensor& seen, const Tensor& saturated, const std::optional<Tensor>& rows) {
  return {.amax = data<float>(seen),
          .saturated = data<int64_t>(saturated),
          .rows = rows ? data<const int64_t>(*rows) : nullptr};
}

}  // namespace fp8serve
