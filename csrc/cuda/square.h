// A square of 128 x 128 bytes in shared memory that a block writes by lines (rows) and reads by columns.
#pragma once

#include "cuda/cast.h"

namespace fp8serve {

constexpr int kSquare = 128, kSquareThreads = 256;

// Transposes 4 x 4 bytes: a word of `line` holds a byte of each column, a word of `column` a byte of each
// line.
__device__ __forceinline__ void transpose_bytes(const uint32_t (&line)[4], uint32_t (&column)[4]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    column[c] = 0;
#pragma unroll
    for (int l = 0; l < 4; ++l) column[c] |= (line[l] >> (8 * c) & 0xff) << (8 * l);
  }
}

// Piece p (16 bytes) of a line is stored at piece p ^ line / 16, so that the 32 words that a warp reads at
// once, of eight lines sixteen apart, are in 32 different banks.
struct Square {
  uint8_t bytes[kSquare][kSquare];

  // Returns the value of up to 16 bytes at a column that is a multiple of the value's size.
  template <class V>
  __device__ __forceinline__ V& at(int line, int column) {
    return *reinterpret_cast<V*>(&bytes[line][(column / 16 ^ line / 16) * 16 + column % 16]);
  }

  // Calls use(column, first line, bytes of sixteen lines) for all columns. kSquareThreads threads call this
  // together; eight neighbouring lanes have the 128 bytes of a column.
  template <class Use>
  __device__ __forceinline__ void for_columns(const Use& use) {
    const int first = static_cast<int>(threadIdx.x) % 8 * 16, column = static_cast<int>(threadIdx.x) / 8 * 4;
    uint32_t turned[4][4];  // [column][quarter of the sixteen lines]
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      uint32_t line[4], of_column[4];
#pragma unroll
      for (int l = 0; l < 4; ++l) line[l] = at<uint32_t>(first + 4 * quarter + l, column);
      transpose_bytes(line, of_column);
#pragma unroll
      for (int c = 0; c < 4; ++c) turned[c][quarter] = of_column[c];
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      use(column + c, first, uint4{turned[c][0], turned[c][1], turned[c][2], turned[c][3]});
    }
  }

  // Stores the columns as rows of q_t [cols, rows]; the square begins at (r0, c0) of a matrix [rows, cols].
  __device__ __forceinline__ void store_turned(uint8_t* q_t, int64_t r0, int64_t c0, int64_t rows,
                                               int64_t cols) {
    for_columns([&](int of, int first, const uint4& bytes) {
      if (c0 + of >= cols || r0 + first >= rows) return;
      uint8_t* to = q_t + (c0 + of) * rows + r0 + first;
      if (rows % 16 == 0) {
        *reinterpret_cast<uint4*>(to) = bytes;
      } else {
        const uint32_t word[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
        for (int b = 0; b < 16; ++b) {
          if (r0 + first + b < rows) to[b] = static_cast<uint8_t>(word[b / 4] >> (8 * (b % 4)));
        }
      }
    });
  }
};

}  // namespace fp8serve
