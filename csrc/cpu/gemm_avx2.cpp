// The GEMM level for AVX2 + FMA: FP32 panels, 16 lanes in two registers, 2x2 or 1x4 sums at a time.
#include "cpu/gemm.h"
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
using Lanes = Operand;
constexpr int kSteps = 4, kStep = 16, kOutputs = 4;

FP8_TARGET FP8_INLINE Lanes zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
FP8_TARGET FP8_INLINE Operand load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
FP8_TARGET FP8_INLINE Lanes multiply_add(Lanes sum, Operand a, Operand b) {
  return {_mm256_fmadd_ps(a.low, b.low, sum.low), _mm256_fmadd_ps(a.high, b.high, sum.high)};
}
FP8_TARGET FP8_INLINE Lanes promote(Lanes total, Lanes partial, float scale) {
  const __m256 s = _mm256_set1_ps(scale);
  return {_mm256_add_ps(total.low, _mm256_mul_ps(partial.low, s)),
          _mm256_add_ps(total.high, _mm256_mul_ps(partial.high, s))};
}
// Four vectors of two quads each -> their quad sums: [a b c d of the lower quad | of the upper quad].
FP8_TARGET FP8_INLINE __m256 quads(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256d x = _mm256_castps_pd(ab), y = _mm256_castps_pd(cd);
  return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)),
                       _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
}
FP8_TARGET FP8_INLINE void reduce(const Lanes (&v)[4], float* out) {
  const __m256 low = quads(v[0].low, v[1].low, v[2].low, v[3].low);
  const __m256 sum = _mm256_add_ps(low, quads(v[0].high, v[1].high, v[2].high, v[3].high));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1)));
}

#include "cpu/gemm_tile.h"

FP8_TARGET void unpack(const uint8_t* codes, int64_t k, bool e5m2, void* row) {
  unpack_fp32(codes, k, e5m2, static_cast<float*>(row));
}

#undef FP8_TARGET

}  // namespace avx2_level

const Level& avx2() {
  static constexpr Level level{sizeof(float), avx2_level::unpack, avx2_level::tile, nullptr};
  return level;
}

}  // namespace fp8serve::gemm

#else
namespace fp8serve::gemm {
const Level& avx2() { return portable(); }
}  // namespace fp8serve::gemm
#endif
