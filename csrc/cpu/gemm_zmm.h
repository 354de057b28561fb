// What the two AVX-512 levels share: a vector is one register of 4 columns x 4 lanes.
#pragma once

#include "cpu/isa.h"

#if FP8_X86
#include <immintrin.h>

namespace fp8serve::gemm {

FP8_TARGET_AVX512 FP8_INLINE __m512 zero() { return _mm512_setzero_ps(); }

FP8_TARGET_AVX512 FP8_INLINE __m512 promote(__m512 total, __m512 partial, float a_scale, const float* b_scale,
                                            int i) {
  const __m512i columns = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
  const __m512 b =
      _mm512_permutexvar_ps(_mm512_add_epi32(columns, _mm512_set1_epi32(i)), _mm512_loadu_ps(b_scale));
  return _mm512_add_ps(total, _mm512_mul_ps(partial, _mm512_mul_ps(_mm512_set1_ps(a_scale), b)));
}

// Lanes (0 + 2, 1 + 3) of each quad of a and b, interleaved.
FP8_TARGET_AVX512 FP8_INLINE __m512 add_halves(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}
// Four vectors -> their 16 columns' sums.
FP8_TARGET_AVX512 FP8_INLINE void reduce(const __m512 (&v)[4], float* out, bool add) {
  const __m512d x = _mm512_castps_pd(add_halves(v[0], v[1])), y = _mm512_castps_pd(add_halves(v[2], v[3]));
  const __m512 sum =
      _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  _mm512_storeu_ps(out, add ? _mm512_add_ps(_mm512_loadu_ps(out), sum) : sum);
}

}  // namespace fp8serve::gemm
#endif
