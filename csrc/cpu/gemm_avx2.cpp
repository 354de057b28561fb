// The GEMM level for AVX2 + FMA: FP32 panels, a vector in two registers, one row of 16 columns at a time.
#include "cpu/features.h"
#include "cpu/gemm.h"
#include "cpu/gemm_epilogue.h"

#if FP8_X86
#include <immintrin.h>

#include "cpu/gemm_fp32.h"

namespace fp8serve::gemm {
namespace avx2_level {

#define FP8_TARGET FP8_TARGET_AVX2

using Element = float;
struct Operand {
  __m256 low, high;
};
using Vector = Operand;
constexpr int kSteps = 2, kTileRows = 1;
template <int R>
constexpr int kVectors = 4;
constexpr int kStreamRows = 2;
constexpr bool kOnlyFp8 = false;

FP8_TARGET FP8_INLINE Vector zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
FP8_TARGET FP8_INLINE Operand load_a(const float* p) {
  const __m256 x = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
  return {x, x};
}
FP8_TARGET FP8_INLINE Operand load_b(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
FP8_TARGET FP8_INLINE Vector multiply_add(Vector sum, Operand a, Operand b) {
  return {_mm256_fmadd_ps(a.low, b.low, sum.low), _mm256_fmadd_ps(a.high, b.high, sum.high)};
}
// Two quads of vector i: columns 8 * half + i and 8 * half + 4 + i.
FP8_TARGET FP8_INLINE __m256 scales_of_half(float a_scale, const float* b_scale, int i, int half) {
  const __m256 b =
      _mm256_set_m128(_mm_set1_ps(b_scale[8 * half + 4 + i]), _mm_set1_ps(b_scale[8 * half + i]));
  return _mm256_mul_ps(_mm256_set1_ps(a_scale), b);
}
FP8_TARGET FP8_INLINE Vector scales_of(float a_scale, const float* b_scale, int i) {
  return {scales_of_half(a_scale, b_scale, i, 0), scales_of_half(a_scale, b_scale, i, 1)};
}
FP8_TARGET FP8_INLINE Vector same_scale(float scale) {
  return {_mm256_set1_ps(scale), _mm256_set1_ps(scale)};
}
FP8_TARGET FP8_INLINE Vector promote(Vector total, Vector partial, Vector scales) {
  return {_mm256_add_ps(total.low, _mm256_mul_ps(partial.low, scales.low)),
          _mm256_add_ps(total.high, _mm256_mul_ps(partial.high, scales.high))};
}
// The sums of four vectors' quads: [a b c d] of the lower quad, then of the upper one.
FP8_TARGET FP8_INLINE __m256 quads(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256d x = _mm256_castps_pd(ab), y = _mm256_castps_pd(cd);
  return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)),
                       _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
}
using Sums = Vector;
FP8_TARGET FP8_INLINE Sums reduce(const Vector (&v)[4]) {
  return {quads(v[0].low, v[1].low, v[2].low, v[3].low), quads(v[0].high, v[1].high, v[2].high, v[3].high)};
}
FP8_TARGET FP8_INLINE Sums plus(Sums a, Sums b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
FP8_TARGET FP8_INLINE Sums load_sums(const float* p) { return load_b(p); }
FP8_TARGET FP8_INLINE void store_sums(float* p, Sums sums) {
  _mm256_storeu_ps(p, sums.low);
  _mm256_storeu_ps(p + 8, sums.high);
}
template <int R>
FP8_TARGET FP8_INLINE void apply_epilogue_to_rows(const Epilogue& e, int row, const Sums (&sums)[R]) {
  for (int r = 0; r < R; ++r) {
    float values[kGroup];
    store_sums(values, sums[r]);
    apply_epilogue(e, row + r, values);
  }
}

#include "cpu/gemm_tile.h"

struct Runs {
  __m256i low, high;  // a run in each 128-bit part
};

template <class F>
FP8_TARGET FP8_INLINE __m256i widen(__m128i values) {
  using Code = Bf16Code<F>;
  const __m256i x = _mm256_cvtepu8_epi16(values), magnitude = _mm256_and_si256(x, _mm256_set1_epi16(0x7f));
  const __m256i normal =
      _mm256_add_epi16(_mm256_slli_epi16(magnitude, Code::shift), _mm256_set1_epi16(Code::bias));
  // the two bytes of entry m are bytes 2 m and 2 m + 1 of the table
  const __m256i entry = _mm256_and_si256(magnitude, _mm256_set1_epi16(7));
  const __m256i bytes =
      _mm256_add_epi16(_mm256_mullo_epi16(entry, _mm256_set1_epi16(0x0202)), _mm256_set1_epi16(0x0100));
  const __m256i table =
      _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kLow<F>.special)));
  const __m256i subnormal = _mm256_cmpgt_epi16(_mm256_set1_epi16(Code::first_normal), magnitude);
  const __m256i above = _mm256_cmpgt_epi16(magnitude, _mm256_set1_epi16(Code::last_normal));
  const __m256i looked_up = _mm256_shuffle_epi8(table, bytes);
  __m256i value;
  if constexpr (F::mantissa == 3) {
    value = _mm256_blendv_epi8(normal, looked_up, subnormal);
    value = _mm256_blendv_epi8(value, _mm256_set1_epi16(Code::nan), above);
  } else {
    value = _mm256_blendv_epi8(normal, looked_up, _mm256_or_si256(subnormal, above));
  }
  const __m256i sign =
      _mm256_and_si256(_mm256_slli_epi16(x, 8), _mm256_set1_epi16(static_cast<int16_t>(0x8000)));
  return _mm256_or_si256(value, sign);
}

template <class F>
FP8_TARGET FP8_INLINE void load_fp8(const uint8_t* const* from, Runs (&runs)[2]) {
  __m128i bytes[4];
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) bytes[q] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from[q]));
  runs[0] = {widen<F>(_mm_unpacklo_epi64(bytes[0], bytes[1])),
             widen<F>(_mm_unpacklo_epi64(bytes[2], bytes[3]))};
  runs[1] = {widen<F>(_mm_unpackhi_epi64(bytes[0], bytes[1])),
             widen<F>(_mm_unpackhi_epi64(bytes[2], bytes[3]))};
}
FP8_TARGET FP8_INLINE __m256i join(const uint16_t* low, const uint16_t* high) {
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(a),
                                 _mm_loadu_si128(reinterpret_cast<const __m128i*>(high)), 1);
}
FP8_TARGET FP8_INLINE void load_values(const uint16_t* const* from, Runs (&runs)[2]) {
#pragma GCC unroll 2
  for (int r = 0; r < 2; ++r) {
    runs[r] = {join(from[0] + r * kRun, from[1] + r * kRun), join(from[2] + r * kRun, from[3] + r * kRun)};
  }
}
FP8_TARGET FP8_INLINE __m256 upper(__m256i x) {
  return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int32_t>(0xffff0000))));
}
FP8_TARGET FP8_INLINE __m256 lower(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
template <int S>
FP8_TARGET FP8_INLINE Operand step(const Runs& x) {
  return S == 0 ? Operand{upper(x.low), upper(x.high)} : Operand{lower(x.low), lower(x.high)};
}
FP8_TARGET FP8_INLINE void store(float* p, const Operand& x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}

#include "cpu/gemm_unpack.h"

#undef FP8_TARGET

}  // namespace avx2_level

const Level& avx2() {
  using namespace avx2_level;
  static constexpr Level level{{"avx2", kAvx2, Numerics::four_lanes},
                               sizeof(Element),
                               unpack_row,
                               unpack_columns,
                               tile,
                               stream,
                               kStreamRows};
  return level;
}

}  // namespace fp8serve::gemm

#endif
