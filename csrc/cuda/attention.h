// Shared by the two attention kernels: the work, the rows of a block, and how parts of a softmax merge.
#pragma once

#include "cuda/cast.h"

namespace fp8serve {
namespace attention {

constexpr int kNoWindow = 1 << 30;  // keys: more than there are
constexpr int kNoPrompt = 1 << 30;  // rows: more than there are

struct Work {
  const void *q, *k, *v;
  void* out;
  Number query;
  const int *tables, *lengths, *starts;
  const float *k_scale, *v_scale;  // null for 1
  float softmax_scale;
  bool whole;  // heads begin on 16 bytes and are eights of elements
  int sequences, max_blocks, block_size, heads, kv_heads, dim, segments;
  int group;                    // heads that share a kv head
  int window;                   // keys that a row sees at most, its own included
  float softcap;                // c of c * tanh(score / c); 0: scores stay as they are
  const float* sinks;           // [heads] logits that join the sums of weights, or null
  int prompt_rows = kNoPrompt;  // a sequence with as many rows is left to warpgroups (attention_wgmma.cu)
  // [segments][rows], [segments][rows], [segments][rows][dim]; null: one block does all segments
  float *maxima = nullptr, *sums = nullptr, *values = nullptr;
};

struct Call {
  Work work;
  int64_t tokens;
  ScalarType cache;
  int64_t slots;  // tokens that the cache holds
};

// Tensor cores, for BF16 queries. Returns false and does nothing for unsupported problems.
bool attend_on_tensor_cores(const Call& call, const OnDevice& device, const Tensor& allocator);

// Blocks of one warp that a multiprocessor has at once: their registers are kept to that. It has four files
// of registers, so only multiples of 4 make a difference.
constexpr int kResident = 12;

// The blocks of the mma kernel: warps in each, tiles of rows, and blocks that share the segments of a tile.
struct MmaGrid {
  int warps;
  int64_t tiles, each;
};
// The rows of all sequences but prompts, by warps.
void attend_by_mma(const Work& w, ScalarType cache, const MmaGrid& blocks, const OnDevice& device);
// The rows of prompts, by warpgroups; with parts, blocks share the segments, else one block takes all of
// them.
void attend_by_wgmma(const Work& w, ScalarType cache, int64_t tokens, const OnDevice& device);

// Room for the parts of every segment; the memory lives as long as the tensor.
inline Tensor make_parts(Work& w, int64_t tokens, const Tensor& allocator) {
  const int64_t rows = w.segments * tokens * w.heads;
  const Tensor parts = empty(allocator, {rows * (w.dim + 2)}, ScalarType::Float);
  w.maxima = data<float>(parts), w.sums = w.maxima + rows, w.values = w.sums + rows;
  return parts;
}

__device__ __forceinline__ float factor(const float* scale) { return scale == nullptr ? 1.0f : *scale; }

// A row without a key to look at is 0, as the reference has it; NaN stays NaN.
__device__ __forceinline__ float quotient(float value, float sum) { return sum == 0.0f ? 0.0f : value / sum; }

// --- which rows
// ---------------------------------------------------------------------------------------------------

struct Rows {
  int sequence, first,
      count;  // rows [first, first + count) of the sequence's tokens x group; count 0: nothing to do
  int start, tokens, length;  // of the sequence: its first token in q, its new tokens, its context
};

// The last of the numbers 0 <= i < count with f(i) <= most, for f that never falls and f(0) <= most. A warp
// looks at 32 numbers at once, so that a batch of 32 costs one wait for memory.
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

// Sequence s begins at tile starts[s] * group / kRows + s: room enough for its rows, and known without asking
// the device how many tokens each sequence has.
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

// Whether the sequence has rows enough for warpgroups. That is for each sequence to say, whatever the others
// are: a row's bits may depend on the kernel.
__device__ __forceinline__ bool is_prompt(const Work& w, const Rows& rows) {
  return rows.tokens > 1 && rows.tokens * w.group >= w.prompt_rows;
}

// The token of the tile's row r. A division takes a while, and decoding is spared it.
__device__ __forceinline__ int token_of(const Work& w, const Rows& rows, int r) {
  return rows.tokens == 1 ? 0 : (rows.first + r) / w.group;
}
// Where row r of the tile lies in q and out, in heads.
__device__ __forceinline__ int64_t head_of(const Work& w, const Rows& rows, int r) {
  const int token = token_of(w, rows, r), head = rows.first + r - token * w.group;
  return static_cast<int64_t>(rows.start + token) * w.heads + blockIdx.y * w.group + head;
}
// The last key that row r may see.
__device__ __forceinline__ int position_of(const Work& w, const Rows& rows, int r) {
  return rows.length - rows.tokens + token_of(w, rows, r);
}

// The first key that any row of the tile may see.
__device__ __forceinline__ int first_key(const Work& w, const Rows& rows) {
  return max(position_of(w, rows, 0) + 1 - w.window, 0);
}

// How many keys the token with this number in q sees, those before its window included.
__device__ __forceinline__ int keys_of(const Work& w, int token) {
  const int s = last_within([&](int i) { return w.starts[i]; }, w.sequences, token);
  return w.lengths[s] - (w.starts[s + 1] - token) + 1;
}

// The parts of one segment, each [tokens * heads].
__device__ __forceinline__ int64_t rows_in_all(const Work& w) {
  return static_cast<int64_t>(w.starts[w.sequences]) * w.heads;
}

}  // namespace attention
}  // namespace fp8serve
