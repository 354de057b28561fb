// paged_attention on tensor cores, for BF16 queries over BF16 or FP8 caches and heads of up to 128
// dimensions.
//
// A row is one query token of one head; the heads of a group that share a kv head are neighbouring rows (row
// r is token r / group), so that a decoding token of 4 or 8 heads fills one tile of 16 and reads its keys
// once. A warp has 16 rows: scores are m16n8k16 products of queries in registers and keys in shared memory,
// weights are rounded to BF16 in registers, where the layout of sums is that of the next product's left
// operand. FP8 values are copied asynchronously as they are and widened to BF16, exactly, when they have
// come.
//
// Order. Keys are taken 32 at a time with an online softmax, which starts afresh every 256 at absolute
// positions; a segment's result is merged into the row's, in order. One block with all segments of its rows
// (prefill, large batches) and one block per segment with `merge_parts` behind it (few rows, so that the
// whole device reads) do the same operations in the same order, and a tile that a row may not see changes
// nothing. So a row's result depends, to the last bit, on its own query and context: not on its batch, nor on
// how a prompt was cut, nor on how many warps a block has (1 for decoding, 4 for prefill, chosen by the
// average).
//
// Keys before the windows of a block's rows are not read; in the tile where the last window begins they are
// masked by a pass of their own, so that attention without a window pays for neither.
//
// Values that a block reads but a row does not see must be finite: their weight is 0, and 0 times NaN is NaN.
// Only a request whose own activations overflowed has such keys, and its next token is refused.
#include <cmath>

#include "cuda/attention.h"
#include "cuda/mma_attention.h"

namespace fp8serve {
namespace attention {
namespace {

constexpr int kKeys = 32, kSegment = 256;
constexpr int kWarpRows = 16;
constexpr int kMergeThreads = 128;
constexpr int64_t kMostParts = int64_t{128} << 20;  // of parts; with more bytes, one block does all
constexpr float kLog2E = 1.44269504088896341f;

// A tile of [kKeys][kDim] BF16 in 16-byte chunks. Eight rows at the same chunk lie in different banks.
template <int kDim>
struct Tile {
  uint4 chunk[kKeys][kDim / 8];
  __device__ __forceinline__ uint4* at(int key, int c) { return &chunk[key][c ^ (key & 7)]; }
};
// From a row's chunk c < 2 to its chunk 2d + c, with one xor, because tiles begin at multiples of a row.
__device__ __forceinline__ Place further(Place first, int d) { return first ^ static_cast<Place>(d * 32); }

// Two stages: one is multiplied while the other is copied. FP8 is copied beside the tile that it becomes.
template <int kDim, bool kFp8>
struct Shared {
  Tile<kDim> k[kFp8 ? 1 : 2], v[kFp8 ? 1 : 2];
  uint4 k_fp8[kFp8 ? 2 : 1][kKeys][kFp8 ? kDim / 16 : 1], v_fp8[kFp8 ? 2 : 1][kKeys][kFp8 ? kDim / 16 : 1];
};

// --- keys and values into shared memory

struct Paged {
  const char *k, *v;
  const int* table;
  int shift, mask;      // of the block size, a power of two
  int64_t token, head;  // bytes of a token in the cache, of a head
  int64_t offset;       // of the block's kv head
};

template <int kBytes>
__device__ __forceinline__ Paged paged_of(const Work& w, const Rows& rows) {
  const int64_t head = static_cast<int64_t>(w.dim) * kBytes;
  int shift = 0;
  while (1 << shift < w.block_size) ++shift;
  return {static_cast<const char*>(w.k),
          static_cast<const char*>(w.v),
          w.tables + static_cast<int64_t>(rows.sequence) * w.max_blocks,
          shift,
          w.block_size - 1,
          head * w.kv_heads,
          head,
          head * blockIdx.y};
}

// Starts copying keys [begin, begin + kKeys) into a stage; zeros from `end` on, and behind a head's end.
template <int kDim, bool kFp8, int kThreads>
__device__ __forceinline__ void stage(const Paged& paged, Shared<kDim, kFp8>& shared, int slot, int begin,
                                      int end) {
  constexpr int kChunks = kDim * (kFp8 ? 1 : 2) / 16;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < kKeys * kChunks; i += kThreads) {
    const int row = i / kChunks, c = i % kChunks, key = begin + row;
    const bool valid = key < end && c * 16 < paged.head;
    int64_t from = 0;
    if (valid) {
      const int64_t block = paged.table[key >> paged.shift];
      from = ((block << paged.shift) + (key & paged.mask)) * paged.token + paged.offset + c * 16;
    }
    if constexpr (kFp8) {
      copy_async(&shared.k_fp8[slot][row][c], paged.k + from, valid);
      copy_async(&shared.v_fp8[slot][row][c], paged.v + from, valid);
    } else {
      copy_async(shared.k[slot].at(row, c), paged.k + from, valid);
      copy_async(shared.v[slot].at(row, c), paged.v + from, valid);
    }
  }
}

// Four FP8 values to four BF16 numbers.
template <bool kE5M2>
__device__ __forceinline__ uint2 widened(uint32_t bytes) {
  uint32_t word[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t halves = decode_pair<kE5M2>(static_cast<uint16_t>(bytes >> (16 * i)));
    const uint32_t low = __float_as_uint(half_to_float(static_cast<uint16_t>(halves & 0xffff)));
    const uint32_t high = __float_as_uint(half_to_float(static_cast<uint16_t>(halves >> 16)));
    word[i] = low >> 16 | (high & 0xffff0000u);
  }
  return {word[0], word[1]};
}

template <bool kE5M2, int kDim>
__device__ __forceinline__ void widen(const uint4& bytes, Tile<kDim>& tile, int row, int c) {
  const uint2 a = widened<kE5M2>(bytes.x), b = widened<kE5M2>(bytes.y), d = widened<kE5M2>(bytes.z),
              e = widened<kE5M2>(bytes.w);
  *tile.at(row, 2 * c) = {a.x, a.y, b.x, b.y};
  *tile.at(row, 2 * c + 1) = {d.x, d.y, e.x, e.y};
}

// Every thread widens what it has copied itself.
template <int kDim, int kThreads, bool kE5M2>
__device__ __forceinline__ void widen_stage(Shared<kDim, true>& shared, int slot) {
  constexpr int kChunks = kDim / 16;
  for (int i = static_cast<int>(threadIdx.x); i < kKeys * kChunks; i += kThreads) {
    const int row = i / kChunks, c = i % kChunks;
    widen<kE5M2>(shared.k_fp8[slot][row][c], shared.k[0], row, c);
    widen<kE5M2>(shared.v_fp8[slot][row][c], shared.v[0], row, c);
  }
}

// --- one tile of keys onto a warp's rows

// Lane 4g + t has columns 2t, 2t + 1 of every eight, of rows g (elements 0, 1) and g + 8 (2, 3).
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

template <int kDim>
using Queries = uint32_t[kDim / 16][4];

using Scores = float[kKeys / 8][4];

__device__ __forceinline__ void multiply(float (&low)[4], float (&high)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[4]) {
  const uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
  mma_bf16(low, a, first);
  mma_bf16(high, a, second);
}

template <int kDim>
__device__ __forceinline__ void score(const Queries<kDim>& q, Tile<kDim>& k, Scores& scores) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[n][e] = 0.0f;
  }
#pragma unroll
  for (int n = 0; n < kKeys / 16; ++n) {
    const Place first = place_of(k.at(16 * n + lane % 8 + lane / 16 * 8, lane / 8 % 2));
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      uint32_t b[4];
      load_matrices_at<false>(b, further(first, d));
      multiply(scores[2 * n], scores[2 * n + 1], q[d], b);
    }
  }
}

// Scaled; minus infinity where the row may not look. `seen`: keys of the tile that rows g and g + 8 see.
__device__ __forceinline__ void mask(Scores& scores, float scale, const int (&seen)[2]) {
  const int column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool visible = 8 * n + column + e % 2 < seen[e / 2];
      scores[n][e] = visible ? scores[n][e] * scale : -INFINITY;
    }
  }
}

// Minus infinity at the keys before the rows' windows.
__device__ __forceinline__ void mask_before(Scores& scores, int window, const int (&seen)[2]) {
  const int column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (8 * n + column + e % 2 < seen[e / 2] - window) scores[n][e] = -INFINITY;
    }
  }
}

__device__ __forceinline__ void cap(Scores& scores, float scale) {
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
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

// Scores to weights, packed as the left operand of the next product; and the sums of the rounded
// weights.
template <int kDim>
__device__ __forceinline__ void soften(Softmax<kDim>& row, const Scores& scores,
                                       uint32_t (&weights)[kKeys / 8][2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float top = row.maximum[i];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) top = fmaxf(top, fmaxf(scores[n][2 * i], scores[n][2 * i + 1]));
    top = quad_max(top);
    const float base = base_of(top), correction = exp2_of(row.maximum[i] - base);
    row.maximum[i] = top;
    row.sum[i] = __fmul_rn(row.sum[i], correction);  // rounded by itself, not fused with a sum
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      const uint32_t pair =
          bfloat_pair(exp2_of(scores[n][2 * i] - base), exp2_of(scores[n][2 * i + 1] - base));
      weights[n][i] = pair;
      row.sum[i] += __uint_as_float(pair << 16) + __uint_as_float(pair & 0xffff0000u);
    }
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      row.values[n][2 * i] = __fmul_rn(row.values[n][2 * i], correction);
      row.values[n][2 * i + 1] = __fmul_rn(row.values[n][2 * i + 1], correction);
    }
  }
}

template <int kDim>
__device__ __forceinline__ void mix(Softmax<kDim>& row, Tile<kDim>& v,
                                    const uint32_t (&weights)[kKeys / 8][2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int n = 0; n < kKeys / 16; ++n) {
    const uint32_t a[4] = {weights[2 * n][0], weights[2 * n][1], weights[2 * n + 1][0],
                           weights[2 * n + 1][1]};
    const Place first = place_of(v.at(16 * n + lane % 16, lane / 16));
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      uint32_t b[4];
      load_matrices_at<true>(b, further(first, d));
      multiply(row.values[2 * d], row.values[2 * d + 1], a, b);
    }
  }
}

// --- a block

// A warp's 16 of the block's rows.
struct WarpRows {
  int first;        // in the block
  int seen[2];      // keys that rows g and g + 8 of the warp see; 0 for a row that is not there
  int64_t head[2];  // where those rows lie in q and out; -1 for a row that is not there
  int most;         // keys that any row of the warp sees
};

__device__ __forceinline__ WarpRows warp_rows(const Work& w, const Rows& rows) {
  WarpRows mine;
  mine.first = static_cast<int>(threadIdx.x) / 32 * kWarpRows;
  for (int i = 0; i < 2; ++i) {
    const int r = mine.first + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * i;
    const bool real = r < rows.count;
    mine.seen[i] = real ? position_of(w, rows, r) + 1 : 0;
    mine.head[i] = real ? head_of(w, rows, r) : -1;
  }
  const int last = min(mine.first + kWarpRows, rows.count) - 1;
  mine.most = last < mine.first ? 0 : position_of(w, rows, last) + 1;
  return mine;
}

template <int kDim>
__device__ __forceinline__ void load_queries(const Work& w, const WarpRows& mine, Queries<kDim>& q) {
  const int column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int d = 0; d < kDim / 16; ++d) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {  // rows g, g + 8, then both eight dimensions further
      const int at = 16 * d + e / 2 * 8 + column;
      const int64_t head = mine.head[e % 2];
      const auto* from = static_cast<const BF16*>(w.q) + head * w.dim + at;
      q[d][e] = head >= 0 && at < w.dim ? *reinterpret_cast<const uint32_t*>(from) : 0;
    }
  }
}

// Keys [begin, end), begin a multiple of kKeys; `segment_done(row)` at the end of each segment, with the sums
// of whole rows.
template <class Format, int kDim, bool kFp8, int kWarps, class F>
__device__ __forceinline__ void walk(const Work& w, const Rows& rows, const WarpRows& mine,
                                     Shared<kDim, kFp8>& shared, int begin, int end, const F& segment_done) {
  constexpr int kThreads = 32 * kWarps;
  const Paged paged = paged_of<kFp8 ? 1 : 2>(w, rows);
  const float logits = w.softmax_scale * factor(w.k_scale);
  const float scale = (w.softcap == 0.0f ? logits : w.softcap) * kLog2E;
  Queries<kDim> q;
  load_queries<kDim>(w, mine, q);
  Softmax<kDim> row;
  row.start();
  stage<kDim, kFp8, kThreads>(paged, shared, 0, begin, end);
  copy_commit();
  for (int at = begin, slot = 0; at < end; at += kKeys, slot ^= 1) {
    if (at + kKeys < end) stage<kDim, kFp8, kThreads>(paged, shared, slot ^ 1, at + kKeys, end);
    copy_commit();
    copy_wait<1>();
    if constexpr (kFp8) widen_stage<kDim, kThreads, is_e5m2<Format>>(shared, slot);
    __syncthreads();
    if (at < mine.most) {
      const int now = kFp8 ? 0 : slot, seen[2] = {mine.seen[0] - at, mine.seen[1] - at};
      Scores scores;
      uint32_t weights[kKeys / 8][2];
      score<kDim>(q, shared.k[now], scores);
      if (w.softcap != 0.0f) cap(scores, logits / w.softcap);
      mask(scores, scale, seen);
      if (at < mine.most - w.window) mask_before(scores, w.window, seen);  // the last row's begins here
      soften<kDim>(row, scores, weights);
      mix<kDim>(row, shared.v[now], weights);
    }
    __syncthreads();  // the stage may be copied into again
    if ((at + kKeys) % kSegment == 0 || at + kKeys >= end) {
      for (int i = 0; i < 2; ++i) row.sum[i] = quad_sum(row.sum[i]);
      segment_done(row);
      row.start();
    }
  }
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

// The beginning of the tile that holds the first key that any row of the block may see.
__device__ __forceinline__ int first_tile(const Work& w, const Rows& rows) {
  return first_key(w, rows) / kKeys * kKeys;
}

// All segments, one after the other.
template <class Format, int kDim, bool kFp8, int kWarps>
__device__ __forceinline__ void walk_all(const Work& w, const Rows& rows, const WarpRows& mine,
                                         Shared<kDim, kFp8>& shared, int end) {
  Softmax<kDim> total;
  total.start();
  const int begin = first_tile(w, rows);
  walk<Format, kDim, kFp8, kWarps>(w, rows, mine, shared, begin, end, [&](const Softmax<kDim>& part) {
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
  });
  const float scale = factor(w.v_scale);
  const int column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (mine.head[i] < 0) continue;
    const Sunk sunk = with_sink(w, mine.head[i], total.maximum[i], total.sum[i]);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      if (8 * n >= w.dim) continue;
      auto* to = static_cast<BF16*>(w.out) + mine.head[i] * w.dim + 8 * n + column;
      *reinterpret_cast<uint32_t*>(to) =
          bfloat_pair(quotient(total.values[n][2 * i] * sunk.value_weight, sunk.sum) * scale,
                      quotient(total.values[n][2 * i + 1] * sunk.value_weight, sunk.sum) * scale);
    }
  }
}

// One segment, for merge_parts.
template <int kDim>
__device__ __forceinline__ void store_part(const Work& w, const WarpRows& mine, int segment,
                                           const Softmax<kDim>& part) {
  const int column = static_cast<int>(threadIdx.x) % 4 * 2;
  const int64_t base = segment * rows_in_all(w);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (mine.head[i] < 0) continue;
    const int64_t at = base + mine.head[i];
    if (column == 0) w.maxima[at] = part.maximum[i], w.sums[at] = part.sum[i];
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      if (8 * n >= w.dim) continue;
      float* to = w.values + at * w.dim + 8 * n + column;
      to[0] = part.values[n][2 * i], to[1] = part.values[n][2 * i + 1];
    }
  }
}

template <class Format, int kDim, bool kFp8, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, kWarps == 1 ? 8 : 2) attend(const __grid_constant__ Work w) {
  after_earlier_kernels();
  auto& shared = *reinterpret_cast<Shared<kDim, kFp8>*>(dynamic_shared());
  const Rows rows = rows_of<kWarpRows * kWarps>(w);
  if (rows.count == 0) return;
  const WarpRows mine = warp_rows(w, rows);
  const int end = position_of(w, rows, rows.count - 1) + 1;  // keys that the last row sees
  if (w.values == nullptr) return walk_all<Format, kDim, kFp8, kWarps>(w, rows, mine, shared, end);
  const int first = first_tile(w, rows);
  for (int segment = first / kSegment + static_cast<int>(blockIdx.z); segment * kSegment < end;
       segment += static_cast<int>(gridDim.z)) {
    const int begin = max(segment * kSegment, first);
    walk<Format, kDim, kFp8, kWarps>(
        w, rows, mine, shared, begin, min(end, (segment + 1) * kSegment),
        [&](const Softmax<kDim>& part) { store_part<kDim>(w, mine, segment, part); });
  }
}

// A block merges the segments of one token of one head, in order: their weights first, side by side, then the
// values, whose loads do not wait for each other.
__global__ void __launch_bounds__(kMergeThreads) merge_parts(const __grid_constant__ Work w) {
  after_earlier_kernels();
  __shared__ float maxima[kMergeThreads], sums[kMergeThreads], before[kMergeThreads], weight[kMergeThreads];
  const int token = static_cast<int>(blockIdx.x), me = static_cast<int>(threadIdx.x);
  const int keys = keys_of(w, token), segments = (keys + kSegment - 1) / kSegment;
  const int64_t all = rows_in_all(w), row = static_cast<int64_t>(token) * w.heads + blockIdx.y;
  float maximum = -INFINITY, sum = 0.0f, value = 0.0f;
  for (int first = max(keys - w.window, 0) / kSegment; first < segments; first += kMergeThreads) {
    const int count = min(kMergeThreads, segments - first);
    const int64_t base = first * all + row;
    __syncthreads();
    if (me < count) maxima[me] = w.maxima[base + me * all], sums[me] = w.sums[base + me * all];
    __syncthreads();
    float mine = maximum;
    for (int j = 0; j < count; ++j) {
      maximum = fmaxf(maximum, maxima[j]);
      if (j < me) mine = maximum;
    }
    if (me < count) {
      const Merge m = merge_of(mine, maxima[me]);
      before[me] = m.before, weight[me] = m.segment;
    }
    __syncthreads();
#pragma unroll 8
    for (int j = 0; j < count; ++j) {
      const Merge m{0.0f, before[j], weight[j]};
      sum = merged(m, sum, sums[j]);
      if (me < w.dim) value = merged(m, value, w.values[(base + j * all) * w.dim + me]);
    }
  }
  if (me < w.dim) {
    const Sunk sunk = with_sink(w, row, maximum, sum);
    store(quotient(value * sunk.value_weight, sunk.sum) * factor(w.v_scale),
          static_cast<BF16*>(w.out) + row * w.dim + me);
  }
}

// --- launch

template <class Format, int kDim, bool kFp8, int kWarps>
void run(Work w, int64_t tokens, const OnDevice& device, const Tensor& allocator) {
  const int64_t tiles = tiles_of(w, tokens, kWarpRows * kWarps), blocks = tiles * w.kv_heads;
  const int64_t bytes = int64_t{4} * w.segments * tokens * w.heads * (w.dim + 2);
  const bool apart = w.segments > 1 && blocks < 2 * device.multiprocessors() && bytes <= kMostParts;
  std::optional<Tensor> parts;
  if (apart) parts = make_parts(w, tokens, allocator);
  const int64_t each =
      apart ? std::min<int64_t>(w.segments, ceil_over(8 * device.multiprocessors(), blocks)) : 1;
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(w.kv_heads),
                  static_cast<unsigned>(each));
  launch_early(attend<Format, kDim, kFp8, kWarps>, grid, 32 * kWarps,
               static_cast<int>(sizeof(Shared<kDim, kFp8>)), device.stream(), w);
  if (!apart) return;
  launch_early(merge_parts, dim3(static_cast<unsigned>(tokens), static_cast<unsigned>(w.heads)),
               kMergeThreads, 0, device.stream(), w);
}

template <class Format, int kDim, bool kFp8>
void with_warps(const Work& w, int64_t tokens, const OnDevice& device, const Tensor& allocator) {
  const bool decoding = tokens * (w.heads / w.kv_heads) <= int64_t{kWarpRows} * w.sequences;
  decoding ? run<Format, kDim, kFp8, 1>(w, tokens, device, allocator)
           : run<Format, kDim, kFp8, 4>(w, tokens, device, allocator);
}

template <class Format, bool kFp8>
void with_width(const Work& w, int64_t tokens, const OnDevice& device, const Tensor& allocator) {
  w.dim <= 64 ? with_warps<Format, 64, kFp8>(w, tokens, device, allocator)
              : with_warps<Format, 128, kFp8>(w, tokens, device, allocator);
}

bool fits(const Call& call) {
  const Work& w = call.work;
  const bool types = w.query == Number::bf16 && (call.cache == ScalarType::BFloat16 || is_fp8(call.cache));
  const bool power_of_2 = (w.block_size & (w.block_size - 1)) == 0;
  return types && power_of_2 && w.whole && w.dim % 16 == 0 && w.dim <= 128 && aligned(w.q, 4);
}

}  // namespace

bool attend_on_tensor_cores(const Call& call, const OnDevice& device, const Tensor& allocator) {
  if (!fits(call)) return false;
  Work w = call.work;
  w.segments = static_cast<int>(ceil_over(static_cast<int64_t>(w.max_blocks) * w.block_size, kSegment));
  if (call.cache == ScalarType::BFloat16) {
    with_width<E4M3, false>(w, call.tokens, device, allocator);
  } else {
    with_format(call.cache, [&](auto format) {
      with_width<typename decltype(format)::type, true>(w, call.tokens, device, allocator);
    });
  }
  return true;
}

}  // namespace attention
}  // namespace fp8serve
