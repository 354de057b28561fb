// The GEMM level for two matrices of FP8 on ARM processors with FMLAL: FP16 panels.
//
// Every FP8 value is exact in FP16, and FP8 becomes FP16 in a third of the instructions that BF16 takes.
// FMLAL and FMLAL2 add the products of the lower, and of the upper, four values of two registers to four FP32
// lanes with one rounding, to nearest. A run has its odd k in the lower half and its even k in the upper one,
// which is the order of gemm.h.
#include "cpu/features.h"
#include "cpu/gemm.h"
#include "cpu/gemm_epilogue.h"

#if FP8_NEON
#include <arm_neon.h>

#include "cpu/gemm_neon.h"

namespace fp8serve::gemm {
namespace neonfhm_level {

#define FP8_TARGET FP8_TARGET_NEON_FHM

using Element = uint16_t;
using Operand = Runs;
constexpr int kSteps = 1;
constexpr bool kOnlyFp8 = true;

FP8_TARGET FP8_INLINE Vector multiply_add(Vector sum, const Operand& a, const Operand& b) {
  for (int q = 0; q < 4; ++q) {
    const float16x8_t x = vreinterpretq_f16_u16(a.run[q]), y = vreinterpretq_f16_u16(b.run[q]);
    sum.quad[q] = vfmlalq_high_f16(vfmlalq_low_f16(sum.quad[q], x, y), x, y);
  }
  return sum;
}

#include "cpu/gemm_tile.h"

template <class F>
FP8_TARGET FP8_INLINE uint16x8_t scale_fp16(uint16x8_t x) {
  if constexpr (kFp16Factor<F> == 1.0f) return x;
  return vreinterpretq_u16_f16(
      vmulq_f16(vreinterpretq_f16_u16(x), vdupq_n_f16(static_cast<float16_t>(kFp16Factor<F>))));
}
template <class F>
FP8_TARGET FP8_INLINE void load_fp8(const uint8_t* const* from, Runs (&runs)[2]) {
  const uint8x16_t order = {1, 3, 5, 7, 0, 2, 4, 6, 9, 11, 13, 15, 8, 10, 12, 14};
  for (int q = 0; q < 4; ++q) {
    const uint16x8x2_t values = to_fp16<F>(vqtbl1q_u8(vld1q_u8(from[q]), order));
    runs[0].run[q] = scale_fp16<F>(values.val[0]);
    runs[1].run[q] = scale_fp16<F>(values.val[1]);
  }
}
template <int S>
FP8_INLINE Runs step(const Runs& x) {
  return x;
}

#include "cpu/gemm_unpack.h"

#undef FP8_TARGET

}  // namespace neonfhm_level

const Level& neonfhm() {
  using namespace neonfhm_level;
  static constexpr Level level{.variant = {"neonfhm", kNeonFhm, Numerics::four_lanes},
                               .element_size = sizeof(Element),
                               .unpack_row = unpack_row,
                               .unpack_columns = unpack_columns,
                               .tile = tile,
                               .stream = stream,
                               .stream_rows = kStreamRows,
                               .only_fp8 = true};
  return level;
}

}  // namespace fp8serve::gemm

#endif
