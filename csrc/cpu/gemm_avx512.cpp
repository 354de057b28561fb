// The GEMM level for AVX-512 without the BF16 dot product: FP32 panels, four rows of 16 columns at a time.
#include "cpu/gemm.h"
#include "cpu/isa.h"

#if FP8_X86
#include <immintrin.h>

#include "cpu/gemm_fp32.h"
#include "cpu/gemm_zmm.h"

namespace fp8serve::gemm {
namespace avx512_level {

#define FP8_TARGET FP8_TARGET_AVX512

using Element = float;
using Operand = __m512;
using Vector = __m512;
constexpr int kSteps = 2, kTileRows = kMaxRows;

FP8_TARGET FP8_INLINE Operand load_a(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }
FP8_TARGET FP8_INLINE Operand load_b(const float* p) { return _mm512_loadu_ps(p); }
FP8_TARGET FP8_INLINE Vector multiply_add(Vector sum, Operand a, Operand b) {
  return _mm512_fmadd_ps(a, b, sum);
}

#include "cpu/gemm_tile.h"

#undef FP8_TARGET

}  // namespace avx512_level

const Level& avx512() {
  using namespace avx512_level;
  static constexpr Level level{sizeof(Element), unpack_row_fp32, unpack_columns_fp32, tile, nullptr, 0};
  return level;
}

}  // namespace fp8serve::gemm

#else
namespace fp8serve::gemm {
const Level& avx512() { return portable(); }
}  // namespace fp8serve::gemm
#endif
