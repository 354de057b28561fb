// How a CUTLASS kernel cuts its output, or who else multiplies: apart from the table (gemm_tiles.h), whose
// lines change without it.
#pragma once

#include <cstdint>

namespace fp8serve {

// gemm_sm90.cu ... define the sizes of tiles. `cublaslt` is torch's product, and `skinny` the kernel of
// gemm_skinny.cu; both stand in the table where they are faster than every tile.
enum class Tile : int8_t { large, medium, small, thin128, thin64, thin32, cublaslt, skinny };
constexpr int kThinRows = 128;  // the most rows of activations that thin tiles take

// How the operands are scaled: each by a number, each by a number a row, one by a number and one by rows
// (joined projections: a scale of their input, and one of each row of the weights), or by blocks in the sum.
enum class Scales : int8_t { tensor, row, mixed, block };

struct TileChoice {
  Tile tile;
  int swizzle;  // tile rows or columns that run together and share operands in the second-level cache
};

}  // namespace fp8serve
