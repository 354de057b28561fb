// What paged attention is made of, at any instruction set: the order of every sum, and one task's work.
//
// The order. A query at position p sees keys 0..p in tiles, aligned to multiples of the tile whatever chunk
// or batch the query came in. Per tile: the scores, their maximum, the weights exp(score - running maximum);
// sum and output are rescaled if the maximum rose, and the tile is added. Keys beyond p have weight exactly
// 0 and their values are not touched. So a query's result depends on its own q, its keys and its position
// alone: not on the batch, on how the prompt was cut, or on threads. Tile and arithmetic are the path's: 16
// keys in FP32 in general, 64 keys in BF16 with FP32 sums where q is BF16 and the machine multiplies BF16.
//
// An FP8 cache's k scale multiplies the scores, its v scale the finished output: no element is scaled alone.
#pragma once

#include <cstdint>

#include "check.h"

namespace fp8serve::attention {

// One sequence's one kv head: `rows` query rows (token-major: row = token * group + head in group) over its
// blocks.
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

  int64_t slot(int64_t position) const {
    return static_cast<int64_t>(blocks[position / block_size]) * block_size + position % block_size;
  }
};

// BF16 queries over a BF16 or FP8 cache with AVX-512 BF16.
void attend_bf16(const Work& work);

}  // namespace fp8serve::attention
