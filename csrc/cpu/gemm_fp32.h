// FP8 codes -> FP32 panels in the order of gemm.h, for the levels without a BF16 dot product. A run has two
// steps: its odd k, then its even k.
#pragma once

#include "cpu/gemm.h"
#include "fp8.h"

namespace fp8serve::gemm {

constexpr int kStepOrder[kRun] = {1, 3, 5, 7, 0, 2, 4, 6};

FP8_INLINE const float* decode_table(bool e5m2) { return e5m2 ? kDecode<E5M2>.value : kDecode<E4M3>.value; }

FP8_INLINE void unpack_row_fp32(const uint8_t* codes, int64_t k, bool e5m2, float* row) {
  const float* table = decode_table(e5m2);
  for (int64_t begin = 0; begin < k; begin += kRun) {
    for (int i = 0; i < kRun; ++i) {
      const int64_t from = begin + kStepOrder[i];
      row[begin + i] = from < k ? table[codes[from]] : 0.0f;
    }
  }
}

// Column c goes to vector c % 4, quad c / 4.
FP8_INLINE void unpack_columns_fp32(const uint8_t* const* codes, int64_t k, bool e5m2, float* panel) {
  const float* table = decode_table(e5m2);
  for (int c = 0; c < kGroup; ++c) {
    float* column = panel + c % 4 * 16 + c / 4 * 4;
    for (int64_t begin = 0; begin < k; begin += kRun) {
      for (int i = 0; i < kRun; ++i) {
        const int64_t from = begin + kStepOrder[i];
        column[begin * kGroup + i / 4 * 64 + i % 4] = from < k ? table[codes[c][from]] : 0.0f;
      }
    }
  }
}

}  // namespace fp8serve::gemm
