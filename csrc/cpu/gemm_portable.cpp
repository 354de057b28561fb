// The GEMM level without instruction sets: FP32 panels, loops over 16 lanes. The first rung, and the check of
// the rest.
#include <array>

#include "cpu/gemm.h"
#include "cpu/gemm_fp32.h"
#include "fp8.h"

namespace fp8serve::gemm {
namespace portable_level {

#define FP8_TARGET

using Element = float;
struct Operand {
  const float* lanes;
};
struct Lanes {
  float value[16];
};
constexpr int kSteps = 4, kStep = 16, kOutputs = 4;

FP8_INLINE Lanes zero() { return {}; }
FP8_INLINE Operand load(const float* p) { return {p}; }
FP8_INLINE Lanes multiply_add(Lanes sum, Operand a, Operand b) {
  for (int l = 0; l < 16; ++l) sum.value[l] += a.lanes[l] * b.lanes[l];  // exact product: as good as fused
  return sum;
}
FP8_INLINE Lanes promote(Lanes total, const Lanes& partial, float scale) {
  for (int l = 0; l < 16; ++l) total.value[l] += partial.value[l] * scale;
  return total;
}
FP8_INLINE void reduce(const Lanes (&lanes)[4], float* out) {
  for (int i = 0; i < 4; ++i) {
    const float* v = lanes[i].value;
    float quad[4];
    for (int g = 0; g < 4; ++g) quad[g] = (v[4 * g] + v[4 * g + 2]) + (v[4 * g + 1] + v[4 * g + 3]);
    out[i] = (quad[0] + quad[2]) + (quad[1] + quad[3]);
  }
}

#include "cpu/gemm_tile.h"

void unpack(const uint8_t* codes, int64_t k, bool e5m2, void* row) {
  unpack_fp32(codes, k, e5m2, static_cast<float*>(row));
}

#undef FP8_TARGET

}  // namespace portable_level

const Level& portable() {
  static constexpr Level level{sizeof(float), portable_level::unpack, portable_level::tile, nullptr};
  return level;
}

}  // namespace fp8serve::gemm
