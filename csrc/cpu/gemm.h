// The parts of a scaled GEMM, for any instruction set: the order of every sum, the panels and the tile.
//
// The order. An output element is one dot product over K of FP8 values whose products are exact in FP32, and
// its sum is taken in one fixed order that depends on K alone: never on M, on the row's index, on the tile's
// shape or on threads.
//  * K is cut into blocks of 1024, a block into runs of 8.
//  * Four lanes are running FP32 sums over a block's runs: lane i adds k = 2 i + 1, then k = 2 i, of each
//    run, as `vdpbf16ps` does with eight BF16.
//  * At the block's end (lane 0 + lane 2) + (lane 1 + lane 3); the sums of the blocks are added in order.
//  * With block scales each 128 of K has its own lanes, which are promoted to lanes of the whole block by
//    total += lane * scale, rounded twice.
// Every variant of the numerics class `four_lanes` does exactly this, so all of them give the same bits,
// and a request's output does not depend on the rest of its batch. gemm_amx.cpp adds in another order.
//
// Why four lanes: a 512-bit register holds them for four columns, so that six shuffles and three additions
// finish 16 outputs. Sixteen lanes of one column were tried first: thirty and fifteen, 27 % of the time at
// K = 256. One lane (16 columns a register) needs weights in another order than a checkpoint has them.
//
// The panels. FP8 values become BF16 or FP16 (or FP32 where neither is multiplied) once, padded with zeros:
//  * a row of `a`: its runs one after the other;
//  * 16 columns of `b`: per run four vectors, vector i holding columns i, i + 4, i + 8, i + 12, so that the
//    sums of the four vectors come out of the final shuffles as columns 0 to 15.
// Within a run the order is the level's own.
#pragma once

#include <cstdint>

#include "check.h"
#include "cpu/features.h"

namespace fp8serve::gemm {

constexpr int64_t kRun = 8;
constexpr int64_t kChunk = 64;  // values a level unpacks at a time: panel rows are padded to it
constexpr int64_t kBlock = 1024;
constexpr int64_t kScaleBlock = 128;
constexpr int64_t kMxBlock = 32;
constexpr int64_t kGroup = 16;     // columns of a tile
constexpr int64_t kMaxRows = 6;    // rows of a tile that reads a panel ...
constexpr int64_t kMaxStream = 8;  // ... and of one that reads the weights
constexpr int64_t kMostRows = 64;  // of any level's tile

// The element type of a matrix. NVFP4 and MXFP4 are E2M1 codes of 4 bits (gemm_4bit.h), for `b` alone.
enum class Kind { e4m3, e5m2, bf16, nvfp4, mxfp4 };
constexpr bool is_fp8(Kind kind) { return kind == Kind::e4m3 || kind == Kind::e5m2; }
constexpr bool has_4_bits(Kind kind) { return kind == Kind::nvfp4 || kind == Kind::mxfp4; }
constexpr int64_t bytes_of(Kind kind, int64_t count = 1) {
  return has_4_bits(kind) ? count / 2 : kind == Kind::bf16 ? 2 * count : count;
}

// The epilogue: out = round(sum * a_scale * b_scale + bias) and then, if there is a residual, round(residual
// + out).
struct Epilogue {
  const float* a_scale;  // [rows]
  const float* b_scale;  // [16]
  const float* bias;     // [16]
  const void* residual;  // like `out`, or null
  void* out;             // the tile's first element
  int64_t stride;        // elements from a row of `out` to the next
  int64_t columns;       // of the tile's 16, those that the matrix has
  ScalarType type;       // of `out`
};

// `rows` rows by 16 columns over one block of K.
struct Tile {
  const void* a = nullptr;  // panel rows, `a_stride` elements apart; as many after them are prefetched
  const void* b = nullptr;  // panel of 16 columns, or their packed block
  int64_t a_stride = kBlock;
  int64_t k = 0;  // of this block
  int rows = 0;
  const float* const* scale = nullptr;  // per row, for each 128 of K; null without block scales
  const float* b_scale = nullptr;       // [128 of K][16 columns]; null where `scale` is the product of both
  float* out = nullptr;                 // [rows][16]: sums of the blocks so far
  const uint16_t* mx_shifts = nullptr;  // of packed MX blocks (gemm_packed.h)
  const uint8_t* distances = nullptr;   // of packed blocks in 4 bits (gemm_4bit.h)
  bool add = false;                     // to the sums of earlier blocks
  const Epilogue* epilogue = nullptr;   // at the last block: applied instead of storing the sums
};

// One variant's building blocks.
struct Level {
  Variant variant;
  int64_t element_size;
  // Converts k values to a panel row of k elements, rounded up to a multiple of 64.
  void (*unpack_row)(const void* from, int64_t k, Kind kind, void* row);
  // Converts 16 columns of k values to a panel of 16 such rows.
  void (*unpack_columns)(const void* const* from, int64_t k, Kind kind, void* panel);
  void (*tile)(const Tile& tile);
  // A tile of up to `stream_rows` rows that reads `b` in place, once, and converts it in registers. `next` is
  // where the next call reads, for prefetching. Null if the level has no such tile.
  void (*stream)(const Tile& tile, const void* const* b, const void* const* next, Kind kind);
  int64_t stream_rows;
  // Both ways for packed weights (gemm_packed.h), or null: `tile.b` and `block` are a packed block, of which
  // k = begin to end is unpacked. For more than `stream_rows` and up to `packed_rows` rows, streaming
  // the block several times is faster than unpacking a panel.
  void (*stream_packed)(const Tile& tile, Kind kind) = nullptr;
  void (*unpack_packed)(const void* block, int64_t k, int64_t begin, int64_t end, Kind kind,
                        const uint16_t* mx_shifts, void* panel) = nullptr;
  int64_t packed_rows = 0;
  void (*compute_mx_shifts)(const uint8_t* codes, int64_t stride, const uint8_t* rows, int64_t blocks,
                            Kind kind, uint16_t* shifts) = nullptr;
  // Like stream and unpack_packed, for packed weights in 4 bits (gemm_4bit.h).
  void (*stream_4bit)(const Tile& tile, Kind kind) = nullptr;
  void (*unpack_4bit)(const void* block, const uint8_t* distances, int64_t begin, int64_t end, Kind kind,
                      void* panel) = nullptr;
  int64_t rows_4bit = 0;
  int64_t tile_rows = kMaxRows;  // rows of tile(), at most
  bool only_fp8 = false;         // whether it multiplies FP8 values by FP8 values only
};

const Level& portable();
#if FP8_X86
const Level& avx2();
const Level& avx512();
const Level& avx512bf16();
const Level& fma();  // for some products of avx512bf16()
const Level& amx();
const Level& emulated_amx();
inline constexpr std::array kLevels = {&emulated_amx, &amx,  &avx512bf16,
                                       &avx512,       &avx2, &portable};  // best first
#elif FP8_NEON
const Level& neon();
const Level& neonfhm();
const Level& neonbf16();
inline constexpr std::array kLevels = {&neonfhm, &neonbf16, &neon, &portable};
#else
inline constexpr std::array kLevels = {&portable};
#endif

#if FP8_X86
// A tile of the level avx512() that takes subnormal operands and sums as zero, as `vdpbf16ps` does.
void flushing_tile(const Tile& tile);
#endif

// Returns the first level that multiplies values of these kinds and whose features are in force.
const Level& best_level(Kind a, Kind b);

// The variants that ops report: of products of two FP8 matrices, and of others.
inline const Variant& fp8_variant() { return best_level(Kind::e4m3, Kind::e4m3).variant; }
inline const Variant& bf16_variant() { return best_level(Kind::bf16, Kind::bf16).variant; }

}  // namespace fp8serve::gemm
