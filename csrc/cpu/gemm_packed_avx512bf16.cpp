// Packed weights (gemm_packed.h) for AVX-512 BF16 + VBMI: up to eight rows straight from the stream, more
// over a panel.
//
// A vector is 8 columns x 2 lanes, so that `a` is broadcast 8 bytes at a time, and one broadcast serves both
// vectors of a half run. Up to four rows take both halves of K's runs at once; more, whose sums would not fit
// the registers, take one half after the other, each a stream of its own.
#include "cpu/features.h"
#include "cpu/gemm.h"
#include "cpu/gemm_packed.h"

#if FP8_X86
#include <immintrin.h>

#include <cstring>

#include "cpu/gemm_widen.h"
#include "cpu/gemm_zmm.h"

namespace fp8serve::gemm::packed_avx512bf16 {
namespace {

#define FP8_TARGET FP8_TARGET_AVX512BF16

using Vector = __m512;

// Columns 0, 1 (4, 5; ...) of a vector with an even i, 2 and 3 with an odd one, each in two lanes.
FP8_TARGET FP8_INLINE Vector scales_of(float a_scale, const float* b_scale, int i) {
  const __m512i columns = _mm512_setr_epi32(0, 0, 1, 1, 4, 4, 5, 5, 8, 8, 9, 9, 12, 12, 13, 13);
  const __m512 b = _mm512_permutexvar_ps(_mm512_add_epi32(columns, _mm512_set1_epi32(i % 2 * 2)),
                                         _mm512_loadu_ps(b_scale));
  return _mm512_mul_ps(_mm512_set1_ps(a_scale), b);
}

#include "cpu/gemm_sum.h"

struct Operands {
  __m512i low, high;  // columns 0, 1, 4, 5, ... and 2, 3, 6, 7, ..., four values each
};

template <class F>
struct Fp8Source {
  static constexpr int64_t kBytes = 1;
  Tables table = tables<F>();
  FP8_TARGET FP8_INLINE Operands load(const char* p) const {
    const Pair pair = widen(table, _mm512_loadu_si512(p));
    return {pair.first, pair.second};
  }
};
struct Bf16Source {
  static constexpr int64_t kBytes = 2;
  FP8_TARGET FP8_INLINE Operands load(const char* p) const {
    return {_mm512_loadu_si512(p), _mm512_loadu_si512(p + 64)};
  }
};

FP8_TARGET FP8_INLINE __m512bh broadcast(const uint16_t* a) {
  int64_t four;
  std::memcpy(&four, a, sizeof four);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi64(four));
}

// Adds one run to R rows: H halves of it from half `first` on. Data about 16 KiB ahead is prefetched
// meanwhile, into the second-level cache, because the first is full of `a`.
template <int R, int H, class Source>
struct RunAdd {
  static constexpr int64_t kStep = kRun, kAhead = 16 * 1024;
  const uint16_t* a;
  int64_t a_stride;
  const char* b;
  int64_t half;  // bytes from one half of the block to the other
  int first;
  Source source = {};
  FP8_TARGET FP8_INLINE void operator()(Vector (&sums)[R * H * 2], int64_t k, int64_t) const {
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h) {
      const char* p = b + (first + h) * half + k * (kGroup / 2) * Source::kBytes;
#pragma GCC unroll 2
      for (int line = 0; line < Source::kBytes; ++line) _mm_prefetch(p + kAhead + line * 64, _MM_HINT_T1);
      const Operands y = source.load(p);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512bh x = broadcast(a + r * a_stride + k + (first + h) * kHalfRun);
        Vector* sum = sums + (r * H + h) * 2;
        sum[0] = _mm512_dpbf16_ps(sum[0], x, reinterpret_cast<__m512bh>(y.low));
        sum[1] = _mm512_dpbf16_ps(sum[1], x, reinterpret_cast<__m512bh>(y.high));
      }
    }
  }
};

template <int R, int H, bool scaled, class Source>
FP8_TARGET FP8_INLINE void sum_halves(Vector (&all)[R * 4], const Tile& t, int first) {
  const RunAdd<R, H, Source> add{static_cast<const uint16_t*>(t.a), t.a_stride, static_cast<const char*>(t.b),
                                 t.k * (kGroup / 2) * Source::kBytes, first};
  Vector sums[R * H * 2];
  sum_over_k<R, H * 2, scaled>(sums, t, 0, first * 2, add);
#pragma GCC unroll 32
  for (int i = 0; i < R * H * 2; ++i) all[i / (H * 2) * 4 + first * 2 + i % (H * 2)] = sums[i];
}

// A row's four vectors -> its 16 columns: (lane 0 + lane 2) + (lane 1 + lane 3), as every level adds them.
FP8_TARGET FP8_INLINE Sums reduce(const Vector* v) {
  const __m512 low = _mm512_add_ps(v[0], v[2]), high = _mm512_add_ps(v[1], v[3]);
  return _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x88), _mm512_shuffle_ps(low, high, 0xdd));
}

template <int R, bool scaled, class Source>
FP8_TARGET void stream_rows(const Tile& t) {
  Vector sums[R * 4];
  if constexpr (R <= 4) {
    sum_halves<R, 2, scaled, Source>(sums, t, 0);
  } else {
    sum_halves<R, 1, scaled, Source>(sums, t, 0);
    sum_halves<R, 1, scaled, Source>(sums, t, 1);
  }
  Sums done[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) done[r] = reduce(sums + r * 4);
  finish_sums<R>(done, t, 0);
}

template <bool scaled, class Source>
void stream_as(const Tile& t) {
  static constexpr void (*rows[])(const Tile&) = {
      stream_rows<1, scaled, Source>, stream_rows<2, scaled, Source>, stream_rows<3, scaled, Source>,
      stream_rows<4, scaled, Source>, stream_rows<5, scaled, Source>, stream_rows<6, scaled, Source>,
      stream_rows<7, scaled, Source>, stream_rows<8, scaled, Source>};
  rows[t.rows - 1](t);
}

template <class Source>
void stream_from(const Tile& t) {
  t.scale == nullptr ? stream_as<false, Source>(t) : stream_as<true, Source>(t);
}

// The four vectors of a run as the panel has them (gemm.h): one column of every four, 8 values of each.
FP8_TARGET FP8_INLINE void store_run(uint16_t* panel, const __m512i (&columns)[4]) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) _mm512_storeu_si512(panel + i * 32, columns[i]);
}

template <class F>
FP8_TARGET void unpack_fp8(const char* block, int64_t k, int64_t begin, int64_t end, uint16_t* panel) {
  const Tables t = tables<F>();
  const char* second = block + k * (kGroup / 2);
  for (int64_t i = begin; i < end; i += kRun) {
    const __m512i a = _mm512_loadu_si512(block + i * (kGroup / 2)),
                  b = _mm512_loadu_si512(second + i * (kGroup / 2));
    const Pair even = widen(t, _mm512_unpacklo_epi32(a, b)), odd = widen(t, _mm512_unpackhi_epi32(a, b));
    store_run(panel + i * kGroup, {even.first, even.second, odd.first, odd.second});
  }
}

FP8_TARGET void unpack_values(const char* block, int64_t k, int64_t begin, int64_t end, uint16_t* panel) {
  const char* second = block + k * kGroup;
  for (int64_t i = begin; i < end; i += kRun) {
    const Operands a = Bf16Source{}.load(block + i * kGroup), b = Bf16Source{}.load(second + i * kGroup);
    store_run(panel + i * kGroup,
              {_mm512_unpacklo_epi64(a.low, b.low), _mm512_unpackhi_epi64(a.low, b.low),
               _mm512_unpacklo_epi64(a.high, b.high), _mm512_unpackhi_epi64(a.high, b.high)});
  }
}

#undef FP8_TARGET

}  // namespace

void stream(const Tile& tile, Kind kind) {
  if (kind == Kind::bf16) return stream_as<false, Bf16Source>(tile);
  kind == Kind::e5m2 ? stream_from<Fp8Source<E5M2>>(tile) : stream_from<Fp8Source<E4M3>>(tile);
}

void unpack_columns(const void* block, int64_t k, int64_t begin, int64_t end, Kind kind, void* panel) {
  const auto* from = static_cast<const char*>(block);
  auto* out = static_cast<uint16_t*>(panel);
  if (kind == Kind::bf16) return unpack_values(from, k, begin, end, out);
  kind == Kind::e5m2 ? unpack_fp8<E5M2>(from, k, begin, end, out)
                     : unpack_fp8<E4M3>(from, k, begin, end, out);
}

}  // namespace fp8serve::gemm::packed_avx512bf16
#endif
