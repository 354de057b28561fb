// The GEMM level for AVX-512 BF16 + VBMI: every FP8 value is exact in BF16, so FP8 is a storage format of
// BF16 here.
//
// 64 codes become 64 BF16 in seven instructions: two `vpermi2b` look up the low and the high byte of 64
// magnitudes, a ternary-logic op copies the signs, two byte-unpacks pair low and high bytes up. The unpacks
// leave k in the step order of gemm.h; both operands take the same way, so nothing has to be put back.
// Subnormal codes come out of the table as the normal BF16 numbers they are, hence `vdpbf16ps` treating BF16
// subnormals as zero does not matter.
#include "cpu/gemm.h"
#include "cpu/isa.h"

#if FP8_X86
#include <immintrin.h>

#include "cpu/gemm_reduce.h"
#include "fp8.h"

namespace fp8serve::gemm {
namespace avx512bf16_level {

#define FP8_TARGET FP8_TARGET_AVX512BF16

using Element = uint16_t;
using Operand = __m512i;
using Lanes = __m512;
constexpr int kSteps = 2, kStep = 32, kOutputs = 16;

FP8_TARGET FP8_INLINE Lanes zero() { return _mm512_setzero_ps(); }
FP8_TARGET FP8_INLINE Operand load(const uint16_t* p) { return _mm512_loadu_si512(p); }
FP8_TARGET FP8_INLINE Lanes multiply_add(Lanes sum, Operand a, Operand b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
FP8_TARGET FP8_INLINE Lanes promote(Lanes total, Lanes partial, float scale) {
  return _mm512_add_ps(total, _mm512_mul_ps(partial, _mm512_set1_ps(scale)));
}
FP8_TARGET FP8_INLINE void reduce(const Lanes (&v)[16], float* out) { _mm512_storeu_ps(out, reduce16(v)); }

#include "cpu/gemm_tile.h"

// --- FP8 -> BF16 by table
// -------------------------------------------------------------------------------------

template <class F>
struct alignas(64) ByteTables {
  uint8_t low[128], high[128];
  constexpr ByteTables() : low(), high() {
    for (int i = 0; i < 128; ++i) {
      const auto bits = std::bit_cast<uint32_t>(decode<F>(static_cast<uint8_t>(i)));
      low[i] = static_cast<uint8_t>(bits >> 16);
      high[i] = static_cast<uint8_t>(bits >> 24);
    }
  }
};
template <class F>
constexpr ByteTables<F> kBytes{};

struct Tables {
  __m512i low[2], high[2], sign;
};
struct Chunk {
  __m512i first, second;  // k in step order: steps 0 and 1, steps 2 and 3
};

template <class F>
FP8_TARGET FP8_INLINE Tables tables() {
  const auto* low = reinterpret_cast<const __m512i*>(kBytes<F>.low);
  const auto* high = reinterpret_cast<const __m512i*>(kBytes<F>.high);
  return {{low[0], low[1]}, {high[0], high[1]}, _mm512_set1_epi8(static_cast<char>(0x80))};
}

FP8_TARGET FP8_INLINE Chunk widen(const Tables& t, __m512i codes) {
  const __m512i low = _mm512_permutex2var_epi8(t.low[0], codes, t.low[1]);
  const __m512i magnitude = _mm512_permutex2var_epi8(t.high[0], codes, t.high[1]);
  const __m512i high =
      _mm512_ternarylogic_epi32(magnitude, codes, t.sign, 0xf8);  // magnitude | (codes & sign)
  return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
}

FP8_TARGET FP8_INLINE __m512i load_tail(const uint8_t* codes, int64_t k) {
  return _mm512_maskz_loadu_epi8((1ull << k) - 1, codes);
}

template <class F>
FP8_TARGET void unpack_format(const uint8_t* codes, int64_t k, uint16_t* row) {
  const Tables t = tables<F>();
  int64_t begin = 0;
  for (; begin < k; begin += kChunk) {
    const Chunk c = widen(
        t, k - begin < kChunk ? load_tail(codes + begin, k - begin) : _mm512_loadu_si512(codes + begin));
    _mm512_storeu_si512(row + begin, c.first);
    _mm512_storeu_si512(row + begin + kStep, c.second);
  }
}

void unpack(const uint8_t* codes, int64_t k, bool e5m2, void* row) {
  auto* out = static_cast<uint16_t*>(row);
  e5m2 ? unpack_format<E5M2>(codes, k, out) : unpack_format<E4M3>(codes, k, out);
}

// --- weights read once: converted in registers, never stored
// -------------------------------------------------------

template <int R, int C>
FP8_TARGET FP8_INLINE void stream_chunk(Lanes (&lanes)[R * C], const Tables& t, const uint16_t* a,
                                        int64_t stride, const uint8_t* const* b, int64_t k, int64_t tail) {
  Chunk x[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) x[r] = {load(a + r * stride + k), load(a + r * stride + k + kStep)};
#pragma GCC unroll 16
  for (int c = 0; c < C; ++c) {
    const Chunk y = widen(t, tail != 0 ? load_tail(b[c] + k, tail) : _mm512_loadu_si512(b[c] + k));
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      lanes[r * C + c] =
          multiply_add(multiply_add(lanes[r * C + c], x[r].first, y.first), x[r].second, y.second);
    }
  }
}

template <class F, int R>
FP8_TARGET void stream_rows(const Tile& tile, const uint8_t* const* b, int64_t k) {
  constexpr int C = 16 / R;
  const Tables t = tables<F>();
  const auto* a = static_cast<const uint16_t*>(tile.a);
  Lanes lanes[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) lanes[i] = zero();
  int64_t begin = 0;
  for (; begin + kChunk <= k; begin += kChunk) stream_chunk<R, C>(lanes, t, a, tile.stride, b, begin, 0);
  if (begin < k) stream_chunk<R, C>(lanes, t, a, tile.stride, b, begin, k - begin);
  alignas(64) float fresh[16];
  reduce(lanes, fresh);
  for (int i = 0; i < 16; ++i) {
    float* out = tile.out + i / C * tile.out_stride + i % C;
    *out = tile.add ? *out + fresh[i] : fresh[i];
  }
}

template <class F>
void stream_format(const Tile& tile, const uint8_t* const* b, int64_t k) {
  if (tile.rows == 4) return stream_rows<F, 4>(tile, b, k);
  if (tile.rows == 2) return stream_rows<F, 2>(tile, b, k);
  stream_rows<F, 1>(tile, b, k);
}

void stream(const Tile& tile, const uint8_t* const* b, int64_t k, bool e5m2) {
  e5m2 ? stream_format<E5M2>(tile, b, k) : stream_format<E4M3>(tile, b, k);
}

#undef FP8_TARGET

}  // namespace avx512bf16_level

const Level& avx512bf16() {
  static constexpr Level level{sizeof(uint16_t), avx512bf16_level::unpack, avx512bf16_level::tile,
                               avx512bf16_level::stream};
  return level;
}

}  // namespace fp8serve::gemm

#else
namespace fp8serve::gemm {
const Level& avx512bf16() { return portable(); }
}  // namespace fp8serve::gemm
#endif
