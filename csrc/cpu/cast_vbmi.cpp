// FP32, BF16 and FP16 -> FP8 for AVX-512 VBMI, the same bits as fp8.h.
//
// The trick: to |p| = |x * scale|, clamped to the maximum, add a number M so large that the FP32 addition
// itself rounds to the FP8 grid, nearest even, subnormals included. M has the exponent of |p| (or of the
// smallest normal, if that is more) plus 23 less the mantissa bits, and its low bits hold the FP8
// exponent field; the low byte of the sum then *is* the FP8 value. M comes out of a 32-entry table by the
// exponent. The sign and NaN are taken from x, which a positive finite scale does not change, 64 at a time:
// eight instructions for 16 values, and little more for 64.
#include "cpu/cast_rows.h"

#if FP8_X86
#include <immintrin.h>

#define FP8_TARGET FP8_TARGET_AVX512VBMI

namespace fp8serve {
namespace {

// M for every exponent modulo 32; a format has at most 30 of them.
template <class F>
struct alignas(64) Magic {
  uint32_t bits[32];
  constexpr Magic() : bits() {
    for (uint32_t e = F::min_normal >> 23; e <= static_cast<uint32_t>(F::max_bits) >> 23; ++e) {
      const uint32_t field = (e - (F::min_normal >> 23)) << F::mantissa;
      bits[e % 32] = ((e + F::shift) << 23) | field;
    }
  }
};
template <class F>
constexpr Magic<F> kMagic{};

struct alignas(64) ByteIndices {
  uint8_t from[64];
};
// Byte `at` of each dword of two vectors.
constexpr ByteIndices byte_of_each_dword(int at) {
  ByteIndices indices{};
  for (int i = 0; i < 32; ++i) indices.from[i] = static_cast<uint8_t>(4 * i + at);
  return indices;
}
// The lowest byte of each dword of two vectors, in turn.
constexpr ByteIndices low_bytes_in_turn() {
  ByteIndices indices{};
  for (int i = 0; i < 32; ++i) indices.from[i] = static_cast<uint8_t>(4 * (i / 2) + 64 * (i % 2));
  return indices;
}
// Byte 1 of each word of two vectors.
constexpr ByteIndices high_byte_of_each_word() {
  ByteIndices indices{};
  for (int i = 0; i < 64; ++i) indices.from[i] = static_cast<uint8_t>(2 * i + 1);
  return indices;
}
constexpr ByteIndices kLowestBytes = byte_of_each_dword(0), kHighestBytes = byte_of_each_dword(3),
                      kHighBytes = high_byte_of_each_word();
constexpr ByteIndices kLowBytesInTurn = low_bytes_in_turn();

FP8_TARGET FP8_INLINE __m512i constant(const ByteIndices& indices) { return _mm512_load_si512(indices.from); }

// 64 values as four vectors of FP32, and their signs and NaNs for the last step.
struct Values {
  __m512 part[4];
  const ByteIndices* order;  // of the 32 values of two parts
  __m512i signs;             // bit 7 of each byte
  __mmask64 nans;
};

FP8_TARGET FP8_INLINE __mmask64 join(__mmask32 low, __mmask32 high) { return _mm512_kunpackd(high, low); }

// A byte of each dword of four vectors.
FP8_TARGET FP8_INLINE __m512i bytes(const __m512i* v, const ByteIndices& indices) {
  const __m512i index = constant(indices);
  const __m512i low = _mm512_permutex2var_epi8(v[0], index, v[1]),
                high = _mm512_permutex2var_epi8(v[2], index, v[3]);
  return _mm512_inserti64x4(low, _mm512_castsi512_si256(high), 1);
}

FP8_TARGET FP8_INLINE Values values(const float* x) {
  Values v;
  __m512i bits[4];
  __mmask16 nan[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    v.part[i] = _mm512_loadu_ps(x + 16 * i);
    bits[i] = _mm512_castps_si512(v.part[i]);
    nan[i] = _mm512_cmp_ps_mask(v.part[i], v.part[i], _CMP_UNORD_Q);
  }
  v.order = &kLowestBytes;
  v.signs = bytes(bits, kHighestBytes);
  v.nans = join(_mm512_kunpackw(nan[1], nan[0]), _mm512_kunpackw(nan[3], nan[2]));
  return v;
}

// Two parts of 32 values: of BF16 those at even and at odd places, which a shift and a mask convert to FP32.
FP8_TARGET FP8_INLINE void widen(__m512i words, BF16, __m512* part) {
  part[0] = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
  part[1] = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
FP8_TARGET FP8_INLINE void widen(__m512i words, F16, __m512* part) {
  part[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(words));
  part[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1));
}
constexpr const ByteIndices* order(BF16) { return &kLowBytesInTurn; }
constexpr const ByteIndices* order(F16) { return &kLowestBytes; }
constexpr short infinity(BF16) { return 0x7f80; }
constexpr short infinity(F16) { return 0x7c00; }

template <class T>
FP8_TARGET FP8_INLINE Values values(const T* x) {
  Values v;
  const __m512i low = _mm512_loadu_si512(x), high = _mm512_loadu_si512(x + 32);
  widen(low, T{}, v.part);
  widen(high, T{}, v.part + 2);
  v.order = order(T{});
  const __m512i mask = _mm512_set1_epi16(0x7fff), limit = _mm512_set1_epi16(infinity(T{}));
  v.signs = _mm512_permutex2var_epi8(low, constant(kHighBytes), high);
  v.nans = join(_mm512_cmpgt_epi16_mask(_mm512_and_si512(low, mask), limit),
                _mm512_cmpgt_epi16_mask(_mm512_and_si512(high, mask), limit));
  return v;
}

// `low` scales the first 32 values, `high` the others.
template <class F>
FP8_TARGET FP8_INLINE __m512i encode64(const Values& v, __m512 low, __m512 high) {
  const __m512i* table = reinterpret_cast<const __m512i*>(kMagic<F>.bits);
  const __m512i least = _mm512_set1_epi32(F::min_normal >> 23);
  const __m512 limit = _mm512_set1_ps(F::max());
  __m512i sums[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 mag =
        _mm512_range_ps(_mm512_mul_ps(v.part[i], i < 2 ? low : high), limit, 0x0a);  // min(|p|, max)
    const __m512i exponent = _mm512_max_epi32(_mm512_srli_epi32(_mm512_castps_si512(mag), 23), least);
    const __m512i magic = _mm512_permutex2var_epi32(table[0], exponent, table[1]);
    sums[i] = _mm512_castps_si512(_mm512_add_ps(mag, _mm512_castsi512_ps(magic)));
  }
  const __m512i q = _mm512_mask_mov_epi8(bytes(sums, *v.order), v.nans, _mm512_set1_epi8(0x7f));
  return _mm512_ternarylogic_epi32(q, v.signs, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
}

template <class F, class T>
FP8_TARGET void cast(const T* x, uint8_t* q, int64_t n, float scale) {
  const __m512 factor = _mm512_set1_ps(scale);
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) _mm512_storeu_si512(q + i, encode64<F>(values(x + i), factor, factor));
  if (i == n) return;
  T tail[64] = {};
  std::memcpy(tail, x + i, static_cast<size_t>(n - i) * sizeof(T));
  _mm512_mask_storeu_epi8(q + i, (1ull << (n - i)) - 1, encode64<F>(values(tail), factor, factor));
}

template <class F, class T>
FP8_TARGET void cast_pairs(const T* x, uint8_t* q, int64_t n, const float* scales) {
  for (int64_t i = 0; i + 64 <= n; i += 64) {
    const __m512 low = _mm512_set1_ps(scales[i / 32]), high = _mm512_set1_ps(scales[i / 32 + 1]);
    _mm512_storeu_si512(q + i, encode64<F>(values(x + i), low, high));
  }
}

}  // namespace

template <class F, class T>
void cast_row_vbmi(const T* x, uint8_t* q, int64_t n, float scale) {
  cast<F>(x, q, n, scale);
}

template <class F, class T>
void cast_blocks_vbmi(const T* x, uint8_t* q, int64_t n, const float* scales) {
  cast_pairs<F>(x, q, n, scales);
}

#define FP8_INSTANTIATE(F)                                                          \
  template void cast_row_vbmi<F>(const float*, uint8_t*, int64_t, float);           \
  template void cast_row_vbmi<F>(const BF16*, uint8_t*, int64_t, float);            \
  template void cast_row_vbmi<F>(const F16*, uint8_t*, int64_t, float);             \
  template void cast_blocks_vbmi<F>(const float*, uint8_t*, int64_t, const float*); \
  template void cast_blocks_vbmi<F>(const BF16*, uint8_t*, int64_t, const float*);  \
  template void cast_blocks_vbmi<F>(const F16*, uint8_t*, int64_t, const float*);
FP8_INSTANTIATE(E4M3)
FP8_INSTANTIATE(E5M2)

}  // namespace fp8serve
#endif
