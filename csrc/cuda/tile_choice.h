// The choice of a product's kernel: the tile of a CUTLASS kernel, or another kernel. In a header of its own,
// so that a change of the table (gemm_tiles.h) recompiles gemm.cu alone.
#pragma once

#include <cstdint>

namespace fp8serve {

// gemm_sm90.cu, gemm_sm100.cu and gemm_sm120.cu define the sizes of the tiles. `cublaslt` is torch's product,
// and `skinny` the kernel of gemm_skinny.cu; the table chooses them where they are faster than every tile.
enum class Tile : int8_t { large, medium, small, thin128, thin64, thin32, cublaslt, skinny };
constexpr int kThinRows = 128;  // the most rows of activations that thin tiles take

// The granularity of the operands' scales:
//
//   tensor  one scale for each operand
//   row     one scale for each row of both operands
//   mixed   one scale for one operand, row scales for the other (joined projections: one scale for the input,
//           row scales for the weights)
//   block   block scales, which apply inside the sum
enum class Scales : int8_t { tensor, row, mixed, block };

struct TileChoice {
  Tile tile;
  int swizzle;  // tile rows or columns that run at the same time and share operands in the second-level cache
};

}  // namespace fp8serve
