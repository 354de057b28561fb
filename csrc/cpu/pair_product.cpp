#include "cpu/pair_product.h"

#include <bit>

#if FP8_X86
#include <immintrin.h>
#endif

namespace fp8serve::pairs {
namespace {

constexpr int64_t kRows = 4;      // of a tile
constexpr int64_t kColumns = 64;  // of a tile, at most

// A tile of 4 rows and 16 columns in plain C++: a product of BF16 values is exact, fused or not.
struct Plain {
  static FP8_INLINE void run(const Product* p, int64_t row, int64_t column) {
    float sum[kRows][16];
    for (int64_t r = 0; r < kRows; ++r) {
      const float* out = p->out + (row + r) * p->out_stride + column;
      for (int i = 0; i < 16; ++i) sum[r][i] = p->add ? out[i] : 0.0f;
    }
    for (int64_t k = 0; k < p->k; k += 2) {
      const uint32_t* b = p->b + k / 2 * p->b_stride + column;
      for (int64_t r = 0; r < kRows; ++r) {
        const uint16_t* a = p->a + (row + r) * p->a_stride + k;
        const float even = std::bit_cast<float>(static_cast<uint32_t>(a[0]) << 16);
        const float odd = std::bit_cast<float>(static_cast<uint32_t>(a[1]) << 16);
        for (int i = 0; i < 16; ++i) {
          sum[r][i] += odd * std::bit_cast<float>(b[i] & 0xffff0000u);
          sum[r][i] += even * std::bit_cast<float>(b[i] << 16);
        }
      }
    }
    for (int64_t r = 0; r < kRows; ++r) {
      float* out = p->out + (row + r) * p->out_stride + column;
      for (int i = 0; i < 16; ++i) out[i] = sum[r][i];
    }
  }
};

void multiply_plain(const Product& p) {
  for (int64_t row = 0; row < p.rows; row += kRows) {
    for (int64_t column = 0; column < p.columns; column += 16) dispatch<Plain>(&p, row, column);
  }
}

#if FP8_X86
#define FP8_TARGET FP8_TARGET_AVX512BF16

// 4 rows and 16 C columns: with C = 4 each word of `b` and each pair of `a` is loaded for four products.
template <int C>
FP8_TARGET FP8_INLINE void tile(const Product& p, int64_t row, int64_t column) {
  __m512 sum[kRows][C];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    const float* out = p.out + (row + r) * p.out_stride + column;
#pragma GCC unroll 4
    for (int i = 0; i < C; ++i) sum[r][i] = p.add ? _mm512_loadu_ps(out + 16 * i) : _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < p.k; k += 2) {
    const uint32_t* b = p.b + k / 2 * p.b_stride + column;
    __m512bh y[C];
#pragma GCC unroll 4
    for (int i = 0; i < C; ++i) y[i] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + 16 * i));
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      int32_t two;
      __builtin_memcpy(&two, p.a + (row + r) * p.a_stride + k, sizeof(two));
      const auto x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(two));
#pragma GCC unroll 4
      for (int i = 0; i < C; ++i) sum[r][i] = _mm512_dpbf16_ps(sum[r][i], x, y[i]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    float* out = p.out + (row + r) * p.out_stride + column;
#pragma GCC unroll 4
    for (int i = 0; i < C; ++i) _mm512_storeu_ps(out + 16 * i, sum[r][i]);
  }
}

FP8_TARGET void multiply_bf16(const Product& p) {
  for (int64_t column = 0; column < p.columns; column += kColumns) {
    const int64_t left = p.columns - column;
    for (int64_t row = 0; row < p.rows; row += kRows) {
      if (left >= 64) {
        tile<4>(p, row, column);
      } else if (left == 48) {
        tile<3>(p, row, column);
      } else if (left == 32) {
        tile<2>(p, row, column);
      } else {
        tile<1>(p, row, column);
      }
    }
  }
}

#undef FP8_TARGET
#endif

}  // namespace

void multiply(const Product& p) {
#if FP8_X86
  if (&best(kVariants) == &kVariants[0]) return multiply_bf16(p);
#endif
  multiply_plain(p);
}

}  // namespace fp8serve::pairs
