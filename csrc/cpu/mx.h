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
#include "cpu/gemm_widen.h"
#include "cpu/tensors.h"

namespace fp8serve::gemm {

constexpr uint8_t kMinRowCode = 63;  // 2^-64: is_far() is not needed for the scale of a row that is small

// The largest difference between the exponent of a row's scale and that of a block's scale.
template <class F>
inline constexpr int kMaxShift = F::mantissa == 3 ? 54 : 47;

// The scales of rows in a product: as E8M0, and as FP32 for the end of a sum.
struct RowScales {
  std::vector<uint8_t> codes;
  std::vector<float> values;

  void resize(int64_t rows) {
    codes.resize(static_cast<size_t>(rows));
    values.resize(static_cast<size_t>(rows));
  }
};

// Finds the largest code of each of `rows` rows.
struct LargestCodes {
  static FP8_INLINE void run(const uint8_t* codes, int64_t rows, int64_t blocks, uint8_t* largest) {
    for (int64_t r = 0; r < rows; ++r, codes += blocks) {
      uint8_t seen = kMinRowCode;
      for (int64_t i = 0; i < blocks; ++i) seen = codes[i] > seen ? codes[i] : seen;
      largest[r] = seen;
    }
  }
};

inline float value_of_code(uint8_t code) {
  return std::bit_cast<float>(code == 255 ? 0x7fc00000 : static_cast<int32_t>(code) << 23);
}

// Computes the scales of the rows of stacked matrices, of `count` rows with `blocks` codes each, for the
// matrices with these indices, one after the other. One parallel region: a matrix may be small.
inline void compute_row_scales(const uint8_t* codes, int64_t blocks, const std::vector<int64_t>& indices,
                               int64_t count, RowScales& rows) {
  constexpr int64_t kRows = 512;  // of a task
  const int64_t tasks = (count + kRows - 1) / kRows;
  rows.resize(static_cast<int64_t>(indices.size()) * count);
  parallel_tasks(static_cast<int64_t>(indices.size()) * tasks, [&](int64_t task) {
    const int64_t matrix = task / tasks, row = task % tasks * kRows, size = std::min(kRows, count - row);
    const int64_t from = (indices[static_cast<size_t>(matrix)] * count + row) * blocks;
    uint8_t* largest_codes = rows.codes.data() + matrix * count + row;
    blocks > 0 ? dispatch<LargestCodes>(codes + from, size, blocks, largest_codes)
               : static_cast<void>(std::fill_n(largest_codes, size, uint8_t{127}));
    float* values = rows.values.data() + matrix * count + row;
    for (int64_t i = 0; i < size; ++i) values[i] = value_of_code(largest_codes[i]);
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

// Widens k <= 1024 values of a row in MX blocks to BF16. `codes` are the scales of the blocks, `row` is that
// of the row.
template <class F>
struct WidenRow {
  static FP8_INLINE void run(const uint8_t* __restrict from, const uint8_t* codes, int row, int64_t k,
                             uint16_t* __restrict out) {
    float factors[kBlock];
    for (int64_t begin = 0; begin < k; begin += kMxBlock) {
      const int shift = row - codes[begin / kMxBlock];
      std::fill_n(factors + begin, kMxBlock,
                  shift > kMaxShift<F> ? 0.0f : std::bit_cast<float>((127 - shift) << 23));
    }
    for (int64_t i = 0; i < k; ++i) out[i] = widened<F>(from[i], factors[i]);
  }
};

#if FP8_X86
// Widens a row by table (gemm_widen.h). `out` has room for a multiple of 64 values.
template <class F>
FP8_TARGET_AVX512BF16 inline void widen_row_avx512bf16(const uint8_t* from, const uint8_t* codes, int row,
                                                       int64_t k, uint16_t* out) {
  const Tables t = tables<F>();
  const __m512i runs = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // so that the unpacks keep the order of k
  const auto shifts_of = [row](uint8_t code) {
    return static_cast<int16_t>(row - code > kMaxShift<F> ? -1 : (row - code) << 7);
  };
  for (int64_t begin = 0; begin < k; begin += 2 * kMxBlock, codes += 2) {
    const int64_t left = k - begin;
    const __mmask64 mask = left >= 64 ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
    const Pair p = widen(t, _mm512_permutexvar_epi64(runs, _mm512_maskz_loadu_epi8(mask, from + begin)));
    const int16_t second = shifts_of(codes[left > kMxBlock ? 1 : 0]);
    _mm512_storeu_si512(out + begin, lower_exponents(p.first, _mm512_set1_epi16(shifts_of(codes[0]))));
    _mm512_storeu_si512(out + begin + kMxBlock, lower_exponents(p.second, _mm512_set1_epi16(second)));
  }
}
#endif

template <class F>
void widen_codes(const uint8_t* from, const uint8_t* codes, int row, int64_t k, uint16_t* out) {
#if FP8_X86
  if (has(kAvx512Bf16)) return widen_row_avx512bf16<F>(from, codes, row, k, out);
#endif
  dispatch<WidenRow<F>>(from, codes, row, k, out);
}

// The k values of x's row `row` from `column` on, which is a multiple of 32. `from`: their codes; `out` has
// room for whole 64s.
inline void widen_row(const Operand& x, const void* from, int64_t row, int64_t column, int64_t k,
                      uint16_t* out) {
  const auto* values = static_cast<const uint8_t*>(from);
  const uint8_t* codes = x.mx_codes + row * x.mx_blocks + column / kMxBlock;
  x.kind == Kind::e5m2 ? widen_codes<E5M2>(values, codes, x.mx_rows[row], k, out)
                       : widen_codes<E4M3>(values, codes, x.mx_rows[row], k, out);
}

}  // namespace fp8serve::gemm
