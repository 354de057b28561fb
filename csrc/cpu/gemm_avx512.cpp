// The GEMM level for AVX-512 without the BF16 dot product: FP32 panels, one register of 16 lanes, 16 sums at
// a time.
#include "cpu/gemm.h"
#include "cpu/isa.h"

#if FP8_X86
#include <immintrin.h>

#include "cpu/gemm_fp32.h"
#include "cpu/gemm_reduce.h"

namespace fp8serve::gemm {
namespace avx512_level {

#define FP8_TARGET FP8_TARGET_AVX512

using Element = float;
using Operand = __m512;
using Lanes = __m512;
constexpr int kSteps = 4, kStep = 16, kOutputs = 16;

FP8_TARGET FP8_INLINE Lanes zero() { return _mm512_setzero_ps(); }
FP8_TARGET FP8_INLINE Operand load(const float* p) { return _mm512_loadu_ps(p); }
FP8_TARGET FP8_INLINE Lanes multiply_add(Lanes sum, Operand a, Operand b) {
  return _mm512_fmadd_ps(a, b, sum);
}
FP8_TARGET FP8_INLINE Lanes promote(Lanes total, Lanes partial, float scale) {
  return _mm512_add_ps(total, _mm512_mul_ps(partial, _mm512_set1_ps(scale)));
}
FP8_TARGET FP8_INLINE void reduce(const Lanes (&v)[16], float* out) { _mm512_storeu_ps(out, reduce16(v)); }

#include "cpu/gemm_tile.h"

FP8_TARGET void unpack(const uint8_t* codes, int64_t k, bool e5m2, void* row) {
  unpack_fp32(codes, k, e5m2, static_cast<float*>(row));
}

#undef FP8_TARGET

}  // namespace avx512_level

const Level& avx512() {
  static constexpr Level level{sizeof(float), avx512_level::unpack, avx512_level::tile, nullptr};
  return level;
}

}  // namespace fp8serve::gemm

#else
namespace fp8serve::gemm {
const Level& avx512() { return portable(); }
}  // namespace fp8serve::gemm
#endif
