// silu(gate) * up of BF16 for AVX-512: the same bits as silu_mul_row's plain loop in less than half its
// instructions.
//
// A BF16 has 65536 values, so that whatever agrees with x / (1 + e^-x), rounded, on all of them may stand in for
// it. Here the exponential is a shorter polynomial of fused operations and the quotient a reciprocal estimate
// with one Newton step; the tests compare every gate. Strips that hold a gate beyond kLargest, or anything that
// is not a number, take the plain loop: no clamp, no NaN and no infinity is left to look after.
#include "cpu/elementwise.h"

#if FP8_X86
#include <immintrin.h>

#define FP8_TARGET FP8_TARGET_AVX512

namespace fp8serve {
namespace {

constexpr int64_t kStrip = 32;
constexpr short kLargest = 0x42a0;  // 80 as BF16: e^80 is far from overflow
constexpr short kFinite = 0x7f7f;

FP8_TARGET FP8_INLINE __m512 value(float x) { return _mm512_set1_ps(x); }
FP8_TARGET FP8_INLINE __m512i value(int32_t x) { return _mm512_set1_epi32(x); }

FP8_TARGET FP8_INLINE bool any_above(__m512i gate, __m512i up) {
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  const __mmask32 large = _mm512_cmpgt_epi16_mask(_mm512_and_si512(gate, magnitude), _mm512_set1_epi16(kLargest));
  const __mmask32 wild = _mm512_cmpgt_epi16_mask(_mm512_and_si512(up, magnitude), _mm512_set1_epi16(kFinite));
  return (large | wild) != 0;
}

// The BF16 at even and at odd places, as FP32.
FP8_TARGET FP8_INLINE __m512 even(__m512i words) { return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16)); }
FP8_TARGET FP8_INLINE __m512 odd(__m512i words) {
  return _mm512_castsi512_ps(_mm512_and_si512(words, value(static_cast<int32_t>(0xffff0000))));
}

// A finite x, rounded to BF16 in its upper 16 bits; the lower ones are left over.
FP8_TARGET FP8_INLINE __m512i round_up_half(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __mmask16 is_odd = _mm512_test_epi32_mask(bits, value(0x10000));
  const __m512i raised = _mm512_add_epi32(bits, value(0x7fff));
  return _mm512_mask_add_epi32(raised, is_odd, raised, value(1));
}

// 1 + e^-x = 1 + 2^n 2^f.
FP8_TARGET FP8_INLINE __m512 one_plus_exp(__m512 x) {
  const __m512 factor = value(-1.44269504f), shift = value(12582912.0f + 127.0f);
  const __m512 shifted = _mm512_fmadd_ps(x, factor, shift);  // n + 127 in its low bits
  const __m512 f = _mm512_fmsub_ps(x, factor, _mm512_sub_ps(shifted, shift));
  __m512 p = value(0.0013264727f);
  p = _mm512_fmadd_ps(p, f, value(0.009671513f));
  p = _mm512_fmadd_ps(p, f, value(0.055507336f));
  p = _mm512_fmadd_ps(p, f, value(0.24022242f));
  p = _mm512_fmadd_ps(p, f, value(0.693147f));
  p = _mm512_fmadd_ps(p, f, value(1.0f));
  const __m512 power = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(shifted), 23));
  return _mm512_fmadd_ps(p, power, value(1.0f));
}

FP8_TARGET FP8_INLINE __m512i silu_mul(__m512 gate, __m512 up) {
  const __m512 below = one_plus_exp(gate), guess = _mm512_rcp14_ps(below);
  const __m512 sigmoid = _mm512_fmadd_ps(guess, _mm512_fnmadd_ps(below, guess, value(1.0f)), guess);
  const __m512i silu = round_up_half(_mm512_mul_ps(gate, sigmoid));
  return round_up_half(_mm512_mul_ps(odd(silu), up));
}

constexpr struct alignas(64) Choice {
  uint16_t from[32];
  constexpr Choice() : from() {
    for (int i = 0; i < 32; ++i) from[i] = static_cast<uint16_t>((i & ~1) + 1 + 32 * (i & 1));
  }
} kUpper{};  // the upper words of two vectors, in turn

}  // namespace

FP8_TARGET void silu_mul_row_zmm(const BF16* gate, const BF16* up, BF16* y, int64_t n) {
  const __m512i upper = _mm512_load_si512(kUpper.from);
  const int64_t whole = n / kStrip * kStrip;
  for (int64_t i = 0; i < whole; i += kStrip) {
    const __m512i g = _mm512_loadu_si512(gate + i), u = _mm512_loadu_si512(up + i);
    if (any_above(g, u)) [[unlikely]] {
      silu_mul_row_plain(gate + i, up + i, y + i, kStrip);
      continue;
    }
    const __m512i low = silu_mul(even(g), even(u)), high = silu_mul(odd(g), odd(u));
    _mm512_storeu_si512(y + i, _mm512_permutex2var_epi16(low, upper, high));
  }
  silu_mul_row_plain(gate + whole, up + whole, y + whole, n - whole);
}

}  // namespace fp8serve
#endif
