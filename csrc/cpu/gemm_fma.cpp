// The AVX-512 BF16 level for more rows than it streams, if both operands are FP8 and the processor takes
// longer for a BF16 dot product than for two FMAs (feature::slow_dot): the tiles of the AVX-512 level, which
// add the products in the same order to the same bits. Packed weights become FP32 panels.
//
// A few rows are bound by reading and widening the weights, so they stay with the dot product: as FP32 their
// `a` does not fit the first-level cache beside the weights.
#include "cpu/features.h"
#include "cpu/gemm.h"

#if FP8_X86
#include <immintrin.h>

#include "cpu/gemm_widen.h"

namespace fp8serve::gemm {
namespace {

#define FP8_TARGET FP8_TARGET_AVX512VBMI

// Stores a vector of the panel: the odd k of a run of four columns, and their even k 64 elements after them.
FP8_TARGET FP8_INLINE void store_run(float* panel, __m512i columns) {
  const __m512i odd = _mm512_and_si512(columns, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
  _mm512_storeu_ps(panel, _mm512_castsi512_ps(odd));
  _mm512_storeu_ps(panel + kGroup * kRun / 2, _mm512_castsi512_ps(_mm512_slli_epi32(columns, 16)));
}

template <class F>
FP8_TARGET void unpack_as(const char* block, int64_t k, int64_t begin, int64_t end, float* panel) {
  const Tables t = tables<F>();
  const char* second = block + k * (kGroup / 2);
  for (int64_t i = begin; i < end; i += kRun) {
    const __m512i a = _mm512_loadu_si512(block + i * (kGroup / 2)),
                  b = _mm512_loadu_si512(second + i * (kGroup / 2));
    const Pair even = widen(t, _mm512_unpacklo_epi32(a, b)), odd = widen(t, _mm512_unpackhi_epi32(a, b));
    float* run = panel + i * kGroup;
    store_run(run, even.first);
    store_run(run + 16, even.second);
    store_run(run + 32, odd.first);
    store_run(run + 48, odd.second);
  }
}

#undef FP8_TARGET

void unpack_packed(const void* block, int64_t k, int64_t begin, int64_t end, Kind kind, const uint16_t*,
                   void* panel) {
  const auto* from = static_cast<const char*>(block);
  auto* out = static_cast<float*>(panel);
  kind == Kind::e5m2 ? unpack_as<E5M2>(from, k, begin, end, out) : unpack_as<E4M3>(from, k, begin, end, out);
}

}  // namespace

const Level& fp8_fma() {
  static const Level level = [] {
    Level result = avx512();
    result.variant = avx512bf16().variant;
    result.unpack_packed = unpack_packed;
    return result;
  }();
  return level;
}

}  // namespace fp8serve::gemm

#endif
