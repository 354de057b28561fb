// FP8 values to BF16 by table, for AVX-512 VBMI.
//
// 64 FP8 values become 64 BF16 in five instructions: two `vpermi2b` look up the low and the high byte of 64
// magnitudes, a ternary-logic op copies the signs, two byte-unpacks pair low and high bytes up. Subnormal
// values come out of the table as the normal BF16 numbers they are, hence `vdpbf16ps` treating BF16
// subnormals as zero does not matter.
#pragma once

#include "cpu/features.h"
#include "fp8.h"

#if FP8_X86
#include <immintrin.h>

namespace fp8serve::gemm {

template <class F>
struct alignas(64) ByteTables {
  uint8_t low[128], high[128];
  constexpr ByteTables() : low(), high() {
    for (int i = 0; i < 128; ++i) {
      const auto bits = std::bit_cast<uint32_t>(decode<F>(static_cast<uint8_t>(i)));
      low[i] = static_cast<uint8_t>(bits >> 16);
      high[i] = static_cast<uint8_t>(bits >> 24);
    }
  }
};
template <class F>
constexpr ByteTables<F> kBytes{};

struct Tables {
  __m512i low[2], high[2], sign;
};
struct Pair {
  __m512i first, second;  // in each 128-bit part: values 0 to 7, values 8 to 15
};

template <class F>
FP8_TARGET_AVX512BF16 FP8_INLINE Tables tables() {
  const auto* low = reinterpret_cast<const __m512i*>(kBytes<F>.low);
  const auto* high = reinterpret_cast<const __m512i*>(kBytes<F>.high);
  return {{low[0], low[1]}, {high[0], high[1]}, _mm512_set1_epi8(static_cast<char>(0x80))};
}

FP8_TARGET_AVX512BF16 FP8_INLINE Pair widen(const Tables& t, __m512i bytes) {
  const __m512i low = _mm512_permutex2var_epi8(t.low[0], bytes, t.low[1]);
  const __m512i magnitude = _mm512_permutex2var_epi8(t.high[0], bytes, t.high[1]);
  const __m512i high =
      _mm512_ternarylogic_epi32(magnitude, bytes, t.sign, 0xf8);  // magnitude | (bytes & sign)
  return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
}

// Divides BF16 values by powers of two (compute_mx_shifts). Zero, infinity and NaN stay what they are.
FP8_TARGET_AVX512BF16 FP8_INLINE __m512i lower_exponents(__m512i values, __m512i shifts) {
  const __m512i magnitudes = _mm512_and_si512(values, _mm512_set1_epi16(0x7fff));
  const __mmask32 finite = _mm512_cmplt_epu16_mask(magnitudes, _mm512_set1_epi16(0x7f80));
  const __m512i low = _mm512_mask_subs_epu16(magnitudes, finite, magnitudes, shifts);
  return _mm512_ternarylogic_epi32(low, values, _mm512_set1_epi16(static_cast<int16_t>(0x8000)),
                                   0xf8);  // low | (values & sign)
}

}  // namespace fp8serve::gemm
#endif
