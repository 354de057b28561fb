// Sixteen vectors of sixteen lanes -> sixteen sums, by the tree of gemm.h. For the AVX-512 levels.
#pragma once

#include "cpu/isa.h"

#if FP8_X86
#include <immintrin.h>

namespace fp8serve::gemm {

// Lanes (0 + 2, 1 + 3) of each quad of a and b, interleaved.
FP8_TARGET_AVX512 FP8_INLINE __m512 add_halves(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}
// The quad sums of four vectors: [a b c d] in each quad.
FP8_TARGET_AVX512 FP8_INLINE __m512 quads(const __m512* v) {
  const __m512d x = _mm512_castps_pd(add_halves(v[0], v[1])), y = _mm512_castps_pd(add_halves(v[2], v[3]));
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}
// Quads (0 + 2, 1 + 3) of x, then of y.
FP8_TARGET_AVX512 FP8_INLINE __m512 add_quads(__m512 x, __m512 y) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
}
FP8_TARGET_AVX512 FP8_INLINE __m512 reduce16(const __m512* v) {
  const __m512 x = add_quads(quads(v), quads(v + 4)), y = add_quads(quads(v + 8), quads(v + 12));
  return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
}

}  // namespace fp8serve::gemm
#endif
