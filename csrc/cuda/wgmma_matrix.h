// The 64-bit descriptors by which wgmma addresses a matrix of BF16 in shared memory (PTX ISA, "Matrix
// Descriptor Format"). In a header of its own without CUDA's headers: the emulator decodes these descriptors,
// and a test compares them with CuTe's.
//
// A tile is stored in panels of 64 columns, each [rows][128 bytes], with 128-byte swizzle: chunk c (16 bytes)
// of row r is at c ^ r % 8. The dimension K of the sum is either the tile's columns or its rows:
//
//   rows of M or N, columns of K (queries, keys): each product takes 16 columns (32 bytes of a panel's row).
//     The stride is the distance from 8 rows to the next 8; the leading offset is not used.
//   rows of K, columns of N (values): each product takes 16 rows. The stride is the distance from 8 rows to
//     the next 8, the leading offset that from a panel to the next.
#pragma once

#include <cstdint>

namespace fp8serve {

constexpr uint32_t kPanelColumns = 64, kPanelRow = 128;  // BF16 elements, bytes
constexpr uint32_t kEightRows = 8 * kPanelRow;           // bytes after which the swizzle repeats
constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;

// Returns the descriptor of a matrix that begins at `start` in shared memory. All arguments are bytes.
constexpr uint64_t matrix_descriptor(uint32_t start, uint32_t leading, uint32_t stride) {
  const auto field = [](uint32_t bytes) { return static_cast<uint64_t>((bytes & 0x3ffff) >> 4); };
  return kSwizzle128 | field(stride) << 32 | field(leading) << 16 | field(start);
}

// Returns the descriptor of the 16 columns of K from 16 * step on, in a tile of `rows` rows. `start`: the
// byte of the tile's first panel at which the matrix's first row begins.
constexpr uint64_t k_columns(uint32_t start, uint32_t rows, uint32_t step) {
  const uint32_t panel = 16 * step / kPanelColumns, within = 32 * step % kPanelRow;
  return matrix_descriptor(start + panel * rows * kPanelRow + within, 16, kEightRows);
}

// Returns the descriptor of the rows of K from byte `start` on, in a tile of `rows` rows and `columns`
// columns.
constexpr uint64_t k_rows(uint32_t start, uint32_t rows, uint32_t columns) {
  return matrix_descriptor(start, columns > kPanelColumns ? rows * kPanelRow : 0, kEightRows);
}

// Returns the position of a row's chunk of 16 bytes, in chunks from the tile's beginning.
constexpr uint32_t swizzled_chunk(uint32_t rows, uint32_t row, uint32_t chunk) {
  return (chunk / 8 * rows + row) * 8 + (chunk % 8 ^ row % 8);
}

}  // namespace fp8serve
