// How wgmma finds a matrix of BF16 in shared memory: a descriptor of 64 bits (PTX ISA, "Matrix Descriptor
// Format"). Apart from device.h and without CUDA's headers: the emulator decodes what is encoded here, and a
// test compares it with CuTe's.
//
// A tile lies in panels of 64 columns, each [rows][128 bytes], whose 16-byte chunks change places (128-byte
// swizzle): chunk c of row r is at c ^ r % 8. Whether its rows are the sum's dimension K or not is the
// product's to say:
//
//   rows of M or N, columns of K (queries, keys): a product takes 16 columns, which begin 32 bytes further
//     in the panel, or in the next panel; the stride is from 8 rows to the next 8, and the leading offset is
//     not used;
//   rows of K, columns of N (values): a product takes 16 rows; the stride is from 8 rows to the next 8, the
//     leading offset from a panel to the next.
#pragma once

#include <cstdint>

namespace fp8serve {

constexpr uint32_t kPanelColumns = 64, kPanelRow = 128;  // BF16 elements, bytes
constexpr uint32_t kEightRows = 8 * kPanelRow;           // bytes, at which the exchange of chunks repeats
constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;

// The descriptor of a matrix that begins at byte `start` of shared memory.
constexpr uint64_t matrix_descriptor(uint32_t start, uint32_t leading, uint32_t stride) {
  const auto field = [](uint32_t bytes) { return static_cast<uint64_t>((bytes & 0x3ffff) >> 4); };
  return kSwizzle128 | field(stride) << 32 | field(leading) << 16 | field(start);
}

// Columns of K from 16 `step` on of a tile of so many rows, of which the matrix's first is at `start`.
constexpr uint64_t k_columns(uint32_t start, uint32_t rows, uint32_t step) {
  const uint32_t panel = 16 * step / kPanelColumns, within = 32 * step % kPanelRow;
  return matrix_descriptor(start + panel * rows * kPanelRow + within, 16, kEightRows);
}

// Rows of K from the one at `start` on of a tile of so many rows and columns.
constexpr uint64_t k_rows(uint32_t start, uint32_t rows, uint32_t columns) {
  return matrix_descriptor(start, columns > kPanelColumns ? rows * kPanelRow : 0, kEightRows);
}

// Where a row's chunk of 16 bytes lies, in chunks from the tile's beginning.
constexpr uint32_t swizzled_chunk(uint32_t rows, uint32_t row, uint32_t chunk) {
  return (chunk / 8 * rows + row) * 8 + (chunk % 8 ^ row % 8);
}

}  // namespace fp8serve
