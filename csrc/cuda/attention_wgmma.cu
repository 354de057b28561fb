// paged_attention of prompts, which attention_tensor.cu defines, on Hopper's warpgroups, for BF16 queries
// over BF16 or FP8 caches and heads of up to 128 dimensions.
//
// A block has 128 neighbouring rows of a sequence that share a kv head, 64 for each of two warpgroups.
// Scores are m64n64k16 products (wgmma.h) of queries and keys in shared memory. Weights, rounded to BF16,
// are the left operand, in registers, of the products with the values in shared memory. Tiles have 64 keys,
// which threads copy asynchronously from the pages of the cache, because the tensor memory accelerator
// cannot follow pages. FP8 values are converted to BF16 after they have arrived.
//
// A tile is multiplied while the next are copied. One barrier per tile makes sure both that the tile has
// arrived and that no thread reads the previous one any more. One warpgroup multiplies while the other
// computes weights. While a warpgroup multiplies its first 32 keys' weights and values, it computes the
// weights of the next 32 keys.
//
// Order of operations. It is that of attention_mma.cu, by the same code (attention_softmax.h): the softmax
// advances by 32 keys, so a tile of 64 is processed in halves; it starts anew every 128 keys; and products
// add 16 of K at a time. Tiles begin at multiples of 64, so a block may read up to 32 keys more before its
// first, and a warpgroup processes all tiles that any of its 64 rows sees. Both change nothing, because the
// weights are 0. Blocks with the longest contexts are launched first.
#include "cuda/attention_paging.h"
#include "cuda/attention_softmax.h"
#include "cuda/wgmma.h"

namespace fp8serve {
namespace attention {
namespace {

constexpr int kGroupRows = 64, kGroups = 2, kBlockRows = kGroupRows * kGroups;
constexpr int kThreads = 128 * kGroups;
constexpr int kKeys = 64;
constexpr int kLeastSegments = 2;  // per block, for the longest possible context
static_assert(kKeys == 2 * kStep && kSegment % kKeys == 0);

// [kRows][kDim] BF16 in panels of 64 columns, as wgmma_matrix.h describes them.
template <int kRows, int kDim>
struct alignas(1024) Tile {
  uint4 chunk[kDim / 64 * kRows * 8];
  __device__ __forceinline__ uint4* at(int row, int c) { return &chunk[swizzled_chunk(kRows, row, c)]; }
};

// A ring of tiles of keys and values: one is multiplied, the next has arrived or is arriving, and the one
// after that is copied into the third. FP8 is copied to buffers of its own and converted into one of two
// tiles while the other is multiplied.
template <int kDim, bool kFp8>
struct Shared {
  static constexpr int kTiles = kFp8 ? 2 : 3;
  Tile<kBlockRows, kDim> q;
  Tile<kKeys, kDim> k[kTiles], v[kTiles];
  uint4 k_fp8[kFp8 ? 2 : 1][kKeys][kFp8 ? kDim / 16 : 1], v_fp8[kFp8 ? 2 : 1][kKeys][kFp8 ? kDim / 16 : 1];
};

// --- into shared memory

// Starts copying the block's queries, with zeros for missing rows and past the end of a head.
template <int kDim>
__device__ __forceinline__ void stage_queries(const Work& w, const Rows& rows, Tile<kBlockRows, kDim>& tile) {
  constexpr int kChunks = kDim / 8;
  for (int i = static_cast<int>(threadIdx.x); i < kBlockRows * kChunks; i += kThreads) {
    const int row = i / kChunks, c = i % kChunks;
    const bool valid = row < rows.count && 8 * c < w.dim;
    const int64_t from = valid ? head_of(w, rows, row) * w.dim + 8 * c : 0;
    copy_async(tile.at(row, c), static_cast<const BF16*>(w.q) + from, valid);
  }
}

// Starts copying keys and values [begin, begin + kKeys), with zeros from `end` on and past the end of a
// head.
template <int kDim, bool kFp8>
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

// Every thread converts what it copied itself to BF16.
template <int kDim, bool kE5M2>
__device__ __forceinline__ void widen_stage(Shared<kDim, true>& shared, int slot) {
  constexpr int kChunks = kDim / 16;
  for (int i = static_cast<int>(threadIdx.x); i < kKeys * kChunks; i += kThreads) {
    const int row = i / kChunks, c = i % kChunks;
    widen<kE5M2>(shared.k_fp8[slot][row][c], shared.k[slot], row, c);
    widen<kE5M2>(shared.v_fp8[slot][row][c], shared.v[slot], row, c);
  }
}

// --- one tile of keys onto a warpgroup's rows

// The arguments of attend_to_tile that are the same for all tiles.
struct Walk {
  uint32_t queries;     // shared-memory address of the warpgroup's rows
  float logits, scale;  // factors of scores: before a soft cap, and then to exponents of 2
  float softcap;
  int window;
};

template <int kDim>
__device__ __forceinline__ void score(uint32_t queries, uint32_t keys, Scores<kKeys / 8>& scores) {
  wgmma_fence();
#pragma unroll
  for (int d = 0; d < kDim / 16; ++d) {
    const uint64_t a = k_columns(queries, kBlockRows, d), b = k_columns(keys, kKeys, d);
    d == 0 ? wgmma<false>(scores, a, b) : wgmma<true>(scores, a, b);
  }
  wgmma_commit();
  wgmma_wait<0>();
  hold(scores);
}

// Starts adding a step's values, times their weights, to row.values. Neither row.values nor weights may be
// accessed before `mixed`.
template <int kDim>
__device__ __forceinline__ void mix(Softmax<kDim>& row, Weights& weights, uint32_t values) {
  hold(row.values);
  hold(weights);
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < kStep / 16; ++n) {
    wgmma(row.values, weights[n], k_rows(values + 16 * n * kPanelRow, kKeys, kDim));
  }
  wgmma_commit();
}

// Waits for `mix`.
template <int kDim>
__device__ __forceinline__ void mixed(Softmax<kDim>& row, Weights& weights) {
  wgmma_wait<0>();
  hold(row.values);
  hold(weights);
}

// seen: how many keys from the tile's first on rows g and g + 8 see; most: how many any of the warpgroup's
// rows sees.
template <int kDim>
__device__ __forceinline__ void attend_to_tile(const Walk& walk, Softmax<kDim>& row, uint32_t keys,
                                               uint32_t values, const int (&seen)[2], int most) {
  Scores<kKeys / 8> scores;
  Weights first, second;
  float correction[2];
  score<kDim>(walk.queries, keys, scores);
  if (walk.softcap != 0.0f) cap(scores, walk.logits / walk.softcap);
  min(seen[0], seen[1]) < kKeys ? mask(scores, walk.scale, seen) : scale_all(scores, walk.scale);
  if (most > walk.window) mask_before(scores, walk.window, seen);  // the last row's window begins here
  weigh<0>(row, scores, first, correction);
  rescale(row, correction);
  mix(row, first, values);
  weigh<kStep / 8>(row, scores, second, correction);
  mixed(row, first);
  rescale(row, correction);
  mix(row, second, values + kStep * kPanelRow);
  mixed(row, second);
}

// --- a block

// Attends to keys [begin, end), where begin is a multiple of kKeys. At the end of each segment it calls
// `segment_done(row, segment)`, with row.sum summed over all lanes of a row.
template <class Format, int kDim, bool kFp8, class F>
__device__ __forceinline__ void go_through(const Work& w, const Rows& rows, const WarpRows& mine,
                                           Shared<kDim, kFp8>& shared, int begin, int end,
                                           const F& segment_done) {
  constexpr int kTiles = Shared<kDim, kFp8>::kTiles;
  const Paged paged = paged_of<kFp8 ? 1 : 2>(w, rows);
  const float logits = w.softmax_scale * factor(w.k_scale);
  const Walk walk{shared_address(shared.q.at(mine.first / kGroupRows * kGroupRows, 0)), logits,
                  (w.softcap == 0.0f ? logits : w.softcap) * kLog2E, w.softcap, w.window};
  Softmax<kDim> row;
  row.start();
  stage_queries(w, rows, shared.q);
  stage(paged, shared, 0, begin, end);
  copy_commit();
  if (begin + kKeys < end) stage(paged, shared, 1, begin + kKeys, end);
  copy_commit();
  for (int at = begin, slot = 0; at < end; at += kKeys, slot = (slot + 1) % kTiles) {
    copy_wait<1>();
    if constexpr (kFp8) widen_stage<kDim, is_e5m2<Format>>(shared, slot);
    fence_async_proxy();
    __syncthreads();  // the tile has arrived, and no thread reads the previous one any more
    if (at + 2 * kKeys < end) stage(paged, shared, (slot + 2) % kTiles, at + 2 * kKeys, end);
    copy_commit();
    if (at < mine.most) {
      const int seen[2] = {mine.seen[0] - at, mine.seen[1] - at};
      attend_to_tile(walk, row, shared_address(&shared.k[slot]), shared_address(&shared.v[slot]), seen,
                     mine.most - at);
    }
    if ((at + kKeys) % kSegment == 0 || at + kKeys >= end) {
      for (int i = 0; i < 2; ++i) row.sum[i] = quad_sum(row.sum[i]);
      segment_done(row, at / kSegment);
      row.start();
    }
  }
}

template <class Format, int kDim, bool kFp8>
__global__ void __launch_bounds__(kThreads, 1) attend_to_prompt(const __grid_constant__ Work w) {
  after_earlier_kernels();
  auto& shared = *reinterpret_cast<Shared<kDim, kFp8>*>(dynamic_shared());
  const Rows rows = rows_of<kBlockRows>(w, static_cast<int>(gridDim.x - 1 - blockIdx.x));
  if (rows.count == 0 || !is_prompt(w, rows)) return;
  const WarpRows mine = warp_rows<kGroupRows>(w, rows);
  const int end = position_of(w, rows, rows.count - 1) + 1;  // keys that the last row sees
  const int first = first_key(w, rows) / kKeys * kKeys;
  if (w.values == nullptr) {
    Softmax<kDim> total;
    total.start();
    go_through<Format>(w, rows, mine, shared, first, end,
                       [&](const Softmax<kDim>& part, int) { join(total, part); });
    store_rows(w, mine, total);
    return;
  }
  const Keys keys = keys_of_block(first, end);
  if (keys.begin >= keys.end) return;
  go_through<Format>(w, rows, mine, shared, keys.begin, keys.end,
                     [&](const Softmax<kDim>& part, int segment) { store_part(w, mine, segment, part); });
}

// --- launch

template <class Format, int kDim, bool kFp8>
void run(const Work& w, int64_t tokens, const OnDevice& device) {
  const dim3 grid(static_cast<unsigned>(tiles_of(w, tokens, kBlockRows)), static_cast<unsigned>(w.kv_heads),
                  w.values == nullptr ? 1 : static_cast<unsigned>(ceil_over(w.segments, kLeastSegments)));
  launch_early(attend_to_prompt<Format, kDim, kFp8>, grid, kThreads,
               static_cast<int>(sizeof(Shared<kDim, kFp8>)), device.stream(), w);
}

template <class Format, bool kFp8>
void with_width(const Work& w, int64_t tokens, const OnDevice& device) {
  w.dim <= 64 ? run<Format, 64, kFp8>(w, tokens, device) : run<Format, 128, kFp8>(w, tokens, device);
}

}  // namespace

void attend_by_wgmma(const Work& w, ScalarType cache, int64_t tokens, const OnDevice& device) {
  if (cache == ScalarType::BFloat16) return with_width<E4M3, false>(w, tokens, device);
  with_format(cache,
              [&](auto format) { with_width<typename decltype(format)::type, true>(w, tokens, device); });
}

}  // namespace attention
}  // namespace fp8serve
