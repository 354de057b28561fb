// Shared by the attention kernels: their arguments, the memory for parts of a softmax, and which rows a
// block has.
#pragma once

#include "cuda/cast.h"

namespace fp8serve {
namespace attention {

constexpr int kNoWindow = 1 << 30;  // in keys: more than any context has
constexpr int kNoPrompt = 1 << 30;  // in rows: more than any sequence has

struct Work {
  const void *q, *k, *v;  // q: [tokens, heads, dim]; k, v: caches [blocks, block_size, kv_heads, dim]
  void* out;              // like q
  Number query;           // type of q and out
  const int *tables, *lengths, *starts;  // block_tables, context_lens and query_starts of the op
  const float *k_scale, *v_scale;        // null for 1
  float softmax_scale;
  bool whole;  // heads in the caches are 16-byte aligned, and dim is a multiple of 8
  int sequences, max_blocks, block_size, heads, kv_heads, dim, segments;
  int group;                    // heads that share a kv head
  int window;                   // keys that a row sees at most, its own included
  float softcap;                // c of c * tanh(score / c); 0: scores stay as they are
  const float* sinks;           // [heads] logits that join the sums of weights, or null
  int prompt_rows = kNoPrompt;  // attention_wgmma.cu handles sequences with at least as many rows
  // Parts of the softmax: [segments][rows], [segments][rows], [segments][rows][dim]; null: one block
  // handles all segments.
  float *maxima = nullptr, *sums = nullptr, *values = nullptr;
};

struct Call {
  Work work;
  int64_t tokens;
  ScalarType cache;
  int64_t slots;  // tokens that the cache holds
};

// Attends on tensor cores, for BF16 queries. Returns false and does nothing for unsupported problems.
bool attend_on_tensor_cores(const Call& call, const OnDevice& device, const Tensor& allocator);

// Blocks of one warp that are resident on a multiprocessor: the compiler limits their registers
// accordingly. A multiprocessor has four register files, so only multiples of 4 make a difference.
constexpr int kResident = 12;

// The grid of the mma kernel: warps per block, tiles of rows, and blocks that share the segments of a tile.
struct MmaGrid {
  int warps;
  int64_t tiles, each;
};
// Attends to all sequences but prompts, with mma.
void attend_by_mma(const Work& w, ScalarType cache, const MmaGrid& blocks, const OnDevice& device);
// Attends to prompts, with wgmma. With memory for parts, several blocks share the segments of a tile of
// rows; else one block handles all of them.
void attend_by_wgmma(const Work& w, ScalarType cache, int64_t tokens, const OnDevice& device);

// Allocates memory for the parts of every segment and points `w` to it. The returned tensor owns the
// memory.
inline Tensor make_parts(Work& w, int64_t tokens, const Tensor& allocator) {
  const int64_t rows = w.segments * tokens * w.heads;
  const Tensor parts = empty(allocator, {rows * (w.dim + 2)}, ScalarType::Float);
  w.maxima = data<float>(parts), w.sums = w.maxima + rows, w.values = w.sums + rows;
  return parts;
}

__device__ __forceinline__ float factor(const float* scale) { return scale == nullptr ? 1.0f : *scale; }

// Returns value / sum, or 0 for a row that sees no key, as the reference does. NaN stays NaN.
__device__ __forceinline__ float quotient(float value, float sum) { return sum == 0.0f ? 0.0f : value / sum; }

// --- which rows
// ---------------------------------------------------------------------------------------------------

struct Rows {
  int sequence, first,
      count;  // rows [first, first + count) of the sequence's tokens * group; count 0: nothing to do
  int start, tokens, length;  // of the sequence: its first token in q, its new tokens, its context length
};

// Returns the last i in [0, count) with f(i) <= most. f must not decrease, and f(0) <= most. A warp
// evaluates f at 32 numbers at once, so a batch of 32 sequences waits for memory once.
template <class F>
__device__ __forceinline__ int last_within(const F& f, int count, int most) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int low = 0;
  while (count > 1) {
    const int step = (count + 31) / 32, i = lane * step;
    const bool within = i == 0 || (i < count && f(low + i) <= most);
    const int last = __popc(__ballot_sync(kAllLanes, within)) - 1;
    low += last * step;
    count = min(step, count - last * step);
  }
  return low;
}

// Sequence s begins at tile starts[s] * group / kRows + s. That leaves it enough tiles for its rows, and
// the host can compute the number of all tiles without copying `starts` from the device.
inline int64_t tiles_of(const Work& w, int64_t tokens, int rows) {
  return tokens * w.group / rows + w.sequences;
}
template <int kRows>
__device__ __forceinline__ int tile_of(const Work& w, int s) {
  return static_cast<int>(static_cast<int64_t>(w.starts[s]) * w.group / kRows) + s;
}
template <int kRows>
__device__ __forceinline__ Rows rows_of(const Work& w, int tile) {
  const int s = last_within([&](int i) { return tile_of<kRows>(w, i); }, w.sequences, tile);
  const int tokens = w.starts[s + 1] - w.starts[s], first = (tile - tile_of<kRows>(w, s)) * kRows;
  const int count = min(kRows, tokens * w.group - first);
  return {s, first, max(count, 0), w.starts[s], tokens, w.lengths[s]};
}

// Returns whether the sequence has enough rows for warpgroups. This depends on the sequence alone, not on
// the others of the call, because a row's bits may depend on the kernel.
__device__ __forceinline__ bool is_prompt(const Work& w, const Rows& rows) {
  return rows.tokens > 1 && rows.tokens * w.group >= w.prompt_rows;
}

// Returns which of the sequence's new tokens the tile's row r belongs to. Decoding skips the division,
// which is slow.
__device__ __forceinline__ int token_of(const Work& w, const Rows& rows, int r) {
  return rows.tokens == 1 ? 0 : (rows.first + r) / w.group;
}
// Returns the offset of the tile's row r in q and out, in heads.
__device__ __forceinline__ int64_t head_of(const Work& w, const Rows& rows, int r) {
  const int token = token_of(w, rows, r), head = rows.first + r - token * w.group;
  return static_cast<int64_t>(rows.start + token) * w.heads + blockIdx.y * w.group + head;
}
// Returns the last key that row r may see.
__device__ __forceinline__ int position_of(const Work& w, const Rows& rows, int r) {
  return rows.length - rows.tokens + token_of(w, rows, r);
}

// Returns the first key that any row of the tile may see.
__device__ __forceinline__ int first_key(const Work& w, const Rows& rows) {
  return max(position_of(w, rows, 0) + 1 - w.window, 0);
}

// Returns how many keys the context of token `token` of q has up to that token, including those before its
// window.
__device__ __forceinline__ int keys_of(const Work& w, int token) {
  const int s = last_within([&](int i) { return w.starts[i]; }, w.sequences, token);
  return w.lengths[s] - (w.starts[s + 1] - token) + 1;
}

// Returns the number of parts of one segment, tokens * heads.
__device__ __forceinline__ int64_t rows_in_all(const Work& w) {
  return static_cast<int64_t>(w.starts[w.sequences]) * w.heads;
}

}  // namespace attention
}  // namespace fp8serve
