// The softmax of attention on tensor cores, in registers. It turns scores, in the layout of a product's
// result, into weights, in the layout of the next product's left operand. A warp has 16 rows. Lane 4g + t
// has columns 2t and 2t + 1 of every eight, in row g (elements 0, 1) and row g + 8 (elements 2, 3). This is
// the layout both of mma and of a warp's part of wgmma, so both kernels use this code with the same order
// of operations: 32 keys at a time, a new softmax in each segment of 128 keys at absolute positions, and
// segments merged in order.
#pragma once

#include <cmath>

#include "cuda/attention.h"
#include "cuda/mma_attention.h"

namespace fp8serve {
namespace attention {

constexpr int kStep = 32, kSegment = 128;  // keys
constexpr int kWarpRows = 16;
constexpr float kLog2E = 1.44269504088896341f;

template <int kDim>
using Sums = float[kDim / 8][4];

template <int kDim>
struct Softmax {
  float maximum[2], sum[2];  // of rows g and g + 8; the sum over this lane's keys only
  Sums<kDim> values;

  __device__ __forceinline__ void start() {
    for (int i = 0; i < 2; ++i) maximum[i] = -INFINITY, sum[i] = 0.0f;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) values[n][e] = 0.0f;
    }
  }
};

// Scores of kEights times eight keys.
template <int kEights>
using Scores = float[kEights][4];
// Weights of a step's keys: the left operands of two products with 16 keys each.
using Weights = uint32_t[kStep / 16][4];

// Scales the scores, and sets those of keys that a row must not see to minus infinity. seen: how many of
// the tile's keys, from the first on, rows g and g + 8 see.
template <int kEights>
__device__ __forceinline__ void mask(Scores<kEights>& scores, float scale, const int (&seen)[2]) {
  const int column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int n = 0; n < kEights; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool visible = 8 * n + column + e % 2 < seen[e / 2];
      scores[n][e] = visible ? scores[n][e] * scale : -INFINITY;
    }
  }
}

// As `mask`, if both rows see every key.
template <int kEights>
__device__ __forceinline__ void scale_all(Scores<kEights>& scores, float scale) {
#pragma unroll
  for (int n = 0; n < kEights; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[n][e] *= scale;
  }
}

// Sets the scores of keys before the rows' windows to minus infinity.
template <int kEights>
__device__ __forceinline__ void mask_before(Scores<kEights>& scores, int window, const int (&seen)[2]) {
  const int column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int n = 0; n < kEights; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (8 * n + column + e % 2 < seen[e / 2] - window) scores[n][e] = -INFINITY;
    }
  }
}

// The tanh of a soft cap. `mask` and `scale_all` multiply by the cap.
template <int kEights>
__device__ __forceinline__ void cap(Scores<kEights>& scores, float scale) {
#pragma unroll
  for (int n = 0; n < kEights; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[n][e] = tanhf(__fmul_rn(scores[n][e], scale));
  }
}

// Returns the value to subtract before the exponential: the maximum, or 0 if the row has seen nothing.
__device__ __forceinline__ float base_of(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 1));
  return fmaxf(value, __shfl_xor_sync(kAllLanes, value, 2));
}
__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(kAllLanes, value, 1);
  return value + __shfl_xor_sync(kAllLanes, value, 2);
}

// Turns the scores of a step, eights [kFirst, kFirst + 4), into weights, and adds the rounded weights to
// row.sum. Sets `correction` to the factors of the sums before this step; row.sum is already multiplied by
// them.
template <int kFirst, int kDim, int kEights>
__device__ __forceinline__ void weigh(Softmax<kDim>& row, const Scores<kEights>& scores, Weights& weights,
                                      float (&correction)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float top = row.maximum[i];
#pragma unroll
    for (int n = kFirst; n < kFirst + kStep / 8; ++n) {
      top = fmaxf(top, fmaxf(scores[n][2 * i], scores[n][2 * i + 1]));
    }
    top = quad_max(top);
    const float base = base_of(top);
    correction[i] = exp2_of(row.maximum[i] - base);
    row.maximum[i] = top;
    row.sum[i] = __fmul_rn(row.sum[i], correction[i]);  // rounded, never fused with the addition
#pragma unroll
    for (int n = 0; n < kStep / 8; ++n) {
      const float* score = scores[kFirst + n] + 2 * i;
      const uint32_t pair = bfloat_pair(exp2_of(score[0] - base), exp2_of(score[1] - base));
      weights[n / 2][n % 2 * 2 + i] = pair;
      row.sum[i] += __uint_as_float(pair << 16) + __uint_as_float(pair & 0xffff0000u);
    }
  }
}

template <int kDim>
__device__ __forceinline__ void rescale(Softmax<kDim>& row, const float (&correction)[2]) {
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) row.values[n][e] = __fmul_rn(row.values[n][e], correction[e / 2]);
  }
}

// --- rows

// The warp's 16 rows of the block.
struct WarpRows {
  int first;        // in the block
  int seen[2];      // keys that rows g and g + 8 of the warp see; 0 for a missing row
  int64_t head[2];  // where those rows begin in q and out, in heads; -1 for a missing row
  int most;         // keys that any of the kTogether rows sees
};

// kTogether: the rows of one product, which are the warp's or a warpgroup's.
template <int kTogether>
__device__ __forceinline__ WarpRows warp_rows(const Work& w, const Rows& rows) {
  WarpRows mine;
  mine.first = static_cast<int>(threadIdx.x) / 32 * kWarpRows;
  for (int i = 0; i < 2; ++i) {
    const int r = mine.first + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * i;
    const bool real = r < rows.count;
    mine.seen[i] = real ? position_of(w, rows, r) + 1 : 0;
    mine.head[i] = real ? head_of(w, rows, r) : -1;
  }
  const int first = mine.first / kTogether * kTogether, last = min(first + kTogether, rows.count) - 1;
  mine.most = last < first ? 0 : position_of(w, rows, last) + 1;
  return mine;
}

// --- segments

// The keys of one of `gridDim.z` blocks that share the keys [first, end) of their rows: whole consecutive
// segments, so that a block can copy the next one's keys before a segment ends.
struct Keys {
  int begin, end;  // begin >= end: the block has no keys
};
__device__ __forceinline__ Keys keys_of_block(int first, int end) {
  const int segment = first / kSegment, blocks = static_cast<int>(gridDim.z);
  const int each = ((end + kSegment - 1) / kSegment - segment + blocks - 1) / blocks;
  const int mine = segment + static_cast<int>(blockIdx.z) * each;
  return {max(mine * kSegment, first), min((mine + each) * kSegment, end)};
}

// How a segment is merged into the segments before it.
struct Merge {
  float maximum, before, segment;  // the new maximum; factors of the earlier sums and of the segment's
};
__device__ __forceinline__ Merge merge_of(float maximum, float segment) {
  const float now = fmaxf(maximum, segment), base = base_of(now);
  return {now, exp2_of(maximum - base), exp2_of(segment - base)};
}
__device__ __forceinline__ float merged(const Merge& m, float before, float segment) {
  return fmaf(segment, m.segment, __fmul_rn(before, m.before));
}

// A head's sink is merged as one more segment: a key with the sink's logit and no value. Returns the new
// sum and the factor of the values.
struct Sunk {
  float sum, value_weight;
};
__device__ __forceinline__ Sunk with_sink(const Work& w, int64_t head, float maximum, float sum) {
  if (w.sinks == nullptr) return {sum, 1.0f};
  const Merge m =
      merge_of(maximum, __fmul_rn(w.sinks[head % w.heads], kLog2E));  // never fused with a subtraction
  return {merged(m, sum, 1.0f), m.before};
}

// Merges the next segment's part into the total.
template <int kDim>
__device__ __forceinline__ void join(Softmax<kDim>& total, const Softmax<kDim>& part) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Merge m = merge_of(total.maximum[i], part.maximum[i]);
    total.maximum[i] = m.maximum;
    total.sum[i] = merged(m, total.sum[i], part.sum[i]);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      for (int e = 2 * i; e < 2 * i + 2; ++e) {
        total.values[n][e] = merged(m, total.values[n][e], part.values[n][e]);
      }
    }
  }
}

// Two neighbouring dimensions of a row's result.
struct Pair {
  int dim;
  float low, high;
};
// Returns the lane's n-th pair of row g (i = 0) or g + 8 (i = 1). `kEvenOdd`: of every 16 columns, the
// first eight are the even dimensions and the others the odd ones (attention_mma.cu).
template <bool kEvenOdd, int kDim>
__device__ __forceinline__ Pair pair_of(const Sums<kDim>& values, int n, int i) {
  const int lane = static_cast<int>(threadIdx.x) % 4, even = n / 2 * 2, element = 2 * i + n % 2;
  if constexpr (kEvenOdd)
    return {8 * even + 4 * lane + n % 2 * 2, values[even][element], values[even + 1][element]};
  return {8 * n + 2 * lane, values[n][2 * i], values[n][2 * i + 1]};
}

// Divides by the sums and stores the rows to `out`.
template <bool kEvenOdd = false, int kDim>
__device__ __forceinline__ void store_rows(const Work& w, const WarpRows& mine, const Softmax<kDim>& total) {
  const float scale = factor(w.v_scale);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (mine.head[i] < 0) continue;
    const Sunk sunk = with_sink(w, mine.head[i], total.maximum[i], total.sum[i]);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const Pair pair = pair_of<kEvenOdd, kDim>(total.values, n, i);
      if (pair.dim >= w.dim) continue;
      auto* to = static_cast<BF16*>(w.out) + mine.head[i] * w.dim + pair.dim;
      *reinterpret_cast<uint32_t*>(to) =
          bfloat_pair(quotient(pair.low * sunk.value_weight, sunk.sum) * scale,
                      quotient(pair.high * sunk.value_weight, sunk.sum) * scale);
    }
  }
}

// Stores the result of one segment for merge_parts.
template <bool kEvenOdd = false, int kDim>
__device__ __forceinline__ void store_part(const Work& w, const WarpRows& mine, int segment,
                                           const Softmax<kDim>& part) {
  const bool is_first = threadIdx.x % 4 == 0;
  const int64_t base = segment * rows_in_all(w);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (mine.head[i] < 0) continue;
    const int64_t at = base + mine.head[i];
    if (is_first) w.maxima[at] = part.maximum[i], w.sums[at] = part.sum[i];
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const Pair pair = pair_of<kEvenOdd, kDim>(part.values, n, i);
      if (pair.dim < w.dim) {
        *reinterpret_cast<float2*>(w.values + at * w.dim + pair.dim) = {pair.low, pair.high};
      }
    }
  }
}

}  // namespace attention
}  // namespace fp8serve
