// The GEMM level for ARM processors that multiply BF16: BF16 panels.
//
// BFMLALT and BFMLALB add the product of the odd, and of the even, values of two runs to four FP32 lanes with
// one rounding, to nearest: the order of gemm.h, and its bits. BFDOT and BFMMLA, which do more at a time,
// round sums to odd, or a pair before it is added; they would be a numerics class of their own.
#include "cpu/features.h"
#include "cpu/gemm.h"
#include "cpu/gemm_epilogue.h"

#if FP8_NEON
#include <arm_neon.h>

#include "cpu/gemm_neon.h"

namespace fp8serve::gemm {
namespace neonbf16_level {

#define FP8_TARGET FP8_TARGET_NEON_BF16

using Element = uint16_t;
using Operand = Runs;
constexpr int kSteps = 1;
constexpr bool kOnlyFp8 = false;

FP8_TARGET FP8_INLINE Vector multiply_add(Vector sum, const Operand& a, const Operand& b) {
  for (int q = 0; q < 4; ++q) {
    const bfloat16x8_t x = vreinterpretq_bf16_u16(a.run[q]), y = vreinterpretq_bf16_u16(b.run[q]);
    sum.quad[q] = vbfmlalbq_f32(vbfmlaltq_f32(sum.quad[q], x, y), x, y);
  }
  return sum;
}

#include "cpu/gemm_tile.h"

template <class F>
FP8_INLINE void load_fp8(const uint8_t* const* from, Runs (&runs)[2]) {
  load_as_bf16<F>(from, runs);
}
template <int S>
FP8_INLINE Runs step(const Runs& x) {
  return x;
}

#include "cpu/gemm_unpack.h"

#undef FP8_TARGET

}  // namespace neonbf16_level

const Level& neonbf16() {
  using namespace neonbf16_level;
  static constexpr Level level{{"neonbf16", kNeonBf16, Numerics::four_lanes},
                               sizeof(Element),
                               unpack_row,
                               unpack_columns,
                               tile,
                               stream,
                               kStreamRows};
  return level;
}

}  // namespace fp8serve::gemm

#endif
