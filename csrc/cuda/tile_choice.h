// How a CUTLASS kernel cuts its output: apart from the table (gemm_tiles.h), whose lines change without it.
#pragma once

#include <cstdint>

namespace fp8serve {

enum class Tile : int8_t { large, medium, small };  // of which size is said in gemm_sm90.cu ...

struct TileChoice {
  Tile tile;
  int swizzle;  // tile rows or columns that run together and share operands in the second-level cache
};

}  // namespace fp8serve
