// Loads keys and values of a paged cache into shared memory, for attention on tensor cores: where a tile's
// 16-byte chunks are in the cache, and the conversion of FP8 to BF16.
#pragma once

#include "cuda/attention.h"

namespace fp8serve {
namespace attention {

struct Paged {
  const char *k, *v;
  const int* table;     // the sequence's row of block_tables
  int shift, mask;      // log2 of the cache's block size, and the block size minus 1
  int64_t token, head;  // bytes of a token, and of a head, in the cache
  int64_t offset;       // bytes from a token's start to the kv head of this thread block
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

// Calls f(row, chunk, byte in the cache, valid) for the thread's share of kKeys rows of kChunks chunks,
// which are keys [begin, begin + kKeys). valid is false for keys from `end` on and for chunks past the end
// of a head.
template <int kKeys, int kChunks, int kThreads, class F>
__device__ __forceinline__ void for_chunks_of(const Paged& paged, int begin, int end, const F& f) {
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < kKeys * kChunks; i += kThreads) {
    const int row = i / kChunks, c = i % kChunks, key = begin + row;
    const bool valid = key < end && c * 16 < paged.head;
    int64_t from = 0;
    if (valid) {
      const int64_t block = paged.table[key >> paged.shift];
      from = ((block << paged.shift) + (key & paged.mask)) * paged.token + paged.offset + c * 16;
    }
    f(row, c, from, valid);
  }
}

// Returns the upper halves of two FP32 numbers, which are the numbers in BF16 if BF16 can represent them.
__device__ __forceinline__ uint32_t upper_halves(float low, float high) {
  return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}
__device__ __forceinline__ float low_half(uint32_t halves) {
  return half_to_float(static_cast<uint16_t>(halves & 0xffff));
}
__device__ __forceinline__ float high_half(uint32_t halves) {
  return half_to_float(static_cast<uint16_t>(halves >> 16));
}

// Returns four FP8 values as four BF16 numbers.
template <bool kE5M2>
__device__ __forceinline__ uint2 widened(uint32_t bytes) {
  uint32_t word[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t halves = decode_pair<kE5M2>(static_cast<uint16_t>(bytes >> (16 * i)));
    word[i] = upper_halves(low_half(halves), high_half(halves));
  }
  return {word[0], word[1]};
}
// Returns two rows of two FP8 values as BF16 numbers: first the first column, then the second.
template <bool kE5M2>
__device__ __forceinline__ uint2 widened_columns(uint32_t bytes) {
  const uint32_t first = decode_pair<kE5M2>(static_cast<uint16_t>(bytes));
  const uint32_t second = decode_pair<kE5M2>(static_cast<uint16_t>(bytes >> 16));
  return {upper_halves(low_half(first), low_half(second)), upper_halves(high_half(first), high_half(second))};
}

// Converts a chunk of 16 FP8 values into two chunks of a tile.
template <bool kE5M2, class Tile>
__device__ __forceinline__ void widen(const uint4& bytes, Tile& tile, int row, int c) {
  const uint2 a = widened<kE5M2>(bytes.x), b = widened<kE5M2>(bytes.y), d = widened<kE5M2>(bytes.z),
              e = widened<kE5M2>(bytes.w);
  *tile.at(row, 2 * c) = {a.x, a.y, b.x, b.y};
  *tile.at(row, 2 * c + 1) = {d.x, d.y, e.x, e.y};
}

}  // namespace attention
}  // namespace fp8serve
