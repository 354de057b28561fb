// Which CUTLASS tile multiplies which shape: a table per chip and kind, looked up by the nearest shape.
//
// `python benchmarks/gpu_measure.py --tune` times every compiled tile on the GPU that is there and writes
// that chip's lines anew ("measured" with its date); without a GPU the lines come from a model of waves
// ("predicted"). gemm_sm90.cu ... define the tiles; a tile that was not compiled for a type is skipped.
#pragma once

#include "cuda/tile_choice.h"

namespace fp8serve {

struct TileEntry {
  int chip;  // 90, 100, 120
  Scales scales;
  int m, n, k;
  TileChoice choice;
};

inline constexpr TileEntry kTileTable[] = {
    // begin of the table
    // sm_90: measured on NVIDIA H200, 2026-11-26
    {90, Scales::tensor, 8192, 8192, 8192, {Tile::cublaslt, 1}},
    {90, Scales::row, 32, 4096, 4096, {Tile::cublaslt, 1}},
    {90, Scales::row, 32, 6144, 4096, {Tile::thin32, 2}},
    {90, Scales::row, 32, 28672, 4096, {Tile::thin32, 8}},
    {90, Scales::row, 32, 4096, 14336, {Tile::thin32, 2}},
    {90, Scales::row, 32, 8192, 8192, {Tile::thin32, 1}},
    {90, Scales::row, 64, 4096, 4096, {Tile::thin32, 8}},
    {90, Scales::row, 64, 6144, 4096, {Tile::thin32, 4}},
    {90, Scales::row, 64, 28672, 4096, {Tile::small, 4}},
    {90, Scales::row, 64, 4096, 14336, {Tile::thin32, 1}},
    {90, Scales::row, 128, 4096, 4096, {Tile::thin32, 8}},
    {90, Scales::row, 128, 6144, 4096, {Tile::thin64, 8}},
    {90, Scales::row, 128, 28672, 4096, {Tile::cublaslt, 1}},
    {90, Scales::row, 128, 4096, 14336, {Tile::thin64, 1}},
    {90, Scales::row, 128, 8192, 8192, {Tile::thin64, 2}},
    {90, Scales::row, 256, 6144, 4096, {Tile::cublaslt, 1}},
    {90, Scales::row, 256, 4096, 14336, {Tile::cublaslt, 1}},
    {90, Scales::row, 256, 8192, 8192, {Tile::cublaslt, 1}},
    {90, Scales::block, 32, 4096, 4096, {Tile::small, 2}},
    {90, Scales::block, 32, 6144, 4096, {Tile::small, 8}},
    {90, Scales::block, 32, 28672, 4096, {Tile::small, 8}},
    {90, Scales::block, 32, 4096, 14336, {Tile::small, 4}},
    {90, Scales::block, 32, 8192, 8192, {Tile::small, 1}},
    {90, Scales::block, 64, 4096, 4096, {Tile::small, 8}},
    {90, Scales::block, 64, 6144, 4096, {Tile::small, 4}},
    {90, Scales::block, 64, 28672, 4096, {Tile::small, 4}},
    {90, Scales::block, 64, 4096, 14336, {Tile::small, 1}},
    {90, Scales::block, 64, 8192, 8192, {Tile::small, 4}},
    {90, Scales::block, 128, 4096, 4096, {Tile::small, 1}},
    {90, Scales::block, 128, 6144, 4096, {Tile::small, 8}},
    {90, Scales::block, 128, 28672, 4096, {Tile::small, 1}},
    {90, Scales::block, 128, 4096, 14336, {Tile::small, 4}},
    {90, Scales::block, 128, 8192, 8192, {Tile::small, 1}},
    {90, Scales::block, 256, 4096, 4096, {Tile::small, 4}},
    {90, Scales::block, 256, 6144, 4096, {Tile::medium, 1}},
    {90, Scales::block, 256, 28672, 4096, {Tile::medium, 1}},
    {90, Scales::block, 256, 8192, 8192, {Tile::medium, 1}},
    {90, Scales::block, 1024, 4096, 4096, {Tile::medium, 2}},
    {90, Scales::block, 1024, 6144, 4096, {Tile::medium, 1}},
    {90, Scales::block, 1024, 28672, 4096, {Tile::medium, 2}},
    {90, Scales::block, 4096, 6144, 4096, {Tile::medium, 1}},
    {90, Scales::block, 4096, 28672, 4096, {Tile::medium, 2}},
    {90, Scales::block, 4096, 4096, 14336, {Tile::medium, 1}},
    {90, Scales::block, 4096, 8192, 8192, {Tile::medium, 2}},
    {90, Scales::block, 8192, 4096, 4096, {Tile::medium, 1}},
    {90, Scales::block, 8192, 6144, 4096, {Tile::medium, 2}},
    {90, Scales::block, 8192, 28672, 4096, {Tile::medium, 1}},
    {90, Scales::block, 8192, 4096, 14336, {Tile::medium, 2}},
    {90, Scales::block, 8192, 8192, 8192, {Tile::medium, 1}},
    // sm_100: predicted by waves, not measured
    {100, Scales::tensor, 128, 28672, 4096, {Tile::small, 1}},
    {100, Scales::tensor, 256, 28672, 4096, {Tile::large, 1}},
    {100, Scales::tensor, 256, 8192, 8192, {Tile::small, 1}},
    {100, Scales::tensor, 1024, 4096, 4096, {Tile::large, 1}},
    {100, Scales::tensor, 1024, 6144, 4096, {Tile::small, 1}},
    {100, Scales::tensor, 1024, 28672, 4096, {Tile::large, 4}},
    {100, Scales::tensor, 1024, 8192, 8192, {Tile::large, 1}},
    {100, Scales::tensor, 4096, 4096, 4096, {Tile::large, 1}},
    {100, Scales::tensor, 4096, 6144, 4096, {Tile::large, 4}},
    {100, Scales::tensor, 8192, 4096, 14336, {Tile::large, 4}},
    {100, Scales::block, 128, 28672, 4096, {Tile::small, 1}},
    {100, Scales::block, 256, 28672, 4096, {Tile::large, 1}},
    {100, Scales::block, 256, 8192, 8192, {Tile::small, 1}},
    {100, Scales::block, 1024, 4096, 4096, {Tile::large, 1}},
    {100, Scales::block, 1024, 6144, 4096, {Tile::small, 1}},
    {100, Scales::block, 1024, 28672, 4096, {Tile::large, 4}},
    {100, Scales::block, 1024, 8192, 8192, {Tile::large, 1}},
    {100, Scales::block, 4096, 4096, 4096, {Tile::large, 1}},
    {100, Scales::block, 4096, 6144, 4096, {Tile::large, 4}},
    {100, Scales::block, 8192, 4096, 14336, {Tile::large, 4}},
    // sm_120: predicted by waves, not measured
    {120, Scales::tensor, 128, 28672, 4096, {Tile::small, 1}},
    {120, Scales::tensor, 128, 8192, 8192, {Tile::small, 1}},
    {120, Scales::tensor, 256, 4096, 4096, {Tile::small, 1}},
    {120, Scales::tensor, 256, 6144, 4096, {Tile::large, 1}},
    {120, Scales::tensor, 256, 28672, 4096, {Tile::small, 4}},
    {120, Scales::tensor, 256, 8192, 8192, {Tile::large, 1}},
    {120, Scales::tensor, 1024, 4096, 4096, {Tile::small, 1}},
    {120, Scales::tensor, 1024, 6144, 4096, {Tile::small, 4}},
    {120, Scales::tensor, 1024, 28672, 4096, {Tile::large, 4}},
    {120, Scales::tensor, 1024, 8192, 8192, {Tile::large, 1}},
    {120, Scales::tensor, 8192, 6144, 4096, {Tile::large, 4}},
    {120, Scales::tensor, 8192, 8192, 8192, {Tile::large, 4}},
    {120, Scales::block, 256, 28672, 4096, {Tile::large, 1}},
    {120, Scales::block, 1024, 28672, 4096, {Tile::large, 4}},
    {120, Scales::block, 1024, 8192, 8192, {Tile::large, 1}},
    {120, Scales::block, 8192, 8192, 8192, {Tile::large, 4}},
    // end of the table
};

// 16 log2(value), between powers of two on a straight line.
constexpr int sixteenths(int value) {
  int octave = 0;
  while (value >> octave > 1) ++octave;
  return 16 * octave + static_cast<int>((static_cast<int64_t>(value) << 4 >> octave) - 16);
}

// The entry nearest to a shape, m and n counting twice as much as k: they make the tiles. A chip without
// lines for scales by row has those for one number.
constexpr TileChoice tile_for(int chip, Scales scales, int m, int n, int k) {
  TileChoice best{Tile::large, 1};
  int nearest = 1 << 30;
  const auto apart = [](int a, int b) {
    const int difference = sixteenths(a) - sixteenths(b);
    return difference < 0 ? -difference : difference;
  };
  for (const TileEntry& entry : kTileTable) {
    if (entry.chip != chip || entry.scales != scales) continue;
    const int distance = 2 * apart(m, entry.m) + 2 * apart(n, entry.n) + apart(k, entry.k);
    if (distance < nearest) nearest = distance, best = entry.choice;
  }
  if (nearest == 1 << 30 && scales == Scales::row) return tile_for(chip, Scales::tensor, m, n, k);
  return best;
}

}  // namespace fp8serve
