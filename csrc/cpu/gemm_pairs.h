// How the loops that stream packed weights multiply pairs of BF16: by `vdpbf16ps`, or by two FMAs where the
// processor is slow at it (gemm_fma.cpp). Both add the product of the odd values first, and give the same
// bits.
//
// A run of `a` (gemm.h) is repeated through a vector: `lanes` of its four lanes, from lane `first` on.
#pragma once

#include "cpu/gemm_zmm.h"

#if FP8_X86
#include <cstring>

namespace fp8serve::gemm {

template <int lanes>
FP8_TARGET_AVX512BF16 FP8_INLINE __m512 repeat(const void* from) {
  std::conditional_t<lanes == 2, double, float> values;
  std::memcpy(&values, from, sizeof values);
  if constexpr (lanes == 2) {
    return _mm512_castpd_ps(_mm512_set1_pd(values));
  } else {
    return _mm512_set1_ps(values);
  }
}

struct Dot {
  using Element = uint16_t;  // of `a`
  using Mode = AnyMode;
  static constexpr bool kWidensAhead = false;
  struct Weights {
    __m512bh pairs;
    FP8_TARGET_AVX512BF16 FP8_INLINE explicit Weights(__m512i bits)
        : pairs(reinterpret_cast<__m512bh>(bits)) {}
  };
  template <int lanes>
  struct Inputs {
    __m512bh pairs;
    FP8_TARGET_AVX512BF16 FP8_INLINE Inputs(const uint16_t* run, int first)
        : pairs(reinterpret_cast<__m512bh>(repeat<lanes>(run + 2 * first))) {}
    FP8_TARGET_AVX512BF16 FP8_INLINE __m512 add_product(__m512 sum, const Weights& weights) const {
      return _mm512_dpbf16_ps(sum, pairs, weights.pairs);
    }
  };
};

struct Fma {
  using Element = float;
  using Mode = FlushingMode;
  // A run is widened while the one before it is multiplied. Otherwise the FMAs that wait for it fill the
  // scheduler: 1.08 times the time of eight rows.
  static constexpr bool kWidensAhead = true;
  struct Weights {
    __m512 odd, even;
    FP8_TARGET_AVX512BF16 FP8_INLINE explicit Weights(__m512i bits)
        : odd(_mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000))))),
          even(_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))) {}
  };
  template <int lanes>
  struct Inputs {
    __m512 odd, even;
    FP8_TARGET_AVX512BF16 FP8_INLINE Inputs(const float* run, int first)
        : odd(repeat<lanes>(run + first)), even(repeat<lanes>(run + kRun / 2 + first)) {}
    FP8_TARGET_AVX512BF16 FP8_INLINE __m512 add_product(__m512 sum, const Weights& weights) const {
      return _mm512_fmadd_ps(even, weights.even, _mm512_fmadd_ps(odd, weights.odd, sum));
    }
  };
};

}  // namespace fp8serve::gemm
#endif
