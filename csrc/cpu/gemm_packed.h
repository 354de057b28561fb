// Packed weights: the order in which a GEMM of a few rows reads them, as one stream.
//
// A checkpoint stores one row of K after the other. A tile reads sixteen of them side by side and fills
// each register with pieces of several: the pieces cost loads and shuffles, and memory delivers sixteen
// streams more slowly than one. Serving reads a weight many times and never changes it, so packing it once
// is worthwhile.
//
// A matrix [N, K], N a multiple of 16 and K of 8, becomes [N / 16][blocks of 1024 of K][2][runs of 8], and
// the i-th of the two is k = 4 i to 4 i + 3 of every run, of the 16 columns: a register of 64 FP8 values,
// which widen() of gemm_widen.h splits into two of 8 columns x 2 lanes. BF16 needs no widening and is stored
// in the order that widening would give. The sums are those of gemm.h, bit for bit.
#pragma once

#include "cpu/gemm.h"

namespace fp8serve::gemm {

constexpr int64_t kHalfRun = kRun / 2;

// The position of a column's four values among those of the 16 columns in a half run.
constexpr int64_t place_of(int64_t column, Kind kind) {
  if (kind != Kind::bf16) return column;
  return (column & 2) << 2 | (column >> 2) << 1 | (column & 1);
}

// Packs 16 rows of k <= 1024 values, which are `stride` bytes apart, and unpacks them.
void pack_block(const char* rows, int64_t stride, int64_t k, Kind kind, char* packed);
void unpack_block(const char* packed, int64_t k, Kind kind, int64_t stride, char* rows);

// The AVX-512 BF16 level reads packed blocks; for other levels unpack_block() converts them to rows.
namespace packed_avx512bf16 {
template <class Multiply>                  // Dot or Fma (gemm_pairs.h)
void stream(const Tile& tile, Kind kind);  // up to kMaxStream rows; tile.b: the block
void unpack_columns(const void* block, int64_t k, int64_t begin, int64_t end, Kind kind,
                    const uint16_t* mx_shifts, void* panel);
// Computes the shifts of 16 columns in MX blocks, one for each 32 of K. Subtracting a shift from the bits of
// a BF16 divides it by the scale of its row / the scale of its block, a power of two; 0xffff makes it zero.
// `codes`: those of the first column, `stride` bytes apart; `rows`: the scales of the columns.
void compute_mx_shifts(const uint8_t* codes, int64_t stride, const uint8_t* rows, int64_t blocks, Kind kind,
                       uint16_t* shifts);
}  // namespace packed_avx512bf16

}  // namespace fp8serve::gemm
