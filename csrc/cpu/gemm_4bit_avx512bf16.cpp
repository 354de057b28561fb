// Packed weights in 4 bits (gemm_4bit.h) for AVX-512 BF16 + VBMI: up to eight rows straight from the stream,
// more over a panel.
//
// A register of 64 bytes has a run of 8 codes of 16 columns. Shifted by 0, 4, 8 and 12 bits, each of its
// words begins with another code, which `vpermw` looks up: four vectors of 16 columns x 2 values, which are
// one lane of the sum (gemm.h) each. So a scale is the same for both words of a column, in all vectors of
// its block. A vector costs a shift, a lookup, an `and` (NVFP4), a subtraction and the dot product.
// Scales that multiply the sums of a block instead would need neither `and` nor subtraction, and be 1.3 times
// as fast for one row, but that is another order of sums. A mask of the codes that are not zero in place of
// the saturating subtraction is slower, as are FP32 vectors.
#include "cpu/features.h"
#include "cpu/gemm.h"
#include "cpu/gemm_4bit.h"

#if FP8_X86
#include <immintrin.h>

#include "cpu/gemm_pairs.h"

namespace fp8serve::gemm::fourbit_avx512bf16 {
namespace {

#define FP8_TARGET FP8_TARGET_AVX512BF16

using Vector = __m512;  // a lane of 16 columns

FP8_TARGET FP8_INLINE Vector scales_of(float a_scale, const float* b_scale, int) {
  return _mm512_mul_ps(_mm512_set1_ps(a_scale), _mm512_loadu_ps(b_scale));
}

#include "cpu/gemm_sum.h"

constexpr int kCodes = 16;
constexpr int kTop = 9;               // distances of NVFP4 are from 2^9
constexpr uint16_t kStepBits = 0x7f;  // of a looked-up code: kept where it is 1.5 times a power of two

// The BF16 bits of 16 codes, twice because `vpermw` reads five bits; -0.0, the lowest number, for zeros. For
// NVFP4 they are multiplied by 2^9, and the mantissa of 1.5 is all ones.
template <Kind kind>
struct alignas(64) CodeTable {
  uint16_t bits[2 * kCodes];
  constexpr CodeTable() : bits() {
    for (int i = 0; i < 2 * kCodes; ++i) {
      const int magnitude = i % 8, exponent = magnitude == 1 ? -1 : magnitude / 2 - 1;
      const bool is_odd = magnitude > 1 && magnitude % 2 == 1;
      const int top = kind == Kind::nvfp4 ? kTop : 0, mantissa = kind == Kind::nvfp4 ? kStepBits : 0x40;
      const int value = magnitude == 0 ? 0 : ((127 + top + exponent) << 7) | (is_odd ? mantissa : 0);
      bits[i] = static_cast<uint16_t>(value | (magnitude == 0 || i % kCodes >= 8 ? 0x8000 : 0));
    }
  }
};
template <Kind kind>
constexpr CodeTable<kind> kCodeTable{};

// What is kept of a looked-up code, by the low bits of the distance: sign, exponent and the step from the
// bits of a scale s to those of 1.5 s.
struct alignas(64) StepTable {
  uint16_t mask[32];
  constexpr StepTable() : mask() {
    for (int i = 0; i < 32; ++i) {
      const float scale = 1.0f + static_cast<float>((8 - i % 8) % 8) / 8;
      const uint32_t step = std::bit_cast<uint32_t>(1.5f * scale) - std::bit_cast<uint32_t>(scale);
      mask[i] = static_cast<uint16_t>(0xff80 | step >> 16);
    }
  }
};
constexpr StepTable kStepTable{};

// The byte of each 32 bits of a vector, twice: the distance of a column in both words.
struct alignas(64) WordBytes {
  uint8_t place[64];
  constexpr WordBytes() : place() {
    for (int i = 0; i < 64; ++i) place[i] = static_cast<uint8_t>(i % 2 == 0 ? i / 4 : 0x80);
  }
};
constexpr WordBytes kWordBytes{};

FP8_TARGET FP8_INLINE __m512i load_distances(const uint8_t* distances) {
  const __m512i columns =
      _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(distances)));
  return _mm512_shuffle_epi8(columns, _mm512_load_si512(kWordBytes.place));
}

template <Kind kind>
struct Scales;  // of a block, for 16 columns

template <>
struct Scales<Kind::nvfp4> {
  __m512i mask, subtrahend;
  FP8_TARGET FP8_INLINE explicit Scales(const uint8_t* distances) {
    const __m512i words = load_distances(distances);
    mask = _mm512_permutexvar_epi16(words, _mm512_load_si512(kStepTable.mask));
    subtrahend = _mm512_slli_epi16(words, 4);
  }
  FP8_TARGET FP8_INLINE __m512i widen(__m512i code) const {
    return _mm512_subs_epi16(_mm512_and_si512(code, mask), subtrahend);
  }
};
template <>
struct Scales<Kind::mxfp4> {
  __m512i subtrahend;
  FP8_TARGET FP8_INLINE explicit Scales(const uint8_t* distances) {
    subtrahend = _mm512_slli_epi16(load_distances(distances), 7);
  }
  FP8_TARGET FP8_INLINE __m512i widen(__m512i code) const { return _mm512_subs_epi16(code, subtrahend); }
};

// Lane `lane` of a run: the looked-up codes 2 * lane and 2 * lane + 1 of 16 columns.
FP8_TARGET FP8_INLINE __m512i look_up(__m512i table, __m512i run, int lane) {
  return _mm512_permutexvar_epi16(lane == 0 ? run : _mm512_srli_epi16(run, static_cast<unsigned>(4 * lane)),
                                  table);
}

// Adds a block to R rows: lanes `first` to `first` + L - 1 of each of its runs.
template <int R, int L, Kind kind, class Multiply>
struct BlockAdd {
  static constexpr int64_t kStep = block_of(kind), kAhead = 8 * 1024, kRunBytes = kGroup * kRun / 2;
  const typename Multiply::Element* a;
  int64_t a_stride;
  const char* b;
  const uint8_t* distances;
  int first;
  __m512i table = _mm512_load_si512(kCodeTable<kind>.bits);
  FP8_TARGET FP8_INLINE void operator()(Vector (&sums)[R * L], int64_t block, int64_t) const {
    const uint8_t* block_distances = distances + block / kStep * kGroup;
    const Scales<kind> scales(block_distances);
    _mm_prefetch(block_distances + kAhead / 8, _MM_HINT_T1);
#pragma GCC unroll 4
    for (int64_t k = block; k < block + kStep; k += kRun) {
      const char* p = b + k / kRun * kRunBytes;
      _mm_prefetch(p + kAhead, _MM_HINT_T1);
      const __m512i run = _mm512_loadu_si512(p);
#pragma GCC unroll 4
      for (int l = 0; l < L; ++l) {
        const typename Multiply::Weights y(scales.widen(look_up(table, run, first + l)));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const typename Multiply::template Inputs<1> x(a + r * a_stride + k, first + l);
          sums[r * L + l] = x.add_product(sums[r * L + l], y);
        }
      }
    }
  }
};

template <int R, int L, Kind kind, class Multiply, int first>
FP8_TARGET FP8_INLINE void sum_lanes(Vector* all, const Tile& t) {
  const BlockAdd<R, L, kind, Multiply> add{static_cast<const typename Multiply::Element*>(t.a), t.a_stride,
                                           static_cast<const char*>(t.b), t.distances, first};
  Vector sums[R * L];
  sum_over_k<R, L, false>(sums, t, 0, first, add);
#pragma GCC unroll 32
  for (int i = 0; i < R * L; ++i) all[i / L * 4 + first + i % L] = sums[i];
}

// The columns of which a block has a scale that is NaN. In NVFP4 a distance says so, in MXFP4 the row's
// scale.
template <Kind kind>
FP8_TARGET FP8_INLINE __mmask16 nan_columns(const uint8_t* distances, int64_t k) {
  if constexpr (kind == Kind::mxfp4) return 0;
  const __m512i nan = _mm512_set1_epi8(static_cast<char>(kNanDistance));
  const int64_t bytes = k / block_of(kind) * kGroup;
  __mmask64 nans = 0;
  for (int64_t i = 0; i < bytes; i += 64) {
    const __mmask64 rest = bytes - i < 64 ? (__mmask64{1} << (bytes - i)) - 1 : ~__mmask64{0};
    nans |= _mm512_cmpeq_epi8_mask(_mm512_maskz_loadu_epi8(rest, distances + i), nan);
  }
  nans |= nans >> 32;
  return static_cast<__mmask16>(nans | nans >> 16);
}

template <int R, Kind kind, class Multiply>
FP8_TARGET __attribute__((noinline)) void sum_rows(const Tile& t, Vector* sums) {
  if constexpr (R <= 4) {
    sum_lanes<R, 4, kind, Multiply, 0>(sums, t);
  } else {
    sum_lanes<R, 2, kind, Multiply, 0>(sums, t);
    sum_lanes<R, 2, kind, Multiply, 2>(sums, t);
  }
}

template <int R, Kind kind, class Multiply>
FP8_TARGET void stream_rows(const Tile& t) {
  Vector sums[R * 4];
  {
    const typename Multiply::Mode mode;
    sum_rows<R, kind, Multiply>(t, sums);
  }
  const __mmask16 nan = nan_columns<kind>(t.distances, t.k);
  Sums row_sums[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const Vector* v = sums + r * 4;
    const Sums sum = _mm512_add_ps(_mm512_add_ps(v[0], v[2]), _mm512_add_ps(v[1], v[3]));
    row_sums[r] = _mm512_mask_mov_ps(sum, nan, _mm512_set1_ps(std::bit_cast<float>(0x7fc00000)));
  }
  finish_sums<R>(row_sums, t, 0);
}

template <Kind kind, class Multiply>
void stream_as(const Tile& t) {
  static constexpr void (*rows[])(const Tile&) = {
      stream_rows<1, kind, Multiply>, stream_rows<2, kind, Multiply>, stream_rows<3, kind, Multiply>,
      stream_rows<4, kind, Multiply>, stream_rows<5, kind, Multiply>, stream_rows<6, kind, Multiply>,
      stream_rows<7, kind, Multiply>, stream_rows<8, kind, Multiply>};
  rows[t.rows - 1](t);
}

// A run as the panel has it (gemm.h): four lanes of 16 columns -> four columns of 8 values, four times.
FP8_TARGET FP8_INLINE void store_run(const __m512i (&lanes)[4], uint16_t* panel) {
  const __m512i low = _mm512_unpacklo_epi32(lanes[0], lanes[1]),
                high = _mm512_unpackhi_epi32(lanes[0], lanes[1]);
  const __m512i low_end = _mm512_unpacklo_epi32(lanes[2], lanes[3]),
                high_end = _mm512_unpackhi_epi32(lanes[2], lanes[3]);
  _mm512_storeu_si512(panel, _mm512_unpacklo_epi64(low, low_end));
  _mm512_storeu_si512(panel + 32, _mm512_unpackhi_epi64(low, low_end));
  _mm512_storeu_si512(panel + 64, _mm512_unpacklo_epi64(high, high_end));
  _mm512_storeu_si512(panel + 96, _mm512_unpackhi_epi64(high, high_end));
}

template <Kind kind>
FP8_TARGET void unpack_as(const char* block, const uint8_t* distances, int64_t begin, int64_t end,
                          uint16_t* panel) {
  const __m512i table = _mm512_load_si512(kCodeTable<kind>.bits);
  for (int64_t k = begin; k < end; k += block_of(kind)) {
    const uint8_t* block_distances = distances + k / block_of(kind) * kGroup;
    const Scales<kind> scales(block_distances);
    [[maybe_unused]] const __mmask32 nan =
        _mm512_cmpeq_epi16_mask(load_distances(block_distances), _mm512_set1_epi16(kNanDistance));
    for (int64_t i = k; i < k + block_of(kind); i += kRun) {
      const __m512i run = _mm512_loadu_si512(block + i * (kGroup / 2));
      __m512i lanes[4];
#pragma GCC unroll 4
      for (int l = 0; l < 4; ++l) {
        lanes[l] = scales.widen(look_up(table, run, l));
        if constexpr (kind == Kind::nvfp4)
          lanes[l] = _mm512_mask_mov_epi16(lanes[l], nan, _mm512_set1_epi16(0x7fc0));
      }
      store_run(lanes, panel + i * kGroup);
    }
  }
}

#undef FP8_TARGET

}  // namespace

template <class Multiply>
void stream(const Tile& tile, Kind kind) {
  kind == Kind::nvfp4 ? stream_as<Kind::nvfp4, Multiply>(tile) : stream_as<Kind::mxfp4, Multiply>(tile);
}
template void stream<Dot>(const Tile&, Kind);
template void stream<Fma>(const Tile&, Kind);

void unpack_columns(const void* block, const uint8_t* distances, int64_t begin, int64_t end, Kind kind,
                    void* panel) {
  const auto* from = static_cast<const char*>(block);
  auto* out = static_cast<uint16_t*>(panel);
  kind == Kind::nvfp4 ? unpack_as<Kind::nvfp4>(from, distances, begin, end, out)
                      : unpack_as<Kind::mxfp4>(from, distances, begin, end, out);
}

}  // namespace fp8serve::gemm::fourbit_avx512bf16
#endif
