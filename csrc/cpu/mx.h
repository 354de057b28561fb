// MXFP8: 32 consecutive values of a row share an E8M0 scale (fp8serve/fp8/ops/microscaling.py has the
// definition). A byte e of E8M0 is 2^(e - 127); 255 is NaN.
//
// A product reads a matrix in MX blocks as BF16: a code times a power of two is exact there. So that neither
// a value nor a sum is subnormal, which `vdpbf16ps` would take as zero, each row is multiplied by a power of
// two with which the scale of its largest block is 1, and a block far below that is zero. The scale of the
// row multiplies the finished sum, like any scale of a row.
#pragma once

#include <vector>

#include "cpu/features.h"
#include "cpu/gemm_run.h"
#include "cpu/rows.h"

namespace fp8serve::gemm {

constexpr uint8_t kMinRowCode = 63;  // 2^-64: is_far() is not needed for the scale of a row that is small

// How far below the scale of its row a block's may be, as an exponent.
template <class F>
inline constexpr int kMaxShift = F::mantissa == 3 ? 54 : 47;

// The scales of rows in a product: as E8M0, and as FP32 for the end of a sum.
struct RowScales {
  std::vector<uint8_t> codes;
  std::vector<float> values;
};

struct LargestCode {
  static FP8_INLINE void run(const uint8_t* codes, int64_t n, uint8_t* largest) {
    uint8_t seen = kMinRowCode;
    for (int64_t i = 0; i < n; ++i) seen = codes[i] > seen ? codes[i] : seen;
    *largest = seen;
  }
};

inline float value_of_code(uint8_t code) {
  return std::bit_cast<float>(code == 255 ? 0x7fc00000 : static_cast<int32_t>(code) << 23);
}

// Computes the scales of the rows `begin` to `end` of a matrix with `blocks` codes in each row. `rows` has
// room.
inline void compute_row_scales(const uint8_t* codes, int64_t blocks, int64_t begin, int64_t end,
                               RowScales& rows) {
  parallel_rows(end - begin, blocks, [&](int64_t i) {
    const int64_t r = begin + i;
    uint8_t code = 127;
    if (blocks > 0) dispatch<LargestCode>(codes + r * blocks, blocks, &code);
    rows.codes[static_cast<size_t>(r)] = code;
    rows.values[static_cast<size_t>(r)] = value_of_code(code);
  });
}

template <class F>
FP8_INLINE uint16_t widened(uint8_t code, float factor) {
  const int32_t magnitude = code & 0x7f;
  const float normal = std::bit_cast<float>((magnitude << F::shift) + ((127 - F::bias) << 23));
  const float unit = std::bit_cast<float>((128 - F::bias - F::mantissa) << 23);
  const float value =
      (magnitude < (1 << F::mantissa) ? static_cast<float>(magnitude) * unit : normal) * factor;
  const int32_t special = magnitude == 0x7c && F::mantissa == 2 ? 0x7f80 : 0x7fc0;
  const int32_t bits =
      magnitude > static_cast<int32_t>(F::max_fp8) ? special : std::bit_cast<int32_t>(value) >> 16;
  return static_cast<uint16_t>(((code & 0x80) << 8) | bits);
}

// k values of a row in MX blocks as BF16; `codes`: the scales of the blocks, `row`: that of the row.
template <class F>
struct WidenRow {
  static FP8_INLINE void run(const uint8_t* from, const uint8_t* codes, int row, int64_t k, uint16_t* out) {
    for (int64_t begin = 0; begin < k; begin += kMxBlock) {
      const int shift = row - codes[begin / kMxBlock];
      const float factor = shift > kMaxShift<F> ? 0.0f : std::bit_cast<float>((127 - shift) << 23);
      if (begin + kMxBlock <= k) {
        for (int64_t i = begin; i < begin + kMxBlock; ++i) out[i] = widened<F>(from[i], factor);
      } else {
        for (int64_t i = begin; i < k; ++i) out[i] = widened<F>(from[i], factor);
      }
    }
  }
};

// The k values of x's row `row` from `column` on, which is a multiple of 32. `from`: their codes.
inline void widen_row(const Operand& x, const void* from, int64_t row, int64_t column, int64_t k,
                      uint16_t* out) {
  const auto* values = static_cast<const uint8_t*>(from);
  const uint8_t* codes = x.mx_codes + row * x.mx_blocks + column / kMxBlock;
  const int scale = x.mx_rows[row];
  x.kind == Kind::e5m2 ? dispatch<WidenRow<E5M2>>(values, codes, scale, k, out)
                       : dispatch<WidenRow<E4M3>>(values, codes, scale, k, out);
}

}  // namespace fp8serve::gemm
