// FP8 codes -> FP32 panel rows in the step order of gemm.h, for the levels without a BF16 dot product.
#pragma once

#include "cpu/gemm.h"
#include "fp8.h"

namespace fp8serve::gemm {

// Where element `i` of a chunk's panel (step i / 16, lane i % 16) comes from.
constexpr int source(int i) {
  constexpr int offset[4] = {1, 0, 9, 8};
  const int lane = i % 16;
  return 16 * (lane / 4) + 2 * (lane % 4) + offset[i / 16];
}

struct StepOrder {
  uint8_t from[kChunk];
  constexpr StepOrder() : from() {
    for (int i = 0; i < kChunk; ++i) from[i] = static_cast<uint8_t>(source(i));
  }
};
inline constexpr StepOrder kStepOrder{};

FP8_INLINE void unpack_fp32(const uint8_t* codes, int64_t k, bool e5m2, float* row) {
  const float* table = e5m2 ? kDecode<E5M2>.value : kDecode<E4M3>.value;
  int64_t begin = 0;
  for (; begin + kChunk <= k; begin += kChunk) {
    for (int i = 0; i < kChunk; ++i) row[begin + i] = table[codes[begin + kStepOrder.from[i]]];
  }
  if (begin == k) return;
  for (int i = 0; i < kChunk; ++i) {
    const int64_t from = begin + kStepOrder.from[i];
    row[begin + i] = from < k ? table[codes[from]] : 0.0f;
  }
}

}  // namespace fp8serve::gemm
