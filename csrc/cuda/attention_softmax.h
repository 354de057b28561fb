// The softmax of attention on tensor cores, in registers: of scores as a product leaves them, to weights as
// the next product takes them. A warp has 16 rows. Lane 4g + t has columns 2t, 2t + 1 of every eight, of rows
// g (elements 0, 1) and g + 8 (2, 3), whether mma made the product or a warp's part of wgmma, so both kernels
// go through this code in the same order: keys 32 at a time, the softmax afresh in each segment of 128 at
// absolute positions, a segment's result merged into the row's in order.
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

// Of kEights times eight keys.
template <int kEights>
using Scores = float[kEights][4];
// Of a step's keys, the left operands of two products with 16 keys each.
using Weights = uint32_t[kStep / 16][4];

// Scaled; minus infinity where the row may not look. `seen`: keys of the tile that rows g and g + 8 see.
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

// As `mask` where both rows see every key.
template <int kEights>
__device__ __forceinline__ void scale_all(Scores<kEights>& scores, float scale) {
#pragma unroll
  for (int n = 0; n < kEights; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[n][e] *= scale;
  }
}

// Minus infinity at the keys before the rows' windows.
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

template <int kEights>
__device__ __forceinline__ void cap(Scores<kEights>& scores, float scale) {
#pragma unroll
  for (int n = 0; n < kEights; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[n][e] = tanhf(__fmul_rn(scores[n][e], scale));
  }
}

// The value subtracted before the exponential: the maximum, or 0 if nothing was seen.
__device__ __forceinline__ float base_of(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 1));
  return fmaxf(value, __shfl_xor_sync(kAllLanes, value, 2));
}
__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(kAllLanes, value, 1);
  return value + __shfl_xor_sync(kAllLanes, value, 2);
}

// The scores of a step, eights [kFirst, kFirst + 4), to weights, of whose rounded values the row's sum is;
// and what the sums of before are to be multiplied by.
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
    row.sum[i] = __fmul_rn(row.sum[i], correction[i]);  // rounded by itself, not fused with a sum
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

// The warp's 16 of the block's rows.
struct WarpRows {
  int first;        // in the block
  int seen[2];      // keys that rows g and g + 8 of the warp see; 0 for a row that is not there
  int64_t head[2];  // where those rows lie in q and out; -1 for a row that is not there
  int most;         // keys that any row sees that is multiplied together with these
};

// kTogether: rows that are multiplied together, the warp's or a warpgroup's.
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

// The keys of a block that shares those of its rows with others, `gridDim.z` in all: whole segments, next to
// each other, so that what it copies need not stop between them. `first` and `end`: of the rows' keys.
struct Keys {
  int begin, end;  // none: begin >= end
};
__device__ __forceinline__ Keys keys_of_block(int first, int end) {
  const int segment = first / kSegment, blocks = static_cast<int>(gridDim.z);
  const int each = ((end + kSegment - 1) / kSegment - segment + blocks - 1) / blocks;
  const int mine = segment + static_cast<int>(blockIdx.z) * each;
  return {max(mine * kSegment, first), min((mine + each) * kSegment, end)};
}

// How a segment is added to what came before it.
struct Merge {
  float maximum, before, segment;  // the new maximum; weights of the old sums and of the segment's
};
__device__ __forceinline__ Merge merge_of(float maximum, float segment) {
  const float now = fmaxf(maximum, segment), base = base_of(now);
  return {now, exp2_of(maximum - base), exp2_of(segment - base)};
}
__device__ __forceinline__ float merged(const Merge& m, float before, float segment) {
  return fmaf(segment, m.segment, __fmul_rn(before, m.before));
}

// A head's sink is one more segment: a key of weight 1 without a value.
struct Sunk {
  float sum, value_weight;
};
__device__ __forceinline__ Sunk with_sink(const Work& w, int64_t head, float maximum, float sum) {
  if (w.sinks == nullptr) return {sum, 1.0f};
  const Merge m =
      merge_of(maximum, __fmul_rn(w.sinks[head % w.heads], kLog2E));  // not fused with a difference
  return {merged(m, sum, 1.0f), m.before};
}

// The next segment's part joins the total.
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
// The lane's n-th pair of row i. `kEvenOdd`: of every 16 columns, the first eight are the even dimensions and
// the others the odd ones (attention_mma.cu).
template <bool kEvenOdd, int kDim>
__device__ __forceinline__ Pair pair_of(const Sums<kDim>& values, int n, int i) {
  const int lane = static_cast<int>(threadIdx.x) % 4, even = n / 2 * 2, element = 2 * i + n % 2;
  if constexpr (kEvenOdd)
    return {8 * even + 4 * lane + n % 2 * 2, values[even][element], values[even + 1][element]};
  return {8 * n + 2 * lane, values[n][2 * i], values[n][2 * i + 1]};
}

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

// One segment, for merge_parts.
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
