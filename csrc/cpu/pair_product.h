// Products of BF16 matrices whose second operand is stored in pairs of k, for the backward pass of attention
// and the gradients of adapters: their operands are small or have just been computed, so that filling the
// panels of gemm.h would take longer than the product.
//
// The order. An output is one running FP32 sum: for each pair of k, in order, the product of the odd k is
// added, then that of the even k, as `vdpbf16ps` does. Products are exact. Variants differ only where a BF16
// value or a sum is subnormal, which `vdpbf16ps` takes as zero.
#pragma once

#include <cstdint>

#include "cpu/features.h"

namespace fp8serve::pairs {

// out [rows][columns] = a [rows][k] times b [k][columns], added to `out` if `add`.
struct Product {
  const uint16_t* a;  // row-major, `a_stride` elements from a row to the next
  int64_t a_stride;
  const uint32_t* b;  // [k / 2][columns]: k = 2 i in the low half of a word, 2 i + 1 in the high one
  int64_t b_stride;   // words from a pair to the next
  int64_t k;          // even
  float* out;
  int64_t out_stride;
  int64_t rows, columns;  // multiples of 4 and of 16
  bool add;
};

void multiply(const Product& p);

// Two rows of BF16 as pairs: out[i] = even[i] | odd[i] << 16.
FP8_INLINE void interleave(const uint16_t* even, const uint16_t* odd, int64_t count, uint32_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = even[i] | static_cast<uint32_t>(odd[i]) << 16;
}

// Transposes x [rows][columns] of BF16. `stride`: elements from a row of `out` to the next.
FP8_INLINE void transpose(const uint16_t* x, int64_t rows, int64_t columns, int64_t stride, uint16_t* out) {
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t r = 0; r < rows; ++r) out[c * stride + r] = x[r * columns + c];
  }
}

inline constexpr std::array<Variant, 4> kVariants{{{"avx512bf16", kAvx512Bf16, Numerics::pairs_bf16},
                                                   {"avx512", kAvx512, Numerics::pairs_bf16},
                                                   {"avx2", kAvx2, Numerics::pairs_bf16},
                                                   {"portable", kPortable, Numerics::pairs_bf16}}};

}  // namespace fp8serve::pairs
