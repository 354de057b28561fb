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

#include "cpu/gemm_pairs.h"
#include "cpu/gemm_widen.h"
#include "cpu/mx.h"

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

// Adds half h, counted from half `first` on, of a run to R rows.
template <int R, int H, class Multiply>
FP8_TARGET FP8_INLINE void add_half(Vector (&sums)[R * H * 2], const typename Multiply::Element* a,
                                    int64_t a_stride, int first, int h, __m512i low, __m512i high) {
  const typename Multiply::Weights low_weights(low), high_weights(high);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const typename Multiply::template Inputs<2> x(a + r * a_stride, (first + h) * 2);
    Vector* sum = sums + (r * H + h) * 2;
    sum[0] = x.add_product(sum[0], low_weights);
    sum[1] = x.add_product(sum[1], high_weights);
  }
}

// Adds one run to R rows: H halves of it from half `first` on. Data about 16 KiB ahead is prefetched
// meanwhile, into the second-level cache, because the first is full of `a`.
template <int R, int H, class Source, class Multiply>
struct RunAdd {
  static constexpr int64_t kStep = kRun, kAhead = 16 * 1024;
  const typename Multiply::Element* a;
  int64_t a_stride;
  const char* b;
  int64_t half;  // bytes from one half of the block to the other
  int first;
  const uint16_t* shifts;  // null without MX blocks
  Source source = {};
  mutable Operands next[H] = {};  // of the next run, if it is widened ahead
  FP8_TARGET FP8_INLINE void start() const {
    if (!Multiply::kWidensAhead || half == 0) return;
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h) next[h] = source.load(b + (first + h) * half);
  }
  FP8_TARGET FP8_INLINE void operator()(Vector (&sums)[R * H * 2], int64_t k, int64_t) const {
    constexpr int64_t kBytes = kGroup / 2 * Source::kBytes;
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h) {
      const char *begin = b + (first + h) * half, *p = begin + k * kBytes;
#pragma GCC unroll 2
      for (int line = 0; line < Source::kBytes; ++line) _mm_prefetch(p + kAhead + line * 64, _MM_HINT_T1);
      const Operands y = Multiply::kWidensAhead ? next[h] : source.load(p);
      const int64_t after = (k + kRun) * kBytes;
      if (Multiply::kWidensAhead) next[h] = source.load(after < half ? begin + after : begin);
      add_half<R, H, Multiply>(sums, a + k, a_stride, first, h, y.low, y.high);
    }
  }
};

// The column of each word of a vector: of words 8 l to 8 l + 7 it is column 4 l + first, but of the last four
// words the column after it if `two`.
template <int first, bool two>
struct alignas(64) WordColumns {
  uint16_t column[32];
  constexpr WordColumns() : column() {
    for (int w = 0; w < 32; ++w) column[w] = static_cast<uint16_t>(w / 8 * 4 + first + (two ? w % 8 / 4 : 0));
  }
};
template <int first, bool two>
constexpr WordColumns<first, two> kWordColumns{};

// The shifts of 32 values of K for the words of a vector.
template <int first, bool two>
FP8_TARGET FP8_INLINE __m512i order_shifts(const uint16_t* shifts) {
  const __m256i row = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(shifts));
  return _mm512_permutexvar_epi16(_mm512_load_si512(kWordColumns<first, two>.column),
                                  _mm512_castsi256_si512(row));
}

// FP8 in MX blocks.
template <class F>
struct MxSource : Fp8Source<F> {};

template <int R, int H, class F, class Multiply>
struct RunAdd<R, H, MxSource<F>, Multiply> {
  static constexpr int64_t kStep = kMxBlock, kAhead = 16 * 1024;
  const typename Multiply::Element* a;
  int64_t a_stride;
  const char* b;
  int64_t half;
  int first;
  const uint16_t* shifts;
  Fp8Source<F> source = {};
  FP8_TARGET FP8_INLINE void start() const {}
  FP8_TARGET FP8_INLINE void operator()(Vector (&sums)[R * H * 2], int64_t block, int64_t) const {
    const uint16_t* block_shifts = shifts + block / kMxBlock * kGroup;
    const __m512i low = order_shifts<0, true>(block_shifts), high = order_shifts<2, true>(block_shifts);
#pragma GCC unroll 4
    for (int64_t k = block; k < block + kMxBlock; k += kRun) {
#pragma GCC unroll 2
      for (int h = 0; h < H; ++h) {
        const char* p = b + (first + h) * half + k * (kGroup / 2);
        _mm_prefetch(p + kAhead, _MM_HINT_T1);
        const Operands codes = source.load(p);
        add_half<R, H, Multiply>(sums, a + k, a_stride, first, h, lower_exponents(codes.low, low),
                                 lower_exponents(codes.high, high));
      }
    }
  }
};

template <int R, int H, bool scaled, class Source, class Multiply>
FP8_TARGET FP8_INLINE void sum_halves(Vector* all, const Tile& t, int first) {
  const RunAdd<R, H, Source, Multiply> add{static_cast<const typename Multiply::Element*>(t.a),
                                           t.a_stride,
                                           static_cast<const char*>(t.b),
                                           t.k * (kGroup / 2) * Source::kBytes,
                                           first,
                                           t.mx_shifts};
  add.start();
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

template <int R, bool scaled, class Source, class Multiply>
FP8_TARGET __attribute__((noinline)) void sum_rows(const Tile& t, Vector* sums) {
  if constexpr (R <= 4) {
    sum_halves<R, 2, scaled, Source, Multiply>(sums, t, 0);
  } else {
    sum_halves<R, 1, scaled, Source, Multiply>(sums, t, 0);
    sum_halves<R, 1, scaled, Source, Multiply>(sums, t, 1);
  }
}

template <int R, bool scaled, class Source, class Multiply>
FP8_TARGET void stream_rows(const Tile& t) {
  Vector sums[R * 4];
  {
    const std::conditional_t<scaled, AnyMode, typename Multiply::Mode> mode;  // promoted sums are not flushed
    sum_rows<R, scaled, Source, Multiply>(t, sums);
  }
  Sums row_sums[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) row_sums[r] = reduce(sums + r * 4);
  finish_sums<R>(row_sums, t, 0);
}

template <bool scaled, class Source, class Multiply>
void stream_as(const Tile& t) {
  static constexpr void (*rows[])(const Tile&) = {
      stream_rows<1, scaled, Source, Multiply>, stream_rows<2, scaled, Source, Multiply>,
      stream_rows<3, scaled, Source, Multiply>, stream_rows<4, scaled, Source, Multiply>,
      stream_rows<5, scaled, Source, Multiply>, stream_rows<6, scaled, Source, Multiply>,
      stream_rows<7, scaled, Source, Multiply>, stream_rows<8, scaled, Source, Multiply>};
  rows[t.rows - 1](t);
}

template <class Source, class Multiply>
void stream_from(const Tile& t) {
  t.scale == nullptr ? stream_as<false, Source, Multiply>(t) : stream_as<true, Source, Multiply>(t);
}

// The four vectors of a run as the panel has them (gemm.h): one column of every four, 8 values of each.
FP8_TARGET FP8_INLINE void store_run(uint16_t* panel, const __m512i (&columns)[4]) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) _mm512_storeu_si512(panel + i * 32, columns[i]);
}

template <class F, bool mx>
FP8_TARGET void unpack_fp8(const char* block, int64_t k, int64_t begin, int64_t end, const uint16_t* shifts,
                           uint16_t* panel) {
  const Tables t = tables<F>();
  const char* second = block + k * (kGroup / 2);
  for (int64_t i = begin; i < end; i += kRun) {
    const __m512i a = _mm512_loadu_si512(block + i * (kGroup / 2)),
                  b = _mm512_loadu_si512(second + i * (kGroup / 2));
    const Pair even = widen(t, _mm512_unpacklo_epi32(a, b)), odd = widen(t, _mm512_unpackhi_epi32(a, b));
    if constexpr (mx) {
      const uint16_t* block_shifts = shifts + i / kMxBlock * kGroup;
      store_run(panel + i * kGroup, {lower_exponents(even.first, order_shifts<0, false>(block_shifts)),
                                     lower_exponents(even.second, order_shifts<1, false>(block_shifts)),
                                     lower_exponents(odd.first, order_shifts<2, false>(block_shifts)),
                                     lower_exponents(odd.second, order_shifts<3, false>(block_shifts))});
    } else {
      store_run(panel + i * kGroup, {even.first, even.second, odd.first, odd.second});
    }
  }
}

template <class F>
void unpack_as(const char* block, int64_t k, int64_t begin, int64_t end, const uint16_t* shifts,
               uint16_t* panel) {
  shifts == nullptr ? unpack_fp8<F, false>(block, k, begin, end, shifts, panel)
                    : unpack_fp8<F, true>(block, k, begin, end, shifts, panel);
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

// Transposes 16 rows of 16 bytes: interleaves row i with row i + 8, four times.
FP8_TARGET FP8_INLINE void transpose(__m128i (&rows)[16]) {
  for (int step = 0; step < 4; ++step) {
    __m128i transposed[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      transposed[2 * i] = _mm_unpacklo_epi8(rows[i], rows[i + 8]);
      transposed[2 * i + 1] = _mm_unpackhi_epi8(rows[i], rows[i + 8]);
    }
    std::copy_n(transposed, 16, rows);
  }
}

FP8_TARGET void fill_shifts(const uint8_t* codes, int64_t stride, const uint8_t* rows, int64_t blocks,
                            int limit, uint16_t* shifts) {
  const __m256i scales = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows)));
  for (int64_t begin = 0; begin < blocks; begin += 16) {
    const int64_t count = std::min<int64_t>(16, blocks - begin);
    __m128i square[16];
    for (int64_t c = 0; c < 16; ++c)
      square[c] = _mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << count) - 1), codes + c * stride + begin);
    transpose(square);
    for (int64_t i = 0; i < count; ++i) {
      const __m256i below = _mm256_sub_epi16(scales, _mm256_cvtepu8_epi16(square[i]));
      const __mmask16 far = _mm256_cmpgt_epi16_mask(below, _mm256_set1_epi16(static_cast<int16_t>(limit)));
      const __m256i bits = _mm256_mask_mov_epi16(_mm256_slli_epi16(below, 7), far, _mm256_set1_epi16(-1));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(shifts + (begin + i) * kGroup), bits);
    }
  }
}

#undef FP8_TARGET

}  // namespace

void compute_mx_shifts(const uint8_t* codes, int64_t stride, const uint8_t* rows, int64_t blocks, Kind kind,
                       uint16_t* shifts) {
  fill_shifts(codes, stride, rows, blocks, kind == Kind::e5m2 ? kMaxShift<E5M2> : kMaxShift<E4M3>, shifts);
}

template <class Multiply>
void stream(const Tile& tile, Kind kind) {
  if (kind == Kind::bf16) return stream_as<false, Bf16Source, Multiply>(tile);
  if (tile.mx_shifts != nullptr) {
    return kind == Kind::e5m2 ? stream_as<false, MxSource<E5M2>, Multiply>(tile)
                              : stream_as<false, MxSource<E4M3>, Multiply>(tile);
  }
  kind == Kind::e5m2 ? stream_from<Fp8Source<E5M2>, Multiply>(tile)
                     : stream_from<Fp8Source<E4M3>, Multiply>(tile);
}
template void stream<Dot>(const Tile&, Kind);
template void stream<Fma>(const Tile&, Kind);

void unpack_columns(const void* block, int64_t k, int64_t begin, int64_t end, Kind kind,
                    const uint16_t* mx_shifts, void* panel) {
  const auto* from = static_cast<const char*>(block);
  auto* out = static_cast<uint16_t*>(panel);
  if (kind == Kind::bf16) return unpack_values(from, k, begin, end, out);
  kind == Kind::e5m2 ? unpack_as<E5M2>(from, k, begin, end, mx_shifts, out)
                     : unpack_as<E4M3>(from, k, begin, end, mx_shifts, out);
}

}  // namespace fp8serve::gemm::packed_avx512bf16
#endif
