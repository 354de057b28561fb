// Which kernel multiplies which shape: a table for each chip and kind of scales, looked up by the nearest
// shape.
//
// `python -m benchmarks.gpu_measure tiles --tune --out OUT.json` times every compiled tile, the skinny kernel
// and cuBLASLt on this machine's GPU and replaces that chip's lines ("measured", with the date). The lines of
// chips that were not measured come from a model that counts waves of tiles ("predicted"). gemm_sm90.cu,
// gemm_sm100.cu and gemm_sm120.cu define the tiles; gemm.cu skips a tile that is not compiled for the types
// of a product.
#pragma once

#include <array>
#include <cstddef>

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
    // sm_90, tensor: measured on NVIDIA H100 80GB HBM3, 2026-11-27
    {90, Scales::tensor, 8192, 8192, 8192, {Tile::cublaslt, 1}},
    // sm_90, row: measured on NVIDIA H100 80GB HBM3, 2026-11-27
    {90, Scales::row, 32, 4096, 4096, {Tile::cublaslt, 1}},
    {90, Scales::row, 32, 6144, 4096, {Tile::small, 8}},
    {90, Scales::row, 32, 28672, 4096, {Tile::thin32, 2}},
    {90, Scales::row, 32, 4096, 14336, {Tile::thin32, 1}},
    {90, Scales::row, 32, 8192, 8192, {Tile::small, 4}},
    {90, Scales::row, 64, 4096, 4096, {Tile::cublaslt, 1}},
    {90, Scales::row, 64, 6144, 4096, {Tile::thin32, 2}},
    {90, Scales::row, 64, 28672, 4096, {Tile::small, 2}},
    {90, Scales::row, 64, 4096, 14336, {Tile::thin32, 1}},
    {90, Scales::row, 64, 8192, 8192, {Tile::thin32, 1}},
    {90, Scales::row, 128, 4096, 4096, {Tile::thin32, 2}},
    {90, Scales::row, 128, 6144, 4096, {Tile::thin64, 8}},
    {90, Scales::row, 128, 28672, 4096, {Tile::cublaslt, 1}},
    {90, Scales::row, 128, 4096, 14336, {Tile::thin32, 8}},
    {90, Scales::row, 128, 8192, 8192, {Tile::cublaslt, 1}},
    {90, Scales::row, 256, 6144, 4096, {Tile::cublaslt, 1}},
    {90, Scales::row, 256, 4096, 14336, {Tile::cublaslt, 1}},
    // sm_90, mixed: measured on NVIDIA H100 80GB HBM3, 2026-11-27
    {90, Scales::mixed, 1, 28672, 4096, {Tile::skinny, 1}},
    {90, Scales::mixed, 16, 2560, 2048, {Tile::skinny, 1}},
    {90, Scales::mixed, 16, 11264, 2048, {Tile::thin32, 1}},
    {90, Scales::mixed, 16, 6144, 4096, {Tile::skinny, 1}},
    {90, Scales::mixed, 16, 28672, 4096, {Tile::skinny, 1}},
    {90, Scales::mixed, 24, 2560, 2048, {Tile::cublaslt, 1}},
    {90, Scales::mixed, 24, 11264, 2048, {Tile::thin32, 2}},
    {90, Scales::mixed, 24, 6144, 4096, {Tile::small, 4}},
    {90, Scales::mixed, 24, 28672, 4096, {Tile::thin32, 2}},
    {90, Scales::mixed, 32, 11264, 2048, {Tile::thin32, 4}},
    {90, Scales::mixed, 32, 6144, 4096, {Tile::small, 8}},
    {90, Scales::mixed, 32, 28672, 4096, {Tile::thin32, 1}},
    {90, Scales::mixed, 48, 11264, 2048, {Tile::thin64, 8}},
    {90, Scales::mixed, 48, 6144, 4096, {Tile::thin32, 2}},
    {90, Scales::mixed, 48, 28672, 4096, {Tile::small, 8}},
    {90, Scales::mixed, 64, 2560, 2048, {Tile::cublaslt, 1}},
    {90, Scales::mixed, 64, 11264, 2048, {Tile::thin64, 4}},
    {90, Scales::mixed, 64, 6144, 4096, {Tile::thin32, 4}},
    {90, Scales::mixed, 64, 28672, 4096, {Tile::small, 2}},
    {90, Scales::mixed, 96, 2560, 2048, {Tile::thin32, 2}},
    {90, Scales::mixed, 96, 11264, 2048, {Tile::cublaslt, 1}},
    {90, Scales::mixed, 96, 6144, 4096, {Tile::thin64, 2}},
    {90, Scales::mixed, 96, 28672, 4096, {Tile::cublaslt, 1}},
    {90, Scales::mixed, 128, 2560, 2048, {Tile::thin32, 8}},
    {90, Scales::mixed, 128, 6144, 4096, {Tile::thin64, 8}},
    {90, Scales::mixed, 256, 2560, 2048, {Tile::small, 8}},
    {90, Scales::mixed, 256, 6144, 4096, {Tile::cublaslt, 1}},
    {90, Scales::mixed, 1024, 6144, 4096, {Tile::cublaslt, 1}},
    // sm_90, block: measured on NVIDIA H100 80GB HBM3, 2026-11-27
    {90, Scales::block, 32, 4096, 4096, {Tile::small, 4}},
    {90, Scales::block, 32, 6144, 4096, {Tile::small, 8}},
    {90, Scales::block, 32, 28672, 4096, {Tile::small, 4}},
    {90, Scales::block, 32, 4096, 14336, {Tile::small, 1}},
    {90, Scales::block, 64, 6144, 4096, {Tile::small, 4}},
    {90, Scales::block, 64, 28672, 4096, {Tile::small, 1}},
    {90, Scales::block, 64, 4096, 14336, {Tile::small, 4}},
    {90, Scales::block, 64, 8192, 8192, {Tile::small, 1}},
    {90, Scales::block, 128, 4096, 4096, {Tile::small, 4}},
    {90, Scales::block, 128, 6144, 4096, {Tile::small, 2}},
    {90, Scales::block, 128, 4096, 14336, {Tile::small, 2}},
    {90, Scales::block, 256, 4096, 4096, {Tile::small, 4}},
    {90, Scales::block, 256, 6144, 4096, {Tile::medium, 1}},
    {90, Scales::block, 256, 28672, 4096, {Tile::medium, 1}},
    {90, Scales::block, 256, 4096, 14336, {Tile::small, 1}},
    {90, Scales::block, 1024, 4096, 4096, {Tile::medium, 2}},
    {90, Scales::block, 1024, 6144, 4096, {Tile::medium, 1}},
    {90, Scales::block, 1024, 4096, 14336, {Tile::medium, 4}},
    {90, Scales::block, 1024, 8192, 8192, {Tile::medium, 2}},
    {90, Scales::block, 4096, 6144, 4096, {Tile::medium, 1}},
    {90, Scales::block, 4096, 28672, 4096, {Tile::medium, 1}},
    {90, Scales::block, 4096, 4096, 14336, {Tile::medium, 4}},
    {90, Scales::block, 4096, 8192, 8192, {Tile::medium, 8}},
    {90, Scales::block, 8192, 4096, 4096, {Tile::medium, 8}},
    {90, Scales::block, 8192, 6144, 4096, {Tile::medium, 4}},
    {90, Scales::block, 8192, 28672, 4096, {Tile::medium, 2}},
    {90, Scales::block, 8192, 4096, 14336, {Tile::medium, 1}},
    {90, Scales::block, 8192, 8192, 8192, {Tile::medium, 1}},
    // sm_100, tensor: predicted by waves, not measured
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
    // sm_100, block: predicted by waves, not measured
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
    // sm_120, tensor: predicted by waves, not measured
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
    // sm_120, block: predicted by waves, not measured
    {120, Scales::block, 256, 28672, 4096, {Tile::large, 1}},
    {120, Scales::block, 1024, 28672, 4096, {Tile::large, 4}},
    {120, Scales::block, 1024, 8192, 8192, {Tile::large, 1}},
    {120, Scales::block, 8192, 8192, 8192, {Tile::large, 4}},
    // end of the table
};

// Returns 16 log2(value), interpolated linearly between powers of two.
constexpr int sixteenths(int value) {
  int octave = 0;
  while (value >> octave > 1) ++octave;
  return 16 * octave + static_cast<int>((static_cast<int64_t>(value) << 4 >> octave) - 16);
}

// A shape as a point on logarithmic axes, for the distance between shapes. m and n count twice as much as k,
// because the number of tiles depends on them.
struct TilePoint {
  int m, n, k;

  constexpr TilePoint(int of_m, int of_n, int of_k)
      : m(2 * sixteenths(of_m)), n(2 * sixteenths(of_n)), k(sixteenths(of_k)) {}
  constexpr TilePoint() : TilePoint(1, 1, 1) {}

  constexpr int distance(const TilePoint& other) const {
    const auto apart = [](int a, int b) { return a < b ? b - a : a - b; };
    return apart(m, other.m) + apart(n, other.n) + apart(k, other.k);
  }
};

inline constexpr auto kTilePoints = [] {
  std::array<TilePoint, std::size(kTileTable)> points;
  for (size_t i = 0; i < points.size(); ++i) {
    points[i] = TilePoint(kTileTable[i].m, kTileTable[i].n, kTileTable[i].k);
  }
  return points;
}();

// Returns a tile for a shape without an entry, or whose entry's kernel does not take the product. On Hopper
// up to 128 rows: a thin tile of half as many columns as there are rows, which stream-K splits along K so
// that every multiprocessor has the same share. Else: the larger tile if tiles of 128x128 fill the
// multiprocessors, and the smaller one if not.
constexpr TileChoice tile_by_shape(int chip, int m, int n, int multiprocessors) {
  if (chip == 90 && m <= kThinRows) return {m <= kThinRows / 2 ? Tile::thin32 : Tile::thin64, 1};
  const int64_t tiles = static_cast<int64_t>((m + 127) / 128) * ((n + 127) / 128);
  const Tile larger = chip == 90 ? Tile::medium : Tile::large;
  return {tiles >= multiprocessors ? larger : Tile::small, 1};
}

// Returns the choice of the entry nearest to a shape. If a chip has no entries for a kind of scales, the same
// tiles' entries for another kind decide: those of row scales for mixed scales, and those of tensor scales
// for row scales. cuBLASLt takes mixed scales, too, but with one launch more than it was measured with for
// row scales: up to 128 rows tile_by_shape then decides instead.
constexpr TileChoice tile_for(int chip, Scales scales, int m, int n, int k, int multiprocessors) {
  const TilePoint point(m, n, k);
  const TileEntry* best = nullptr;
  int nearest = 0;
  for (size_t i = 0; i < kTilePoints.size(); ++i) {
    const TileEntry& entry = kTileTable[i];
    if (entry.chip != chip || entry.scales != scales) continue;
    const int distance = point.distance(kTilePoints[i]);
    if (best == nullptr || distance < nearest) nearest = distance, best = &entry;
  }
  if (best != nullptr) return best->choice;
  if (scales == Scales::mixed) {
    const TileChoice by_row = tile_for(chip, Scales::row, m, n, k, multiprocessors);
    const bool one_launch_more = by_row.tile == Tile::cublaslt && m <= kThinRows;
    return one_launch_more ? tile_by_shape(chip, m, n, multiprocessors) : by_row;
  }
  if (scales == Scales::row) return tile_for(chip, Scales::tensor, m, n, k, multiprocessors);
  return tile_by_shape(chip, m, n, multiprocessors);
}

}  // namespace fp8serve
