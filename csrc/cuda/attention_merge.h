// The parts of a tile's rows, merged by the block that has stored its own last: one warp, after a decoding
// token's attention.
//
// Values come through shared memory, in two halves by turns, so that a wait for memory is shared by 32 parts.
// A half has the parts of a few segments: a pair is one segment's part of one row. Lanes 0 to 15 hold the
// maxima and sums of one half's pairs, the others those of the other half. Segments are merged in order, by
// the operations of merge_parts (attention_tensor.cu): a row has the same bits whichever of them merges.
#pragma once

#include "cuda/attention_softmax.h"

namespace fp8serve {
namespace attention {

// Whole warps, each a block, call this when they have stored their parts and copies to shared memory have
// ended: whether this is the last of `all` blocks of its tile and kv head, which sees what the others stored.
__device__ __forceinline__ bool is_last_of_tile(const Work& w, unsigned all) {
  __threadfence();
  __syncwarp();
  unsigned before = 0;
  if (threadIdx.x == 0) before = atomicInc(w.arrived + blockIdx.x * gridDim.y + blockIdx.y, all - 1);
  const bool last = __shfl_sync(kAllLanes, before, 0) == all - 1;
  __threadfence();
  return last;
}

template <int kDim>
constexpr int kMergedRows = 512 / kDim;  // at once; of more, a thread would hold too much

template <int kDim>
class RowMerger {
  static constexpr int kPairs = 16;              // of a half
  static constexpr int kLanes = kDim / 4;        // of a row, four values each
  static constexpr int kTogether = 32 / kLanes;  // rows
  static constexpr int kTurns = kMergedRows<kDim> / kTogether;

 public:
  static constexpr int kBytes = 2 * kPairs * kDim * 4;

  // Of `count` rows of the tile, `row` the first of them. `memory`: kBytes of shared memory.
  __device__ RowMerger(const Work& w, const Rows& rows, int row, int count, unsigned char* memory)
      : w_(w),
        rows_(rows),
        row_(row),
        count_(count),
        each_(kPairs / count),
        lane_(static_cast<int>(threadIdx.x)),
        memory_(reinterpret_cast<float4*>(memory)),
        all_(rows_in_all(w)),
        segment_(lane_ % kPairs / count),
        head_(head(lane_ % kPairs % count)) {}

  // Segments [first, end) are those that any row of the tile sees.
  __device__ __forceinline__ void merge(int first, int end) {
    float maximum[kTurns], sum[kTurns] = {};
    float4 value[kTurns] = {};
#pragma unroll
    for (int i = 0; i < kTurns; ++i) maximum[i] = -INFINITY;
    ask(0, first, end);
    ask(1, first + each_, end);
    for (int segment = first, half = 0; segment < end; segment += each_, half ^= 1) {
      copy_wait<1>();
      __syncwarp();
      for (int j = 0; j < min(each_, end - segment); ++j) {
#pragma unroll
        for (int i = 0; i < kTurns; ++i) {
          if (i * kTogether >= count_) break;
          const int r = min(i * kTogether + lane_ / kLanes, count_ - 1), pair = j * count_ + r;
          const float its_maximum = __shfl_sync(kAllLanes, maximum_, half * kPairs + pair);
          const float its_sum = __shfl_sync(kAllLanes, sum_, half * kPairs + pair);
          if (!sees(r, segment + j)) continue;
          const Merge m = merge_of(maximum[i], its_maximum);
          const float4 its = *at(half, pair);
          maximum[i] = m.maximum;
          sum[i] = merged(m, sum[i], its_sum);
          value[i] = {merged(m, value[i].x, its.x), merged(m, value[i].y, its.y),
                      merged(m, value[i].z, its.z), merged(m, value[i].w, its.w)};
        }
      }
      __syncwarp();  // the half may be overwritten
      ask(half, segment + 2 * each_, end);
    }
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int r = i * kTogether + lane_ / kLanes;
      if (r < count_ && lane_ % kLanes * 4 < w_.dim) store_row(head(r), maximum[i], sum[i], value[i]);
    }
  }

 private:
  __device__ __forceinline__ int64_t head(int r) const { return head_of(w_, rows_, row_ + r); }
  __device__ __forceinline__ float4* at(int half, int pair) const {
    return memory_ + (half * kPairs + pair) * kLanes + lane_ % kLanes;
  }
  // Asks for a half: the parts of segments [segment, segment + each_), as far as there are any.
  __device__ __forceinline__ void ask(int half, int segment, int end) {
    const int segments = min(each_, end - segment);
    const bool inside = lane_ % kLanes * 4 < w_.dim;
    for (int j = 0; j < segments; ++j) {
      for (int r = lane_ / kLanes; r < count_; r += kTogether) {
        const float* from = w_.values + ((segment + j) * all_ + head(r)) * w_.dim;
        copy_async(at(half, j * count_ + r), inside ? from + lane_ % kLanes * 4 : from, inside);
      }
    }
    copy_commit();
    if (lane_ / kPairs == half && segment_ < segments) {
      const int64_t part = (segment + segment_) * all_ + head_;
      maximum_ = load_shared_by_blocks(w_.maxima + part), sum_ = load_shared_by_blocks(w_.sums + part);
    }
  }
  // Whether merge_parts merges this segment for the r-th row.
  __device__ __forceinline__ bool sees(int r, int segment) const {
    if (rows_.tokens == 1) return true;
    const int keys = position_of(w_, rows_, row_ + r) + 1;
    return segment >= max(keys - w_.window, 0) / kSegment && segment * kSegment < keys;
  }
  __device__ __forceinline__ void store_row(int64_t head, float maximum, float sum, const float4& value) {
    const Sunk sunk = with_sink(w_, head, maximum, sum);
    const float scale = factor(w_.v_scale);
    const auto result = [&](float x) { return quotient(x * sunk.value_weight, sunk.sum) * scale; };
    auto* to = static_cast<BF16*>(w_.out) + head * w_.dim + lane_ % kLanes * 4;
    *reinterpret_cast<uint2*>(to) = {bfloat_pair(result(value.x), result(value.y)),
                                     bfloat_pair(result(value.z), result(value.w))};
  }

  const Work& w_;
  const Rows& rows_;
  int row_, count_, each_, lane_;
  float4* memory_;
  int64_t all_;
  int segment_;   // of the half, of the lane's pair,
  int64_t head_;  // its row,
  float maximum_ = 0.0f, sum_ = 0.0f;
};

// As RowMerger::merge, of all rows of a tile.
template <int kDim>
__device__ __forceinline__ void merge_tile(const Work& w, const Rows& rows, int first, int end,
                                           unsigned char* memory) {
  for (int row = 0; row < rows.count; row += kMergedRows<kDim>) {
    RowMerger<kDim>(w, rows, row, min(kMergedRows<kDim>, rows.count - row), memory).merge(first, end);
  }
}

}  // namespace attention
}  // namespace fp8serve
