// The GEMM level for AVX2 + FMA: FP32 panels, a vector in two registers, one row of 16 columns at a time.
#include "cpu/gemm.h"
#include "cpu/gemm_ending.h"
#include "cpu/isa.h"

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
FP8_TARGET FP8_INLINE __m256 scales(float a_scale, const float* b_scale, int i, int half) {
  const __m256 b =
      _mm256_set_m128(_mm_set1_ps(b_scale[8 * half + 4 + i]), _mm_set1_ps(b_scale[8 * half + i]));
  return _mm256_mul_ps(_mm256_set1_ps(a_scale), b);
}
FP8_TARGET FP8_INLINE Vector promote(Vector total, Vector partial, float a_scale, const float* b_scale,
                                     int i) {
  return {_mm256_add_ps(total.low, _mm256_mul_ps(partial.low, scales(a_scale, b_scale, i, 0))),
          _mm256_add_ps(total.high, _mm256_mul_ps(partial.high, scales(a_scale, b_scale, i, 1)))};
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
FP8_TARGET FP8_INLINE void end_rows(const Ending& e, int row, const Sums (&sums)[R]) {
  for (int r = 0; r < R; ++r) {
    float values[kGroup];
    store_sums(values, sums[r]);
    end_row(e, row + r, values);
  }
}

#include "cpu/gemm_tile.h"

#undef FP8_TARGET

}  // namespace avx2_level

const Level& avx2() {
  using namespace avx2_level;
  static constexpr Level level{sizeof(Element), unpack_row_fp32, unpack_columns_fp32, tile, nullptr, 0};
  return level;
}

}  // namespace fp8serve::gemm

#else
namespace fp8serve::gemm {
const Level& avx2() { return portable(); }
}  // namespace fp8serve::gemm
#endif
