// Weights in 4 bits: E2M1 codes in blocks of 16 of K with an E4M3 scale (NVFP4), or of 32 with an E8M0 scale
// (MXFP4). fp8serve/fp8/ops/four_bit.py has the definition and the order of packed weights.
//
// A code times its scale is exact in BF16, so the product is the one of gemm.h with these values. The
// AVX-512 BF16 level finds them in registers, from packed weights; for others rows are widened to BF16.
//
// The bits of code times scale are a sum: those of the scale, the exponent of the code, and where the code is
// 1.5 times a power of two the step from the bits of a scale to those of 1.5 times it, of which there are
// eight. A packed scale is the distance from the largest scale, so that the sum is a difference, which
// saturates at -0.0 for code 0.
#pragma once

#include "cpu/gemm.h"
#include "cpu/gemm_run.h"

namespace fp8serve::gemm {

constexpr int64_t kNvfp4Block = 16;
constexpr int64_t block_of(Kind kind) { return kind == Kind::nvfp4 ? kNvfp4Block : kMxBlock; }
constexpr uint8_t kNanDistance = 255;

// The distances of packed weights [K / block][16 columns], those of 16 columns from `row` on. MXFP4 has the
// scales of the rows before them.
inline const uint8_t* distances_of(const Operand& x, int64_t row, int64_t column) {
  const int64_t rows = x.kind == Kind::mxfp4 ? 1 : 0, blocks = rows + x.k / block_of(x.kind);
  return x.distances + (row / kGroup * blocks + rows + column / block_of(x.kind)) * kGroup;
}

// Widens k <= 1024 values of row `row` from `column` on, packed or not.
void widen_4bit(const Operand& x, int64_t row, int64_t column, int64_t k, uint16_t* out);

// The AVX-512 BF16 level reads packed blocks.
namespace fourbit_avx512bf16 {
template <class Multiply>                  // Dot or Fma (gemm_pairs.h)
void stream(const Tile& tile, Kind kind);  // up to kMaxStream rows
void unpack_columns(const void* block, const uint8_t* distances, int64_t begin, int64_t end, Kind kind,
                    void* panel);
}  // namespace fourbit_avx512bf16

}  // namespace fp8serve::gemm
