// RMSNorm, silu(gate) * up and rotary of BF16 for AVX-512: the same bits as the plain loops with about half
// the instructions.
//
// 32 values are one register of words, and shifting or masking it gives the even and the odd ones as FP32.
// Rounded values stay in the upper half of their FP32, and stores pick the upper halves. A NaN keeps its
// payload until it is stored: it was made from BF16, so its lower half is zero, and rounding cannot carry
// out of it.
#include "cpu/elementwise.h"

#if FP8_X86
#include <immintrin.h>

#define FP8_TARGET FP8_TARGET_AVX512

namespace fp8serve {
namespace {

constexpr int32_t kUpperHalf = static_cast<int32_t>(0xffff0000);

FP8_TARGET FP8_INLINE __m512 value(float x) { return _mm512_set1_ps(x); }
FP8_TARGET FP8_INLINE __m512i value(int32_t x) { return _mm512_set1_epi32(x); }

// 32 values as FP32: those at even and those at odd indices.
struct Strip {
  __m512 even, odd;
};

FP8_TARGET FP8_INLINE __m512i load_words(const BF16* x) { return _mm512_loadu_si512(x); }
FP8_TARGET FP8_INLINE Strip widen(__m512i words) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(words, value(kUpperHalf)))};
}

// x rounded to BF16 in its upper half; the lower half has no meaning.
FP8_TARGET FP8_INLINE __m512i round_upper(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __mmask16 odd = _mm512_test_epi32_mask(bits, value(0x10000));
  const __m512i raised = _mm512_add_epi32(bits, value(0x7fff));
  return _mm512_mask_add_epi32(raised, odd, raised, value(1));
}
FP8_TARGET FP8_INLINE __m512 round_inside(__m512 x) {
  return _mm512_castsi512_ps(_mm512_and_si512(round_upper(x), value(kUpperHalf)));
}
FP8_TARGET FP8_INLINE __m512i round_or_nan(__m512 x) {
  return _mm512_mask_mov_epi32(round_upper(x), _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), value(0x7fc00000));
}

struct alignas(64) WordIndices {
  uint16_t from[32];
};
// The upper words of two vectors, in turn.
constexpr WordIndices upper_words() {
  WordIndices indices{};
  for (int i = 0; i < 32; ++i) indices.from[i] = static_cast<uint16_t>((i | 1) + (i % 2) * 32);
  return indices;
}
constexpr WordIndices kUpperWords = upper_words();

FP8_TARGET FP8_INLINE void store_upper(__m512i even, __m512i odd, BF16* y) {
  _mm512_storeu_si512(y, _mm512_permutex2var_epi16(even, _mm512_load_si512(kUpperWords.from), odd));
}

FP8_TARGET FP8_INLINE __m512i norm(__m512 x, __m512 weight, __m512 factor) {
  return round_or_nan(_mm512_mul_ps(weight, round_inside(_mm512_mul_ps(x, factor))));
}

// --- silu(gate) * up
//
// BF16 has 65536 values: any function that rounds like x / (1 + e^-x) for each of them may replace it, and
// a test compares all. So the exponential is a shorter polynomial of fused operations. The quotient is a
// division: an estimated reciprocal is faster, but not the same on every processor. A strip with a gate
// beyond kLargest, or with a NaN, is left to the plain loop, so nothing needs clamping.

constexpr short kLargest = 0x42a0;  // 80, as BF16: e^80 is far from overflow
constexpr short kFinite = 0x7f7f;

FP8_TARGET FP8_INLINE __mmask32 above(__m512i words, short limit) {
  const __m512i magnitude = _mm512_and_si512(words, _mm512_set1_epi16(0x7fff));
  return _mm512_cmpgt_epi16_mask(magnitude, _mm512_set1_epi16(limit));
}

// 1 + e^-x, as 1 + 2^n 2^f with |f| <= 1/2.
FP8_TARGET FP8_INLINE __m512 one_plus_exp(__m512 x) {
  const __m512 log2_e = value(-1.44269504f), shift = value(12582912.0f + 127.0f);  // 1.5 * 2^23 + bias
  const __m512 shifted = _mm512_fmadd_ps(x, log2_e, shift);                        // low bits: n + bias
  const __m512 f = _mm512_fmsub_ps(x, log2_e, _mm512_sub_ps(shifted, shift));
  __m512 p = value(1.3264727e-3f);
  p = _mm512_fmadd_ps(p, f, value(9.671513e-3f));
  p = _mm512_fmadd_ps(p, f, value(5.5507336e-2f));
  p = _mm512_fmadd_ps(p, f, value(2.4022242e-1f));
  p = _mm512_fmadd_ps(p, f, value(6.931470e-1f));
  p = _mm512_fmadd_ps(p, f, value(1.0f));
  const __m512 power = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(shifted), 23));
  return _mm512_fmadd_ps(p, power, value(1.0f));
}

FP8_TARGET FP8_INLINE __m512i silu_mul(__m512 gate, __m512 up) {
  return round_upper(_mm512_mul_ps(round_inside(_mm512_div_ps(gate, one_plus_exp(gate))), up));
}

// --- rotary

// a * cos - b * sin and a * cos + b * sin.
FP8_TARGET FP8_INLINE __m512i rotate_first_half(__m512 a, __m512 cos, __m512 b, __m512 sin) {
  return round_or_nan(
      _mm512_sub_ps(round_inside(_mm512_mul_ps(a, cos)), round_inside(_mm512_mul_ps(b, sin))));
}
FP8_TARGET FP8_INLINE __m512i rotate_second_half(__m512 a, __m512 cos, __m512 b, __m512 sin) {
  return round_or_nan(
      _mm512_add_ps(round_inside(_mm512_mul_ps(a, cos)), round_inside(_mm512_mul_ps(b, sin))));
}

}  // namespace

FP8_TARGET void norm_row_zmm(const BF16* x, const BF16* weight, BF16* y, int64_t n, float factor) {
  const __m512 by = value(factor);
  for (int64_t i = 0; i < n; i += kStrip) {
    const Strip a = widen(load_words(x + i)), w = widen(load_words(weight + i));
    store_upper(norm(a.even, w.even, by), norm(a.odd, w.odd, by), y + i);
  }
}

FP8_TARGET void silu_mul_row_zmm(const BF16* gate, const BF16* up, BF16* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kStrip) {
    const __m512i gates = load_words(gate + i), ups = load_words(up + i);
    if ((above(gates, kLargest) | above(ups, kFinite)) != 0) {
      silu_mul_row_plain(gate + i, up + i, y + i, kStrip);
    } else {
      const Strip g = widen(gates), u = widen(ups);
      store_upper(silu_mul(g.even, u.even), silu_mul(g.odd, u.odd), y + i);
    }
  }
}

// Strip by strip, so that the cosines and sines of all heads stay in registers.
FP8_TARGET void rotate_heads_zmm(const BF16* x, const BF16* cos, const BF16* sin, BF16* y, int64_t heads,
                                 int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i += kStrip) {
    const Strip c0 = widen(load_words(cos + i)), c1 = widen(load_words(cos + half + i));
    const Strip s0 = widen(load_words(sin + i)), s1 = widen(load_words(sin + half + i));
    for (int64_t at = i; at < heads * dim; at += dim) {
      const Strip a = widen(load_words(x + at)), b = widen(load_words(x + at + half));
      store_upper(rotate_first_half(a.even, c0.even, b.even, s0.even),
                  rotate_first_half(a.odd, c0.odd, b.odd, s0.odd), y + at);
      store_upper(rotate_second_half(b.even, c1.even, a.even, s1.even),
                  rotate_second_half(b.odd, c1.odd, a.odd, s1.odd), y + at + half);
    }
  }
}

}  // namespace fp8serve
#endif
