// What the two AVX-512 levels share: a vector is one register of 4 columns x 4 lanes.
#pragma once

#include "cpu/features.h"
#include "cpu/gemm_epilogue.h"

#if FP8_X86
#include <immintrin.h>

namespace fp8serve::gemm {

template <int R>
constexpr int kVectors = 4;

// While it lives, subnormal operands and results are zero, as for `vdpbf16ps`. Arithmetic belongs into a
// function that is not inlined, since a compiler moves it across a change of the mode.
class FlushingMode {
 public:
  FlushingMode() : mode_(_mm_getcsr()) { _mm_setcsr(mode_ | _MM_FLUSH_ZERO_ON | 0x40); }  // 0x40: of operands
  ~FlushingMode() {
    _mm_setcsr(mode_);
    asm volatile("" ::: "memory");
  }
  FlushingMode(const FlushingMode&) = delete;
  FlushingMode& operator=(const FlushingMode&) = delete;

 private:
  unsigned mode_;
};
struct AnyMode {
  ~AnyMode() {}
};

FP8_TARGET_AVX512 FP8_INLINE __m512 zero() { return _mm512_setzero_ps(); }

FP8_TARGET_AVX512 FP8_INLINE __m512 same_scale(float scale) { return _mm512_set1_ps(scale); }
FP8_TARGET_AVX512 FP8_INLINE __m512 scales_of(float a_scale, const float* b_scale, int i) {
  const __m512i columns = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
  const __m512 b =
      _mm512_permutexvar_ps(_mm512_add_epi32(columns, _mm512_set1_epi32(i)), _mm512_loadu_ps(b_scale));
  return _mm512_mul_ps(_mm512_set1_ps(a_scale), b);
}
FP8_TARGET_AVX512 FP8_INLINE __m512 promote(__m512 total, __m512 partial, __m512 scales) {
  return _mm512_add_ps(total, _mm512_mul_ps(partial, scales));
}

// Lanes (0 + 2, 1 + 3) of each quad of a and b, interleaved.
FP8_TARGET_AVX512 FP8_INLINE __m512 add_halves(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}
// Four vectors -> their 16 columns' sums.
using Sums = __m512;
FP8_TARGET_AVX512 FP8_INLINE Sums reduce(const __m512 (&v)[4]) {
  const __m512d x = _mm512_castps_pd(add_halves(v[0], v[1])), y = _mm512_castps_pd(add_halves(v[2], v[3]));
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}
FP8_TARGET_AVX512 FP8_INLINE Sums plus(Sums a, Sums b) { return _mm512_add_ps(a, b); }
FP8_TARGET_AVX512 FP8_INLINE Sums load_sums(const float* p) { return _mm512_loadu_ps(p); }
FP8_TARGET_AVX512 FP8_INLINE void store_sums(float* p, Sums sums) { _mm512_storeu_ps(p, sums); }

// load() and store() of tensors.h for the values of 16 that are in `mask`. rounded16() rounds for store16().
FP8_TARGET_AVX512 FP8_INLINE __m512 load16(const float* p, __mmask16 mask) {
  return _mm512_maskz_loadu_ps(mask, p);
}
FP8_TARGET_AVX512 FP8_INLINE __m512 load16(const BF16* p, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)), 16));
}
FP8_TARGET_AVX512 FP8_INLINE __m512 rounded16(__m512 x, float) { return x; }
FP8_TARGET_AVX512 FP8_INLINE __m512 rounded16(__m512 x, BF16) {
  const __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
  const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), even);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_castsi512_ps(_mm512_mask_mov_epi32(sum, nan, _mm512_set1_epi32(0x7fc00000)));
}
FP8_TARGET_AVX512 FP8_INLINE void store16(float* p, __mmask16 mask, __m512 rounded) {
  _mm512_mask_storeu_ps(p, mask, rounded);
}
FP8_TARGET_AVX512 FP8_INLINE void store16(BF16* p, __mmask16 mask, __m512 rounded) {
  _mm256_mask_storeu_epi16(p, mask,
                           _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(rounded), 16)));
}
// Returns the FP32 values of what rounded16() returned: of BF16 the lower halves are cleared.
FP8_TARGET_AVX512 FP8_INLINE __m512 value16(__m512 rounded, float) { return rounded; }
FP8_TARGET_AVX512 FP8_INLINE __m512 value16(__m512 rounded, BF16) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(rounded), upper));
}

template <class T, int R>
FP8_TARGET_AVX512 FP8_INLINE void apply_epilogue_to_rows_as(const Epilogue& e, int row,
                                                            const Sums (&sums)[R]) {
  const auto mask = static_cast<__mmask16>((1u << e.columns) - 1);
  const __m512 b_scale = _mm512_loadu_ps(e.b_scale), bias = _mm512_loadu_ps(e.bias);
  const float* a_scale = e.a_scale + row;
  __m512 results[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const __m512 scaled = _mm512_mul_ps(_mm512_mul_ps(sums[r], _mm512_set1_ps(a_scale[r])), b_scale);
    results[r] = rounded16(_mm512_add_ps(scaled, bias), T{});
  }
  if (e.residual != nullptr) {
    const T* residual = static_cast<const T*>(e.residual) + row * e.stride;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r, residual += e.stride)
      results[r] = rounded16(_mm512_add_ps(load16(residual, mask), value16(results[r], T{})), T{});
  }
  T* out = static_cast<T*>(e.out) + row * e.stride;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r, out += e.stride) store16(out, mask, results[r]);
}

template <int R>
FP8_TARGET_AVX512 FP8_INLINE void apply_epilogue_to_rows(const Epilogue& e, int row, const Sums (&sums)[R]) {
  if (e.type == ScalarType::BFloat16) return apply_epilogue_to_rows_as<BF16>(e, row, sums);
  if (e.type == ScalarType::Float) return apply_epilogue_to_rows_as<float>(e, row, sums);
  for (int r = 0; r < R; ++r) {
    float values[kGroup];
    store_sums(values, sums[r]);
    apply_epilogue(e, row + r, values);
  }
}

}  // namespace fp8serve::gemm
#endif
