// The GEMM level for ARM's NEON, which every 64-bit ARM processor has: FP32 panels, a vector in four
// registers.
#include "cpu/features.h"
#include "cpu/gemm.h"
#include "cpu/gemm_epilogue.h"

#if FP8_NEON
#include <arm_neon.h>

#include "cpu/gemm_neon.h"

namespace fp8serve::gemm {
namespace neon_level {

#define FP8_TARGET

using Element = float;
using Operand = Quads;
constexpr int kSteps = 2;
constexpr bool kOnlyFp8 = false;

FP8_INLINE Operand load_a(const float* p) { return same_quad(vld1q_f32(p)); }
FP8_INLINE Operand load_b(const float* p) { return load_sums(p); }
FP8_INLINE Vector multiply_add(Vector sum, const Operand& a, const Operand& b) {
  for (int q = 0; q < 4; ++q) sum.quad[q] = vfmaq_f32(sum.quad[q], a.quad[q], b.quad[q]);
  return sum;
}

#include "cpu/gemm_tile.h"

template <class F>
FP8_INLINE void load_fp8(const uint8_t* const* from, Runs (&runs)[2]) {
  load_as_bf16<F>(from, runs);
}
template <int S>
FP8_INLINE Operand step(const Runs& x) {
  Operand values;
  for (int q = 0; q < 4; ++q) {
    const uint32x4_t pairs = vreinterpretq_u32_u16(x.run[q]);
    values.quad[q] =
        vreinterpretq_f32_u32(S == 0 ? vandq_u32(pairs, vdupq_n_u32(0xffff0000)) : vshlq_n_u32(pairs, 16));
  }
  return values;
}
FP8_INLINE void store(float* p, const Operand& x) { store_sums(p, x); }

#include "cpu/gemm_unpack.h"

#undef FP8_TARGET

}  // namespace neon_level

const Level& neon() {
  using namespace neon_level;
  static constexpr Level level{{"neon", kNeon, Numerics::four_lanes},
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
