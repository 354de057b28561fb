// The parts of paged attention, for any instruction set: the order of every sum, one task's work, and its
// state.
//
// The order. A query at position p sees keys 0..p, or the last `window` of these. Keys are processed in parts
// of 512, and a part in tiles; both are aligned to multiples of their size, whatever chunk or batch the query
// came in. Per tile: the scores, their maximum, the weights exp(score - running maximum); sum and output are
// rescaled if the maximum rose, and the tile is added. Each part starts from an empty state; the maxima, sums
// and outputs of the parts are merged in order. Keys beyond p or before its window have weight exactly 0 and
// their values are not used; tiles and parts without a key that a row sees do not change the row, and those
// that no row of a task sees are not read. A head's sink is merged last, as a part with one key of weight 1
// and without a value. So a query's result depends only on its own q, its keys and its position: not on the
// batch, on how the prompt was cut, or on threads, which may take the parts of one long sequence at the same
// time. Tile and arithmetic depend on the path: 16 keys in FP32 in general, 64 keys in BF16 with FP32 sums
// where q is BF16 and the machine multiplies BF16.
//
// An FP8 cache's k scale multiplies the scores, its v scale the finished output: no element is scaled alone.
#pragma once

#include <algorithm>
#include <cstdint>

#include "check.h"

namespace fp8serve::attention {

constexpr int64_t kMaxDim = 576;  // of a head; DeepSeek: 512 of the latent vector and 64 that are rotated
constexpr int64_t kPart = 512;    // keys
constexpr int64_t kAligned = 64;  // keys: a multiple of any path's tile
constexpr int64_t kNoWindow = int64_t{1} << 40;  // keys: more than any sequence has

// The attention of one kv head in one sequence: query rows (token-major: row = token * group + head in group)
// over the keys in the sequence's blocks.
struct Work {
  const void* q;  // row (token t, head h): q + (t * heads + h) * dim, already at the kv head's first head
  void* out;      // same layout
  const void* k;  // cache + kv head * dim; token of slot s: + s * token_stride
  const void* v;
  const int32_t* blocks;  // the sequence's block table
  int64_t block_size;
  int64_t token_stride;  // elements from a slot to the next: kv_heads * dim
  int64_t tokens;        // query tokens; the last one is at position context - 1
  int64_t context;
  int64_t heads, group, dim;
  float score_scale, value_scale;
  ScalarType cache;
  int64_t window;      // keys that a query sees at most, its own included
  float softcap;       // c in c * tanh(score / c); 0: scores are not capped
  const float* sinks;  // [group] logits that join the denominators, or null

  // Elements from `q` or `out` to a query row.
  int64_t row(int64_t r) const { return (r / group * heads + r % group) * dim; }
  int64_t position(int64_t r) const { return context - tokens + r / group; }
  // The first query row that sees a position.
  int64_t first_row(int64_t seen) const { return std::max<int64_t>(0, seen - (context - tokens)) * group; }
  // The first key that a query row sees.
  int64_t first_key(int64_t r) const { return std::max<int64_t>(0, position(r) - window + 1); }
  // The first query row that sees no key before `key` > 0; the number of rows if there is none.
  int64_t first_row_past(int64_t key) const { return std::min(tokens * group, first_row(key + window - 1)); }
  int64_t slot(int64_t position) const {
    return static_cast<int64_t>(blocks[position / block_size]) * block_size + position % block_size;
  }
};

// Positions [first, last) of a sequence.
struct Keys {
  int64_t first, last;
};

// A thread's unit of work: some keys of adjacent kv heads for the same query tokens. The heads are adjacent
// in the cache, so memory delivers them together.
struct WorkItem {
  const Work* heads = nullptr;
  int64_t count = 0;  // of the heads
  Keys keys{};
};

// The running softmax of a task's query rows: the outputs before the division by the sum of weights, the
// maximum that the weights are relative to, and the sum of weights in 16 lanes.
struct State {
  float* out;      // [rows][width]
  float* sums;     // [rows][16]
  float* maximum;  // [rows]
  int64_t rows, width;

  static int64_t size(int64_t rows, int64_t width) { return rows * (width + 17); }
  static State at(float* memory, int64_t rows, int64_t width) {
    return {memory, memory + rows * width, memory + rows * (width + 16), rows, width};
  }
  void copy_row(const State& other, int64_t r) const {
    std::copy_n(other.out + r * width, width, out + r * width);
    std::copy_n(other.sums + r * 16, 16, sums + r * 16);
    maximum[r] = other.maximum[r];
  }
  void clear() const {
    std::fill_n(out, rows * (width + 16), 0.0f);
    std::fill_n(maximum, rows, -__builtin_inff());
  }
};

// The functions for a pair of element types.
struct Path {
  int64_t unit;  // rows of a state are padded to multiples of this
  // Computes attention over at most kPart keys, from an empty state for each head. `next` is the work that
  // follows, for prefetching.
  void (*attend)(const WorkItem& now, const State* states, const WorkItem& next);
  void (*finish)(const Work& work, const State& state);  // writes work.out

  int64_t width(int64_t dim) const { return (dim + unit - 1) / unit * unit; }
};

// Any query and cache in FP32.
Path general(ScalarType query, ScalarType cache);
// BF16 queries over a BF16 or FP8 cache with AVX-512 BF16.
Path bf16();

}  // namespace fp8serve::attention
