// The portable GEMM level: FP32 panels, loops over 16 lanes. It is the simplest, and the others are checked
// against it.
#include "cpu/gemm.h"
#include "cpu/gemm_epilogue.h"
#include "cpu/gemm_fp32.h"
#include "fp8.h"

namespace fp8serve::gemm {
namespace portable_level {

#define FP8_TARGET

using Element = float;
struct Operand {
  const float* lanes;  // of `a` four, which every column uses; of `b` sixteen
};
struct Vector {
  float value[16];
};
constexpr int kSteps = 2, kTileRows = 1;
template <int R>
constexpr int kVectors = 4;

FP8_INLINE Vector zero() { return {}; }
FP8_INLINE Operand load_a(const float* p) { return {p}; }
FP8_INLINE Operand load_b(const float* p) { return {p}; }
FP8_INLINE Vector multiply_add(Vector sum, Operand a, Operand b) {
  for (int l = 0; l < 16; ++l)
    sum.value[l] += a.lanes[l & 3] * b.lanes[l];  // an exact product: as good as fused
  return sum;
}
FP8_INLINE Vector scales_of(float a_scale, const float* b_scale, int i) {
  Vector scales;
  for (int l = 0; l < 16; ++l) scales.value[l] = a_scale * b_scale[l / 4 * 4 + i];
  return scales;
}
FP8_INLINE Vector same_scale(float scale) {
  Vector scales;
  std::fill_n(scales.value, 16, scale);
  return scales;
}
FP8_INLINE Vector promote(Vector total, const Vector& partial, const Vector& scales) {
  for (int l = 0; l < 16; ++l) total.value[l] += partial.value[l] * scales.value[l];
  return total;
}
using Sums = Vector;
FP8_INLINE Sums reduce(const Vector (&row)[4]) {
  Sums sums;
  for (int c = 0; c < kGroup; ++c) {
    const float* quad = row[c % 4].value + c / 4 * 4;
    sums.value[c] = (quad[0] + quad[2]) + (quad[1] + quad[3]);
  }
  return sums;
}
FP8_INLINE Sums plus(Sums a, const Sums& b) {
  for (int c = 0; c < kGroup; ++c) a.value[c] += b.value[c];
  return a;
}
FP8_INLINE Sums load_sums(const float* p) {
  Sums sums;
  std::copy_n(p, kGroup, sums.value);
  return sums;
}
FP8_INLINE void store_sums(float* p, const Sums& sums) { std::copy_n(sums.value, kGroup, p); }
template <int R>
FP8_INLINE void apply_epilogue_to_rows(const Epilogue& e, int row, const Sums (&sums)[R]) {
  for (int r = 0; r < R; ++r) apply_epilogue(e, row + r, sums[r].value);
}

#include "cpu/gemm_tile.h"

#undef FP8_TARGET

}  // namespace portable_level

const Level& portable() {
  using namespace portable_level;
  static constexpr Level level{{"portable", kPortable, Numerics::four_lanes},
                               sizeof(Element),
                               unpack_row_fp32,
                               unpack_columns_fp32,
                               tile,
                               nullptr,
                               0};
  return level;
}

}  // namespace fp8serve::gemm
