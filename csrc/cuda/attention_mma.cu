// paged_attention on tensor cores, for BF16 queries over BF16 or FP8 caches and heads of up to 128
// dimensions.
//
// A row is one query token of one head; the heads of a group that share a kv head are neighbouring rows (row
// r is token r / group), so that a decoding token of 4 or 8 heads fills one tile of 16 and reads its keys
// once. A warp has 16 rows: scores are m16n8k16 products of queries in registers and keys in shared memory,
// weights are rounded to BF16 in registers, where the layout of sums is that of the next product's left
// operand. FP8 values are copied asynchronously as they are and widened to BF16, exactly: by one warp in
// registers, by several, which share them, in shared memory.
//
// Order. Keys are taken 32 at a time with an online softmax, which starts afresh every 128 at absolute
// positions; a segment's result is merged into the row's, in order. One block with all segments of its rows
// (prefill, large batches) and blocks that share them with `merge_parts` behind it (few rows, so that the
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
#include <type_traits>

#include "cuda/attention_paging.h"
#include "cuda/attention_softmax.h"

namespace fp8serve {
namespace attention {
namespace {

constexpr int kKeys = kStep;

// [kKeys] rows of 16-byte chunks. Eight rows at the same chunk lie in different banks. From one place to
// others leads an xor with one of few numbers and a sum with a constant, which is part of an instruction:
// so places take few registers.
template <int kChunks>
struct Tile {
  uint4 chunk[kKeys][kChunks];
  static constexpr int swizzle(int key) { return kChunks < 8 ? key / (8 / kChunks) % kChunks : key % 8; }
  __device__ __forceinline__ uint4* at(int key, int c) { return &chunk[key][c ^ swizzle(key)]; }
  // From row r < 2^i to row r + `rows`, a multiple of 2^i.
  static __device__ __forceinline__ Place down(Place first, int rows) {
    return (first ^ static_cast<Place>(swizzle(rows) * 16)) + static_cast<Place>(rows * kChunks * 16);
  }
  // From a row's chunk c < 2 to chunk 2d + c of the row 16n further.
  static __device__ __forceinline__ Place further(Place first, int n, int d) {
    return (first ^ static_cast<Place>(d % 4 * 32)) + static_cast<Place>(d / 4 * 128 + n * kChunks * 256);
  }
};

// What has been copied. While keys are multiplied, values are copied, and the other way round. One warp has
// one place for each, so that many blocks fit a multiprocessor, or two of FP8, which are as large.
template <int kDim, bool kFp8, int kWarps>
struct Copied {
  static constexpr int kStages = kWarps == 1 && !kFp8 ? 1 : 2;
  static constexpr int kChunks = kDim * (kFp8 ? 1 : 2) / 16;
  Tile<kChunks> k[kStages], v[kStages];
};
template <int kDim>
struct Widened {
  Tile<kDim / 8> k, v;
};
struct Nothing {};

// Several warps share what FP8 is widened to, one warp widens in registers.
template <bool kFp8, int kWarps>
constexpr bool kWidensTiles = kFp8 && kWarps > 1;
template <bool kFp8, int kWarps>
constexpr bool kWidensWords = kFp8 && kWarps == 1;

template <int kDim, bool kFp8, int kWarps>
struct Shared : Copied<kDim, kFp8, kWarps> {
  std::conditional_t<kWidensTiles<kFp8, kWarps>, Widened<kDim>, Nothing> wide;
};

template <int kWarps>
__device__ __forceinline__ void wait_for_warps() {
  if constexpr (kWarps == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// --- keys and values into shared memory

// What a thread copies of every tile: its chunk of a head, of rows that are `kThreads / kChunks` apart.
struct Source {
  const char *k, *v;  // its chunk of slot 0
  const int* table;
  int shift, mask, token;
  bool inside;  // the head
};
template <int kChunks, int kBytes>
__device__ __forceinline__ Source source_of(const Work& w, const Rows& rows) {
  const Paged paged = paged_of<kBytes>(w, rows);
  const int byte = static_cast<int>(threadIdx.x) % kChunks * 16;
  return {paged.k + paged.offset + byte,
          paged.v + paged.offset + byte,
          paged.table,
          paged.shift,
          paged.mask,
          static_cast<int>(paged.token),
          byte < paged.head};
}

// Lane i finds where key `begin` + i lies; -1 from `end` on. All lanes are told by shuffles.
__device__ __forceinline__ int slot_of(const Source& from, int begin, int end) {
  const int key = begin + static_cast<int>(threadIdx.x) % 32;
  return key < end ? (from.table[key >> from.shift] << from.shift) + (key & from.mask) : -1;
}

// Starts copying the rows of keys or values, of which there are `count`; zeros for those that there are not,
// and behind a head's end. In blocks of 16 and more, 16 rows lie one behind the other.
template <int kThreads, int kChunks>
__device__ __forceinline__ void stage(const Source& from, const char* cache, int slots, int count,
                                      Tile<kChunks>& tile) {
  constexpr int kStride = kThreads / kChunks;
  const int c = static_cast<int>(threadIdx.x) % kChunks, row = static_cast<int>(threadIdx.x) / kChunks;
  const Place first = found_anew(place_of(tile.at(row, c)));
  const int last = from.inside ? count - row : 0;  // of the thread's rows
  if (kStride <= 16 && from.mask >= 15) {
#pragma unroll
    for (int half = 0; half < kKeys; half += 16) {
      const int slot = max(__shfl_sync(kAllLanes, slots, half), 0) + row;
      const char* at = cache + static_cast<int64_t>(slot) * from.token;
#pragma unroll
      for (int i = half; i < half + 16; i += kStride, at += kStride * from.token) {
        copy_async_to(tile.down(first, i), at, i < last);
      }
    }
    return;
  }
#pragma unroll 1
  for (int i = row; i < kKeys; i += kStride) {
    const int slot = __shfl_sync(kAllLanes, slots, i);
    copy_async(tile.at(i, c), cache + static_cast<int64_t>(max(slot, 0)) * from.token, i - row < last);
  }
}

// Every thread widens what it has copied itself. Of every 16 dimensions of keys, as in registers, the first
// of two products with eight takes the first two of every four.
template <bool kE5M2, int kThreads, int kChunks>
__device__ __forceinline__ void widen_keys(Tile<kChunks>& bytes, Tile<2 * kChunks>& tile) {
  for (int i = static_cast<int>(threadIdx.x); i < kKeys * kChunks; i += kThreads) {
    const int row = i / kChunks, c = i % kChunks;
    const uint4 chunk = *bytes.at(row, c);
    const uint2 a = widened<kE5M2>(chunk.x), b = widened<kE5M2>(chunk.y), d = widened<kE5M2>(chunk.z),
                e = widened<kE5M2>(chunk.w);
    *tile.at(row, 2 * c) = {a.x, b.x, d.x, e.x};
    *tile.at(row, 2 * c + 1) = {a.y, b.y, d.y, e.y};
  }
}
template <bool kE5M2, int kThreads, int kChunks>
__device__ __forceinline__ void widen_values(Tile<kChunks>& bytes, Tile<2 * kChunks>& tile) {
  for (int i = static_cast<int>(threadIdx.x); i < kKeys * kChunks; i += kThreads) {
    widen<kE5M2>(*bytes.at(i / kChunks, i % kChunks), tile, i / kChunks, i % kChunks);
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

// Where the lane's row begins of the matrices of the first 16 keys, and where of the first 16 values.
template <int kChunks>
__device__ __forceinline__ Place keys_at(Tile<kChunks>& k) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return found_anew(place_of(k.at(lane % 8 + lane / 16 * 8, lane / 8 % 2)));
}
template <int kChunks>
__device__ __forceinline__ Place values_at(Tile<kChunks>& v) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return found_anew(place_of(v.at(lane % 16, lane / 16)));
}

template <int kDim>
__device__ __forceinline__ void score(const Queries<kDim>& q, Tile<kDim / 8>& k, Scores<kKeys / 8>& scores) {
  const Place first = keys_at(k);
#pragma unroll
  for (int d = 0; d < kDim / 16; ++d) {
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      uint32_t b[4];
      load_matrices_at<false>(b, k.further(first, n, d));
      multiply(scores[2 * n], scores[2 * n + 1], q[d], b);
    }
  }
}

template <int kDim>
__device__ __forceinline__ void mix(Softmax<kDim>& row, Tile<kDim / 8>& v, const Weights& weights) {
  const Place first = values_at(v);
#pragma unroll
  for (int n = 0; n < kKeys / 16; ++n) {
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      uint32_t b[4];
      load_matrices_at<true>(b, v.further(first, n, d));
      multiply(row.values[2 * d], row.values[2 * d + 1], weights[n], b);
    }
  }
}

// As above, of FP8. A chunk has 16 dimensions, and lane 4g + t gets four neighbours of key g in one word: the
// dimensions 4t.. of one product, which the queries' lanes hold for it.
template <int kDim, bool kE5M2>
__device__ __forceinline__ void score_bytes(const Queries<kDim>& q, Tile<kDim / 16>& k,
                                            Scores<kKeys / 8>& scores) {
  const Place first = keys_at(k);
#pragma unroll
  for (int d = 0; d < kDim / 32; ++d) {
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      uint32_t words[4];
      load_matrices_at<false>(words, k.further(first, n, d));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint2 low = widened<kE5M2>(words[i]), high = widened<kE5M2>(words[2 + i]);
        multiply(scores[2 * n], scores[2 * n + 1], q[2 * d + i], {low.x, low.y, high.x, high.y});
      }
    }
  }
}

// A word has the dimensions 2g, 2g + 1 of the keys 2t and 2t + 1: the even dimensions are a product's
// columns, and the odd ones another's (`pair_of` knows).
template <int kDim, bool kE5M2>
__device__ __forceinline__ void mix_bytes(Softmax<kDim>& row, Tile<kDim / 16>& v, const Weights& weights) {
  const Place first = values_at(v);
#pragma unroll
  for (int n = 0; n < kKeys / 16; ++n) {
#pragma unroll
    for (int d = 0; d < kDim / 32; ++d) {
      uint32_t words[4];
      load_matrices_at<true>(words, v.further(first, n, d));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint2 low = widened_columns<kE5M2>(words[2 * i]),
                    high = widened_columns<kE5M2>(words[2 * i + 1]);
        const int at = 4 * d + 2 * i;
        multiply(row.values[at], row.values[at + 1], weights[n], {low.x, high.x, low.y, high.y});
      }
    }
  }
}

// --- a block

// FP8: of every 16 dimensions, the first of two products with eight takes the first two of every four.
template <int kDim, bool kFp8>
__device__ __forceinline__ void load_queries(const Work& w, const WarpRows& mine, Queries<kDim>& q) {
  const int lane = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int d = 0; d < kDim / 16; ++d) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {  // rows g, g + 8, then both of the second product with eight
      const int at = 16 * d + (kFp8 ? 4 * lane + e / 2 * 2 : 2 * lane + e / 2 * 8);
      const int64_t head = mine.head[e % 2];
      const auto* from = static_cast<const BF16*>(w.q) + head * w.dim + at;
      q[d][e] = head >= 0 && at < w.dim ? *reinterpret_cast<const uint32_t*>(from) : 0;
    }
  }
}

// Keys [begin, end), begin a multiple of kKeys; `segment_done(row, segment)` at the end of each segment, with
// the sums of whole rows.
template <class Format, int kDim, bool kFp8, int kWarps, class F>
__device__ __forceinline__ void walk(const Work& w, const Rows& rows, const WarpRows& mine,
                                     Shared<kDim, kFp8, kWarps>& shared, int begin, int end,
                                     const F& segment_done) {
  constexpr int kThreads = 32 * kWarps, kStages = Shared<kDim, kFp8, kWarps>::kStages;
  constexpr bool kTiles = kWidensTiles<kFp8, kWarps>, kWords = kWidensWords<kFp8, kWarps>;
  const Source from = source_of<Shared<kDim, kFp8, kWarps>::kChunks, kFp8 ? 1 : 2>(w, rows);
  int slots = slot_of(from, begin, end);
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    stage<kThreads>(from, from.k, slots, end - begin - i * kKeys, shared.k[i]);
    copy_commit();
    stage<kThreads>(from, from.v, slots, end - begin - i * kKeys, shared.v[i]);
    copy_commit();
    slots = slot_of(from, begin + (i + 1) * kKeys, end);
  }
  const float logits = w.softmax_scale * factor(w.k_scale);
  const float scale = (w.softcap == 0.0f ? logits : w.softcap) * kLog2E;
  const int least = position_of(w, rows, mine.first) + 1;  // keys that the first row sees
  Queries<kDim> q;
  load_queries<kDim, kFp8>(w, mine, q);
  Softmax<kDim> row;
  row.start();
  for (int at = begin, slot = 0; at < end; at += kKeys, slot = (slot + 1) % kStages) {
    const int left = end - at - kStages * kKeys;  // keys behind those that have come or are coming
    const bool visible = kWarps == 1 || at < mine.most, more = left > 0;
    Scores<kKeys / 8> scores = {};
    Weights weights;
    copy_wait<2 * kStages - 1>();
    if constexpr (kTiles) widen_keys<is_e5m2<Format>, kThreads>(shared.k[slot], shared.wide.k);
    wait_for_warps<kWarps>();
    if (visible) {
      if constexpr (kWords) {
        score_bytes<kDim, is_e5m2<Format>>(q, shared.k[slot], scores);
      } else if constexpr (kTiles) {
        score<kDim>(q, shared.wide.k, scores);
      } else {
        score<kDim>(q, shared.k[slot], scores);
      }
    }
    wait_for_warps<kWarps>();  // keys may be copied there again
    if (more) stage<kThreads>(from, from.k, slots, left, shared.k[slot]);
    copy_commit();
    if (visible) {
      const int seen[2] = {mine.seen[0] - at, mine.seen[1] - at};
      float correction[2];
      if (w.softcap != 0.0f) cap(scores, logits / w.softcap);
      at + kKeys > least ? mask(scores, scale, seen) : scale_all(scores, scale);
      if (at < mine.most - w.window) mask_before(scores, w.window, seen);  // the last row's begins here
      weigh<0>(row, scores, weights, correction);
      rescale(row, correction);
    }
    copy_wait<2 * kStages - 1>();
    if constexpr (kTiles) widen_values<is_e5m2<Format>, kThreads>(shared.v[slot], shared.wide.v);
    wait_for_warps<kWarps>();
    if (visible) {
      if constexpr (kWords) {
        mix_bytes<kDim, is_e5m2<Format>>(row, shared.v[slot], weights);
      } else if constexpr (kTiles) {
        mix<kDim>(row, shared.wide.v, weights);
      } else {
        mix<kDim>(row, shared.v[slot], weights);
      }
    }
    wait_for_warps<kWarps>();  // so may values
    if (more) stage<kThreads>(from, from.v, slots, left, shared.v[slot]);
    copy_commit();
    slots = slot_of(from, at + (kStages + 1) * kKeys, end);
    if ((at + kKeys) % kSegment == 0 || at + kKeys >= end) {
      for (int i = 0; i < 2; ++i) row.sum[i] = quad_sum(row.sum[i]);
      segment_done(row, at / kSegment);
      row.start();
    }
  }
}

// With parts, blocks share the segments of their rows, else a block takes all of them.
template <class Format, int kDim, bool kFp8, int kWarps, bool kParts>
__global__ void __launch_bounds__(32 * kWarps, kWarps > 1 ? 2
                                               : kParts   ? kResident
                                                          : 8) attend(const __grid_constant__ Work w) {
  after_earlier_kernels();
  constexpr bool kEvenOdd = kWidensWords<kFp8, kWarps>;
  auto& shared = *reinterpret_cast<Shared<kDim, kFp8, kWarps>*>(dynamic_shared());
  const Rows rows = rows_of<kWarpRows * kWarps>(w, static_cast<int>(blockIdx.x));
  if (rows.count == 0 || is_prompt(w, rows)) return;
  const WarpRows mine = warp_rows<kWarpRows>(w, rows);
  const int first = first_key(w, rows) / kKeys * kKeys;      // the tile's that holds the first key to be seen
  const int end = position_of(w, rows, rows.count - 1) + 1;  // keys that the last row sees
  if constexpr (kParts) {
    const Keys keys = keys_of_block(first, end);
    if (keys.begin >= keys.end) return;
    walk<Format, kDim, kFp8, kWarps>(
        w, rows, mine, shared, keys.begin, keys.end,
        [&](const Softmax<kDim>& part, int segment) { store_part<kEvenOdd>(w, mine, segment, part); });
  } else {
    Softmax<kDim> total;
    total.start();
    walk<Format, kDim, kFp8, kWarps>(w, rows, mine, shared, first, end,
                                     [&](const Softmax<kDim>& part, int) { join(total, part); });
    store_rows<kEvenOdd>(w, mine, total);
  }
}

// --- launch

template <class Format, int kDim, bool kFp8, int kWarps>
void run(const Work& w, const MmaGrid& blocks, const OnDevice& device) {
  const dim3 grid(static_cast<unsigned>(blocks.tiles), static_cast<unsigned>(w.kv_heads),
                  static_cast<unsigned>(blocks.each));
  const auto kernel = w.values == nullptr ? attend<Format, kDim, kFp8, kWarps, false>
                                          : attend<Format, kDim, kFp8, kWarps, true>;
  launch_early(kernel, grid, 32 * kWarps, static_cast<int>(sizeof(Shared<kDim, kFp8, kWarps>)),
               device.stream(), w);
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
