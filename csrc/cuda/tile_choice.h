// How a CUTLASS kernel cuts its output, or who else multiplies: apart from the table (gemm_tiles.h), whose
// lines change without it.
#pragma once

#include <cstdint>

namespace fp8serve {

// Of which size a tile is, is said in gemm_sm90.cu ...; `cublaslt`: none of ours, torch's product is faster.
enum class Tile : int8_t { large, medium, small, thin128, thin64, thin32, cublaslt };

// How operands are scaled: by a number, by a number for each row (of one operand at least), inside the sum.
enum class Scales : int8_t { tensor, row, block };

struct TileChoice {
  Tile tile;
  int swizzle;  // tile rows or columns that run together and share operands in the second-level cache
};

}  // namespace fp8serve
