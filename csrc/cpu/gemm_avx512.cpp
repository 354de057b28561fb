// The GEMM level for AVX-512 without the BF16 dot product: FP32 panels, four rows of 16 columns at a time.
//
// 32 FP8 values become 32 BF16 in nine instructions, 64 FP32 in four more.
#include "cpu/features.h"
#include "cpu/gemm.h"

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
constexpr int kStreamRows = 2;
constexpr bool kOnlyFp8 = false;

FP8_TARGET FP8_INLINE Operand load_a(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }
FP8_TARGET FP8_INLINE Operand load_b(const float* p) { return _mm512_loadu_ps(p); }
FP8_TARGET FP8_INLINE Vector multiply_add(Vector sum, Operand a, Operand b) {
  return _mm512_fmadd_ps(a, b, sum);
}

#include "cpu/gemm_tile.h"

using Runs = __m512i;  // a run in each 128-bit part

template <class F>
FP8_TARGET FP8_INLINE __m512i widen(__m256i bytes) {
  using Code = Bf16Code<F>;
  const __m512i x = _mm512_cvtepu8_epi16(bytes), magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7f));
  const __m512i normal =
      _mm512_add_epi16(_mm512_slli_epi16(magnitude, Code::shift), _mm512_set1_epi16(Code::bias));
  const __mmask32 special = _mm512_cmplt_epi16_mask(magnitude, _mm512_set1_epi16(Code::first_normal)) |
                            _mm512_cmpgt_epi16_mask(magnitude, _mm512_set1_epi16(Code::last_normal));
  const __m512i value =
      _mm512_mask_permutexvar_epi16(normal, special, magnitude, _mm512_load_si512(kBf16Code<F>.special));
  return _mm512_ternarylogic_epi32(value, _mm512_slli_epi16(x, 8),
                                   _mm512_set1_epi16(static_cast<int16_t>(0x8000)), 0xf8);  // value | sign
}

FP8_TARGET FP8_INLINE __m128i half(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
FP8_TARGET FP8_INLINE __m256i join(__m128i low, __m128i high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}
template <class F>
FP8_TARGET FP8_INLINE void load_fp8(const uint8_t* const* from, Runs (&runs)[2]) {
  const __m256i first = join(half(from[0]), half(from[2])), second = join(half(from[1]), half(from[3]));
  runs[0] = widen<F>(_mm256_unpacklo_epi64(first, second));
  runs[1] = widen<F>(_mm256_unpackhi_epi64(first, second));
}
FP8_TARGET FP8_INLINE void load_values(const uint16_t* const* from, Runs (&runs)[2]) {
#pragma GCC unroll 2
  for (int r = 0; r < 2; ++r) {
    const __m256i low = join(half(from[0] + r * kRun), half(from[1] + r * kRun));
    const __m256i high = join(half(from[2] + r * kRun), half(from[3] + r * kRun));
    runs[r] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
}
template <int S>
FP8_TARGET FP8_INLINE Operand step(Runs x) {
  constexpr auto kUpper = static_cast<int32_t>(0xffff0000);
  return _mm512_castsi512_ps(S == 0 ? _mm512_and_si512(x, _mm512_set1_epi32(kUpper))
                                    : _mm512_slli_epi32(x, 16));
}
FP8_TARGET FP8_INLINE void store(float* p, Operand x) { _mm512_storeu_ps(p, x); }

#include "cpu/gemm_unpack.h"

template <int R>
FP8_TARGET __attribute__((noinline)) void sum_rows(const Tile& t, Vector* out) {
  const auto *a = static_cast<const Element*>(t.a), *b = static_cast<const Element*>(t.b);
  Vector sums[R * 4];  // in registers, unlike `out`
  sum_over_k<R, 4, false>(sums, t, 0, 0, PanelAdd<R, 4>{a, b, t.a_stride});
#pragma GCC unroll 32
  for (int i = 0; i < R * 4; ++i) out[i] = sums[i];
}

template <int R>
FP8_TARGET void flushing_rows(const Tile& t) {
  Vector sums[R * 4];
  {
    const FlushingMode mode;
    sum_rows<R>(t, sums);
  }
  finish_rows<R>(sums, t, 0);
}

#undef FP8_TARGET

}  // namespace avx512_level

void flushing_tile(const Tile& t) {
  using namespace avx512_level;
  static constexpr void (*rows[])(const Tile&) = {flushing_rows<1>, flushing_rows<2>, flushing_rows<3>,
                                                  flushing_rows<4>, flushing_rows<5>, flushing_rows<6>};
  t.scale == nullptr ? rows[t.rows - 1](t) : tile(t);
}

const Level& avx512() {
  using namespace avx512_level;
  static constexpr Level level{{"avx512", kAvx512, Numerics::four_lanes},
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
