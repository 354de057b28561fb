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
#include "cuda/attention_paging.h"
#include "cuda/attention_softmax.h"

namespace fp8serve {
namespace attention {
namespace {

constexpr int kKeys = kStep;

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

// Starts copying keys [begin, begin + kKeys) into a stage; zeros from `end` on, and behind a head's end.
template <int kDim, bool kFp8, int kThreads>
__device__ __forceinline__ void stage(const Paged& paged, Shared<kDim, kFp8>& shared, int slot, int begin,
                                      int end) {
  constexpr int kChunks = kDim * (kFp8 ? 1 : 2) / 16;
  for_chunks_of<kKeys, kChunks, kThreads>(paged, begin, end, [&](int row, int c, int64_t from, bool valid) {
    if constexpr (kFp8) {
      copy_async(&shared.k_fp8[slot][row][c], paged.k + from, valid);
      copy_async(&shared.v_fp8[slot][row][c], paged.v + from, valid);
    } else {
      copy_async(shared.k[slot].at(row, c), paged.k + from, valid);
      copy_async(shared.v[slot].at(row, c), paged.v + from, valid);
    }
  });
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

template <int kDim>
using Queries = uint32_t[kDim / 16][4];

__device__ __forceinline__ void multiply(float (&low)[4], float (&high)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[4]) {
  const uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
  mma_bf16(low, a, first);
  mma_bf16(high, a, second);
}

template <int kDim>
__device__ __forceinline__ void score(const Queries<kDim>& q, Tile<kDim>& k, Scores<kKeys / 8>& scores) {
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

template <int kDim>
__device__ __forceinline__ void mix(Softmax<kDim>& row, Tile<kDim>& v, const Weights& weights) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int n = 0; n < kKeys / 16; ++n) {
    const Place first = place_of(v.at(16 * n + lane % 16, lane / 16));
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      uint32_t b[4];
      load_matrices_at<true>(b, further(first, d));
      multiply(row.values[2 * d], row.values[2 * d + 1], weights[n], b);
    }
  }
}

// --- a block

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
      Scores<kKeys / 8> scores;
      Weights weights;
      float correction[2];
      score<kDim>(q, shared.k[now], scores);
      if (w.softcap != 0.0f) cap(scores, logits / w.softcap);
      mask(scores, scale, seen);
      if (at < mine.most - w.window) mask_before(scores, w.window, seen);  // the last row's begins here
      weigh<0>(row, scores, weights, correction);
      rescale(row, correction);
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
  walk<Format, kDim, kFp8, kWarps>(w, rows, mine, shared, begin, end,
                                   [&](const Softmax<kDim>& part) { join(total, part); });
  store_rows(w, mine, total);
}

template <class Format, int kDim, bool kFp8, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, kWarps == 1 ? 8 : 2) attend(const __grid_constant__ Work w) {
  after_earlier_kernels();
  auto& shared = *reinterpret_cast<Shared<kDim, kFp8>*>(dynamic_shared());
  const Rows rows = rows_of<kWarpRows * kWarps>(w, static_cast<int>(blockIdx.x));
  if (rows.count == 0 || is_prompt(w, rows)) return;
  const WarpRows mine = warp_rows<kWarpRows>(w, rows);
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

// --- launch

template <class Format, int kDim, bool kFp8, int kWarps>
void run(const Work& w, const MmaGrid& blocks, const OnDevice& device) {
  const dim3 grid(static_cast<unsigned>(blocks.tiles), static_cast<unsigned>(w.kv_heads),
                  static_cast<unsigned>(blocks.each));
  launch_early(attend<Format, kDim, kFp8, kWarps>, grid, 32 * kWarps,
               static_cast<int>(sizeof(Shared<kDim, kFp8>)), device.stream(), w);
}

template <class Format, int kDim, bool kFp8>
void with_warps(const Work& w, const MmaGrid& blocks, const OnDevice& device) {
  blocks.warps == 1 ? run<Format, kDim, kFp8, 1>(w, blocks, device)
                    : run<Format, kDim, kFp8, 4>(w, blocks, device);
}

template <class Format, bool kFp8>
void with_width(const Work& w, const MmaGrid& blocks, const OnDevice& device) {
  w.dim <= 64 ? with_warps<Format, 64, kFp8>(w, blocks, device)
              : with_warps<Format, 128, kFp8>(w, blocks, device);
}

}  // namespace

void attend_by_mma(const Work& w, ScalarType cache, const MmaGrid& blocks, const OnDevice& device) {
  if (cache == ScalarType::BFloat16) return with_width<E4M3, false>(w, blocks, device);
  with_format(cache,
              [&](auto format) { with_width<typename decltype(format)::type, true>(w, blocks, device); });
}

}  // namespace attention
}  // namespace fp8serve
