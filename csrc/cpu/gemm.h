// What a scaled GEMM is made of, at any instruction set: the order of every sum, the panels and the tile.
//
// The order. An output element is one dot product over K of FP8 codes whose products are exact in FP32, and
// its sum is taken in one fixed order that depends on K alone: never on M, on the row's place, on the tile
// shape or on threads.
//  * K is cut into blocks of 1024, a block into chunks of 64.
//  * A chunk is 4 steps of 16 lanes. With g = lane / 4 and i = lane % 4, the steps take k = 16 g + 2 i + {1,
//  0, 9, 8}:
//    the order in which `vdpbf16ps` adds pairs after two byte-unpacks made BF16 out of a 64-byte load.
//  * Within a block each of the 16 lanes is a running FP32 sum; at its end the lanes are added as a tree:
//    quad[g] = (lane[4g] + lane[4g+2]) + (lane[4g+1] + lane[4g+3]);  sum = (quad[0] + quad[2]) + (quad[1] +
//    quad[3]).
//  * The sums of the blocks are added in order.
//  * With block scales each 128 of K has its own lanes, and lane += partial * scale, rounded twice, promotes
//  them.
// Every level does exactly this, so all of them give the same bits, and a request's output is the same
// whoever shares its batch. Sixteen partial sums also make the rounding error smaller than one long chain's.
//
// The panel. Rows of FP8 codes become rows of BF16 (or FP32 where there is no BF16 dot product) in step
// order, K padded with zeros to a multiple of 64 per block: a conversion once, and then only loads and
// multiply-adds.
//
// The tile. 16 outputs at a time, as 4x4, 2x8 or 1x16: sixteen chains hide the latency, and their lanes are
// added by one 16 x 16 transposing tree.
#pragma once

#include <cstdint>

namespace fp8serve::gemm {

constexpr int64_t kChunk = 64;
constexpr int64_t kBlock = 1024;
constexpr int64_t kScaleBlock = 128;
constexpr int64_t kGroup = 16;  // columns that share a panel

// The rows of a tile (1, 2 or 4) by 16 / rows columns; a panel row is `stride` elements after the one before.
struct Tile {
  const void* a = nullptr;
  const void* b = nullptr;
  int64_t stride;  // elements from one panel row to the next
  int64_t chunks;
  int rows = 0;
  const float* const* a_scale = nullptr;  // per row: scale_inv of each 128 of K; null without block scales
  const float* const* b_scale = nullptr;  // per column
  float* out = nullptr;                   // [rows][...] of 16 / rows sums
  int64_t out_stride;
  bool add;  // onto the earlier blocks' sums
};

// One level's building blocks.
struct Level {
  int64_t element_size;
  // k codes -> a panel row of ceil(k / 64) * 64 elements.
  void (*unpack)(const uint8_t* codes, int64_t k, bool e5m2, void* row);
  void (*tile)(const Tile& tile);
  // The same for a tile whose b is FP8 rows (b_codes[column], k codes each) that are read once: no panel.
  // Null if the level has none.
  void (*stream)(const Tile& tile, const uint8_t* const* b_codes, int64_t k, bool e5m2);
};

const Level& portable();
const Level& avx2();
const Level& avx512();
const Level& avx512bf16();

}  // namespace fp8serve::gemm
