// paged_attention on tensor cores, for BF16 queries over BF16 or FP8 caches and heads of up to 128
// dimensions.
//
// A row is one query token of one head. The heads of a group, which share a kv head, are neighbouring rows
// (row r is token r / group), so a decoding token of up to 16 heads a group needs one tile of 16 rows and
// reads its keys once. A warp has 16 rows. Scores are m16n8k16 products of queries in registers and keys in
// shared memory. Weights are rounded to BF16 in registers, where the result of one product has the layout
// of the left operand of the next. FP8 keys and values are copied asynchronously as they are and then
// converted to BF16, exactly: in registers by a block of one warp, in shared memory by a block of several
// warps, which share the result.
//
// Order of operations. Keys are processed 32 at a time with an online softmax, which starts anew every 128
// keys at absolute positions; the results of these segments are merged in order. Either one block handles
// all segments of its rows (prefill, large batches), or several blocks share them and `merge_parts` merges
// the results (few rows, so that the whole device reads memory): the operations and their order are the
// same. Tiles of keys that a row must not see change nothing. So a row's result depends, to the last bit,
// on its own query and context alone: not on its batch, not on how a prompt was split, and not on the
// number of warps per block (1 for decoding, 4 for prefill, chosen by the average number of rows of a
// sequence).
//
// Tiles before the windows of all of a block's rows are not read. Tiles that begin before the window of the
// block's last row are masked in a separate pass, which attention without a window skips.
//
// A block may read values that some of its rows do not see. These must be finite: their weight is 0, and 0
// times NaN is NaN. They are not finite only in a request whose own activations overflowed, and the next
// token of that request is refused.
#include <type_traits>

#include "cuda/attention_paging.h"
#include "cuda/attention_softmax.h"

namespace fp8serve {
namespace attention {
namespace {

constexpr int kKeys = kStep;

// kKeys rows of 16-byte chunks, swizzled: the same chunk of eight neighbouring rows lies in different
// banks. The address of another chunk is the first one, xor one of few numbers, plus a constant that is
// part of the instruction, so addresses take few registers.
template <int kChunks>
struct Tile {
  uint4 chunk[kKeys][kChunks];
  static constexpr int swizzle(int key) { return kChunks < 8 ? key / (8 / kChunks) % kChunks : key % 8; }
  __device__ __forceinline__ uint4* at(int key, int c) { return &chunk[key][c ^ swizzle(key)]; }
  // `first`: a chunk of a row r < 2^i. Returns the address of the same chunk in row r + `rows`, where
  // `rows` is a multiple of 2^i.
  static __device__ __forceinline__ Place down(Place first, int rows) {
    return (first ^ static_cast<Place>(swizzle(rows) * 16)) + static_cast<Place>(rows * kChunks * 16);
  }
  // `first`: chunk c < 2 of a row. Returns the address of chunk 2d + c in the row 16n below.
  static __device__ __forceinline__ Place further(Place first, int n, int d) {
    return (first ^ static_cast<Place>(d % 4 * 32)) + static_cast<Place>(d / 4 * 128 + n * kChunks * 256);
  }
};

// The memory that keys and values are copied to. Values are copied while keys are multiplied, and the other
// way round. A block of one warp has one stage of BF16, or two of FP8, which are as large, so that many
// blocks fit on a multiprocessor.
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

// Several warps convert FP8 to BF16 tiles in shared memory; a single warp converts words in registers.
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

// What a thread copies of every tile: one 16-byte chunk of the head, in rows that are `kThreads / kChunks`
// apart.
struct Source {
  const char *k, *v;  // the thread's chunk in slot 0 of the caches
  const int* table;
  int shift, mask, token;  // as in Paged
  bool inside;             // the chunk is not past the end of the head
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

// Returns in lane i the cache slot of key `begin` + i, or -1 from `end` on. All lanes get it by shuffles.
__device__ __forceinline__ int slot_of(const Source& from, int begin, int end) {
  const int key = begin + static_cast<int>(threadIdx.x) % 32;
  return key < end ? (from.table[key >> from.shift] << from.shift) + (key & from.mask) : -1;
}

// Starts copying `count` rows of keys or values, at most a tile, from `slots` (slot_of). Further rows, and
// chunks past the end of the head, become zeros. In a cache with blocks of at least 16 tokens, 16 rows are
// consecutive slots.
template <int kThreads, int kChunks>
__device__ __forceinline__ void stage(const Source& from, const char* cache, int slots, int count,
                                      Tile<kChunks>& tile) {
  constexpr int kStride = kThreads / kChunks;
  const int c = static_cast<int>(threadIdx.x) % kChunks, row = static_cast<int>(threadIdx.x) / kChunks;
  const Place first = found_anew(place_of(tile.at(row, c)));
  const int last = from.inside ? count - row : 0;  // the thread's rows from here on become zeros
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

// Every thread converts what it copied itself. Of every 16 dimensions of keys, the first half of a
// product's K takes the first two of every four and the second half takes the others, as in `load_queries`.
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

// Return the address that the lane passes to load_matrices_at for the first 16 keys, and for the first 16
// values.
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

// `score` for FP8. A chunk has 16 dimensions, and lane 4g + t gets dimensions 4t to 4t + 3 of key g in one
// word. `load_queries` gives it the same dimensions of the queries.
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

// `mix` for FP8. A word has dimensions 2g and 2g + 1 of keys 2t and 2t + 1. The even dimensions are the
// columns of one product, and the odd ones those of another (see `pair_of`).
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

// Loads the queries as left operands. With FP8 keys, of every 16 dimensions, the first half of a product's
// K takes the first two of every four and the second half takes the others.
template <int kDim, bool kFp8>
__device__ __forceinline__ void load_queries(const Work& w, const WarpRows& mine, Queries<kDim>& q) {
  const int lane = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int d = 0; d < kDim / 16; ++d) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {  // rows g, g + 8 of the first half of K, then of the second
      const int at = 16 * d + (kFp8 ? 4 * lane + e / 2 * 2 : 2 * lane + e / 2 * 8);
      const int64_t head = mine.head[e % 2];
      const auto* from = static_cast<const BF16*>(w.q) + head * w.dim + at;
      q[d][e] = head >= 0 && at < w.dim ? *reinterpret_cast<const uint32_t*>(from) : 0;
    }
  }
}

// Attends to keys [begin, end), where begin is a multiple of kKeys. At the end of each segment it calls
// `segment_done(row, segment)`, with row.sum summed over all lanes of a row.
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
    const int left = end - at - kStages * kKeys;  // keys whose copy has not been started
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
    wait_for_warps<kWarps>();  // shared.k[slot] may be overwritten now
    if (more) stage<kThreads>(from, from.k, slots, left, shared.k[slot]);
    copy_commit();
    if (visible) {
      const int seen[2] = {mine.seen[0] - at, mine.seen[1] - at};
      float correction[2];
      if (w.softcap != 0.0f) cap(scores, logits / w.softcap);
      at + kKeys > least ? mask(scores, scale, seen) : scale_all(scores, scale);
      if (at < mine.most - w.window)
        mask_before(scores, w.window, seen);  // the last row's window begins here
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
    wait_for_warps<kWarps>();  // so may shared.v[slot]
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

// With kParts, several blocks share the segments of their rows; else one block handles all of them.
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
  const int first = first_key(w, rows) / kKeys * kKeys;      // where the first tile that a row sees begins
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
