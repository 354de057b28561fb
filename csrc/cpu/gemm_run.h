// A GEMM as data: two matrices, their scales and the operands of the epilogue. run() computes it.
#pragma once

#include <algorithm>
#include <vector>

#include "check.h"
#include "cpu/gemm.h"

namespace fp8serve::gemm {

// A matrix [rows, K], K contiguous, and its scale_inv: none, [] or [rows, 1] (outside the sum), or [rows,
// blocks] or [ceil(rows / 128), blocks] (inside it). With `ends`, the matrix is a stack of matrices whose
// rows end there, and the blocks of 128 rows begin anew with each of them.
struct Operand {
  const char* values;
  Kind kind;
  int64_t k;
  const float* scale = nullptr;
  int64_t scale_rows = 1;    // rows that share a row of the scale: 1, 128, or all
  int64_t scale_blocks = 0;  // 0: outside the sum
  bool packed = false;       // in the order of gemm_packed.h
  const int32_t* ends = nullptr;
  // In MX blocks (mx.h): the E8M0 scale of each 32 of K, and that of each row, which is `scale` as FP32.
  const uint8_t* mx_codes = nullptr;
  int64_t mx_blocks = 0;  // codes of a row
  const uint8_t* mx_rows = nullptr;
  const uint8_t* distances = nullptr;  // of packed weights in 4 bits (gemm_4bit.h)

  // The kind of the values that a level reads.
  Kind panel_kind() const { return mx_codes != nullptr || has_4_bits(kind) ? Kind::bf16 : kind; }
  const char* at(int64_t row, int64_t column) const { return values + bytes_of(kind, row * k + column); }
  const char* block(int64_t row, int64_t column) const {  // packed: of the 16 rows from `row` on
    return values + bytes_of(kind, row * k + column * kGroup);
  }
  // With K = 0 a block scale has no elements, and there is nothing to scale.
  float outer(int64_t row) const {
    return scale == nullptr || scale_blocks != 0 || k == 0 ? 1.0f : scale[row / scale_rows];
  }
  const float* inner(int64_t row, const float* ones) const {
    return scale_blocks != 0 ? scale + scale_row(row) * scale_blocks : ones;
  }
  int64_t scale_row(int64_t row) const {
    int64_t begin = 0, first = 0;
    for (const int32_t* end = ends; end != nullptr && *end <= row; ++end) {
      first += (*end - begin + scale_rows - 1) / scale_rows;
      begin = *end;
    }
    return first + (row - begin) / scale_rows;
  }
};

// out [m, n] = round(sum * a scale * b scale + bias), and then, if there is a residual, round(residual +
// out).
struct Problem {
  Operand a, b;
  int64_t m, n, k;
  ScalarType bias_type, out_type;
  const void* bias;
  const void* residual;  // of the output's type, or null
  void* out;
  std::vector<float> ones = {};  // for an operand without block scales if the other has them

  int64_t out_bytes() const { return out_type == ScalarType::Float ? 4 : 2; }
  bool blocked() const { return a.scale_blocks != 0 || b.scale_blocks != 0; }
  int64_t stride() const { return std::min(kBlock, (k + kChunk - 1) / kChunk * kChunk); }  // of a panel row
  int64_t k_blocks() const { return std::max<int64_t>((k + kBlock - 1) / kBlock, 1); }  // one also for K = 0
  int64_t k_count(int64_t block) const { return std::min(kBlock, k - block * kBlock); }
};

// Computes problems with the same `n`, `k` and types whose rows of `a` are consecutive in memory, such as
// those of the experts of a layer, in one parallel region, so that small problems share the threads.
void run(const Problem* problems, int64_t count);
inline void run(const Problem& problem) { run(&problem, 1); }

}  // namespace fp8serve::gemm
