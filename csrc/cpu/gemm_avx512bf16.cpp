// The GEMM level for AVX-512 BF16 + VBMI: every FP8 value is exact in BF16, so FP8 is a storage format of
// BF16 here.
//
// 16 FP8 values of each of four columns are widened as one register (gemm_widen.h): that gives two runs of 8
// of the four columns, in the order of the panel. A 4 x 4 transpose of 128-bit parts makes four such
// registers of 64 values of four columns.
#include "cpu/features.h"
#include "cpu/gemm.h"

#if FP8_X86
#include <immintrin.h>

#include "cpu/gemm_4bit.h"
#include "cpu/gemm_packed.h"
#include "cpu/gemm_pairs.h"
#include "cpu/gemm_widen.h"
#include "cpu/gemm_zmm.h"
#include "fp8.h"

namespace fp8serve::gemm {
namespace avx512bf16_level {

#define FP8_TARGET FP8_TARGET_AVX512BF16

using Element = uint16_t;
using Operand = __m512i;
using Vector = __m512;
constexpr int kSteps = 1, kTileRows = kMaxRows;

FP8_TARGET FP8_INLINE Operand load_a(const uint16_t* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
FP8_TARGET FP8_INLINE Operand load_b(const uint16_t* p) { return _mm512_loadu_si512(p); }
FP8_TARGET FP8_INLINE Vector multiply_add(Vector sum, Operand a, Operand b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

#include "cpu/gemm_tile.h"

// Up to 64 FP8 values, zeros after the end.
FP8_TARGET FP8_INLINE __m512i load_fp8(const uint8_t* bytes, int64_t left) {
  if (left >= kChunk) return _mm512_loadu_si512(bytes);
  return _mm512_maskz_loadu_epi8((1ull << left) - 1, bytes);
}

// The 16-value parts of four columns' 64 values: part[g] holds values 16 g to 16 g + 15 of each.
struct Parts {
  __m512i part[4];
};
FP8_TARGET FP8_INLINE __m512i join(__m256i low, __m256i high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
FP8_TARGET FP8_INLINE __m256i half(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
// `left` FP8 values of columns 0, 4, 8 and 12 of `columns`. Loading halves saves two shuffles of eight.
FP8_TARGET FP8_INLINE Parts load_parts(const uint8_t* const* columns, int64_t k, int64_t left) {
  alignas(64) uint8_t padded[4][kChunk];
  const uint8_t* from[4];
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    from[q] = columns[4 * q] + k;
    if (left < kChunk) {
      _mm512_store_si512(padded[q], load_fp8(from[q], left));
      from[q] = padded[q];
    }
  }
  const __m512i ab_low = join(half(from[0]), half(from[1])),
                ab_high = join(half(from[0] + 32), half(from[1] + 32));
  const __m512i cd_low = join(half(from[2]), half(from[3])),
                cd_high = join(half(from[2] + 32), half(from[3] + 32));
  return {{_mm512_shuffle_i64x2(ab_low, cd_low, 0x88), _mm512_shuffle_i64x2(ab_low, cd_low, 0xdd),
           _mm512_shuffle_i64x2(ab_high, cd_high, 0x88), _mm512_shuffle_i64x2(ab_high, cd_high, 0xdd)}};
}

template <class F>
FP8_TARGET void unpack_row_of(const uint8_t* bytes, int64_t k, uint16_t* row) {
  const Tables t = tables<F>();
  const __m512i runs = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // so that the unpacks keep the order of k
  for (int64_t begin = 0; begin < k; begin += kChunk) {
    const Pair p = widen(t, _mm512_permutexvar_epi64(runs, load_fp8(bytes + begin, k - begin)));
    _mm512_storeu_si512(row + begin, p.first);
    _mm512_storeu_si512(row + begin + 32, p.second);
  }
}

FP8_TARGET FP8_INLINE void unpack_chunk(const Tables& t, const uint8_t* const* bytes, int64_t k, int64_t left,
                                        uint16_t* panel) {
  for (int i = 0; i < 4; ++i) {
    const Parts parts = load_parts(bytes + i, k, left);
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      const Pair p = widen(t, parts.part[g]);
      uint16_t* runs = panel + 16 * g * kGroup + i * 32;
      _mm512_storeu_si512(runs, p.first);
      _mm512_storeu_si512(runs + kRun * kGroup, p.second);
    }
  }
}

template <class F>
FP8_TARGET void unpack_columns_of(const uint8_t* const* bytes, int64_t k, uint16_t* panel) {
  const Tables t = tables<F>();
  int64_t begin = 0;
  for (; begin + kChunk <= k; begin += kChunk) unpack_chunk(t, bytes, begin, kChunk, panel + begin * kGroup);
  if (begin < k) unpack_chunk(t, bytes, begin, k - begin, panel + begin * kGroup);
}

// --- BF16 as it is

// Up to 32 values, zeros after the end.
FP8_TARGET FP8_INLINE __m512i load_values(const uint16_t* p, int64_t left) {
  return left >= 32 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16((1u << left) - 1, p);
}

// 32 values of columns 0, 4, 8 and 12 of `columns`: part[g] is a run of each.
FP8_TARGET FP8_INLINE Parts load_runs(const uint16_t* const* columns, int64_t k, int64_t left) {
  const __m512i a = load_values(columns[0] + k, left), b = load_values(columns[4] + k, left);
  const __m512i c = load_values(columns[8] + k, left), d = load_values(columns[12] + k, left);
  const __m512i ab_low = _mm512_shuffle_i64x2(a, b, 0x44), ab_high = _mm512_shuffle_i64x2(a, b, 0xee);
  const __m512i cd_low = _mm512_shuffle_i64x2(c, d, 0x44), cd_high = _mm512_shuffle_i64x2(c, d, 0xee);
  return {{_mm512_shuffle_i64x2(ab_low, cd_low, 0x88), _mm512_shuffle_i64x2(ab_low, cd_low, 0xdd),
           _mm512_shuffle_i64x2(ab_high, cd_high, 0x88), _mm512_shuffle_i64x2(ab_high, cd_high, 0xdd)}};
}

FP8_TARGET void copy_row(const uint16_t* from, int64_t k, uint16_t* row) {
  for (int64_t begin = 0; begin < k; begin += 32)
    _mm512_storeu_si512(row + begin, load_values(from + begin, k - begin));
}

FP8_TARGET void copy_columns(const uint16_t* const* from, int64_t k, uint16_t* panel) {
  for (int64_t begin = 0; begin < k; begin += 32) {
    for (int i = 0; i < 4; ++i) {
      const Parts runs = load_runs(from + i, begin, k - begin);
#pragma GCC unroll 4
      for (int g = 0; g < 4; ++g)
        _mm512_storeu_si512(panel + (begin + kRun * g) * kGroup + i * 32, runs.part[g]);
    }
  }
}

// --- dispatch by kind

template <class T>
const T* const* as(const void* const* columns) {
  return reinterpret_cast<const T* const*>(columns);
}

void unpack_row(const void* from, int64_t k, Kind kind, void* row) {
  auto* out = static_cast<uint16_t*>(row);
  if (kind == Kind::bf16) return copy_row(static_cast<const uint16_t*>(from), k, out);
  const auto* bytes = static_cast<const uint8_t*>(from);
  kind == Kind::e5m2 ? unpack_row_of<E5M2>(bytes, k, out) : unpack_row_of<E4M3>(bytes, k, out);
}
void unpack_columns(const void* const* from, int64_t k, Kind kind, void* panel) {
  auto* out = static_cast<uint16_t*>(panel);
  if (kind == Kind::bf16) return copy_columns(as<uint16_t>(from), k, out);
  const auto* bytes = as<uint8_t>(from);
  kind == Kind::e5m2 ? unpack_columns_of<E5M2>(bytes, k, out) : unpack_columns_of<E4M3>(bytes, k, out);
}

// --- weights read once: converted in registers, never stored

// A source's load() loads kStep values of columns 0, 4, 8 and 12 of `columns`; its runs() converts a quarter
// of them to kRuns operands, one for each run of 8.
template <class F>
struct Fp8Source {
  using Pointer = const uint8_t*;
  static constexpr int kStep = 64, kRuns = 2;
  Tables table;
  FP8_TARGET FP8_INLINE Fp8Source() : table(tables<F>()) {}
  static FP8_TARGET FP8_INLINE Parts load(const Pointer* columns, int64_t k, int64_t left) {
    return load_parts(columns, k, left);
  }
  FP8_TARGET FP8_INLINE void runs(__m512i quarter, Operand* y) const {
    const Pair p = widen(table, quarter);
    y[0] = p.first;
    y[1] = p.second;
  }
};
struct Bf16Source {
  using Pointer = const uint16_t*;
  static constexpr int kStep = 32, kRuns = 1;
  static FP8_TARGET FP8_INLINE Parts load(const Pointer* columns, int64_t k, int64_t left) {
    return load_runs(columns, k, left);
  }
  FP8_TARGET FP8_INLINE void runs(__m512i quarter, Operand* y) const { y[0] = quarter; }
};

// Prefetches the line at `bytes` of the four columns of each of C vectors, from vector `first` on.
template <int C>
FP8_INLINE void prefetch(const void* const* columns, int first, int64_t bytes) {
#pragma GCC unroll 16
  for (int i = 0; i < 4 * C; ++i) {
    __builtin_prefetch(static_cast<const char*>(columns[i / C * 4 + first + i % C]) + bytes);
  }
}

// Adds C vectors of four columns to R rows. The next columns, `next_first` of `next`, are prefetched
// meanwhile, because the hardware's own prefetching starts again with every 8 columns and at every page. Few
// rows wait for memory, so the prefetches precede the loads; with more rows they follow them.
template <int R, int C, class Source>
struct ColumnsAdd {
  static constexpr int64_t kStep = Source::kStep;
  static constexpr bool kPrefetchFirst = R <= 4;
  const uint16_t* a;
  int64_t a_stride;
  typename Source::Pointer const* b;
  const void* const* next;
  int next_first;
  Source source = {};
  FP8_TARGET FP8_INLINE void operator()(Vector (&sums)[R * C], int64_t k, int64_t left) const {
    if (left == kStep && kPrefetchFirst) prefetch<C>(next, next_first, k / kStep * 64);
    Parts parts[C];
#pragma GCC unroll 4
    for (int i = 0; i < C; ++i) parts[i] = Source::load(b + i, k, left);
    if (left == kStep && !kPrefetchFirst) prefetch<C>(next, next_first, k / kStep * 64);
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      Operand y[C][Source::kRuns];
#pragma GCC unroll 4
      for (int i = 0; i < C; ++i) source.runs(parts[i].part[g], y[i]);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int s = 0; s < Source::kRuns; ++s) {
          const Operand x = load_a(a + r * a_stride + k + (g * Source::kRuns + s) * kRun);
#pragma GCC unroll 4
          for (int i = 0; i < C; ++i) sums[r * C + i] = multiply_add(sums[r * C + i], x, y[i][s]);
        }
      }
    }
  }
};

// Computes the sums of C vectors of four columns over the block and stores them in those of all 16 columns.
template <int R, int C, bool scaled, class Source>
FP8_TARGET FP8_INLINE void stream_columns(Vector (&all)[R * 4], int first, const Tile& t,
                                          typename Source::Pointer const* b, const void* const* next,
                                          int next_first) {
  const ColumnsAdd<R, C, Source> add{static_cast<const uint16_t*>(t.a), t.a_stride, b + first, next,
                                     next_first};
  Vector sums[R * C];
  sum_over_k<R, C, scaled>(sums, t, 0, first, add);
#pragma GCC unroll 32
  for (int i = 0; i < R * C; ++i) all[i / C * 4 + first + i % C] = sums[i];
}

// All 16 columns at once while the sums fit the registers beside the tables, else 8 and 8.
template <int R, bool scaled, class Source>
FP8_TARGET void stream_rows(const Tile& t, typename Source::Pointer const* b, const void* const* next) {
  const auto* here = reinterpret_cast<const void* const*>(b);
  Vector sums[R * 4];
  if constexpr (R <= 3) {
    stream_columns<R, 4, scaled, Source>(sums, 0, t, b, next, 0);
  } else {
    stream_columns<R, 2, scaled, Source>(sums, 0, t, b, here, 2);
    stream_columns<R, 2, scaled, Source>(sums, 2, t, b, next, 0);
  }
  finish_rows<R>(sums, t, 0);
}

template <bool scaled, class Source>
void stream_as(const Tile& t, const void* const* b, const void* const* next) {
  using Rows = void (*)(const Tile&, typename Source::Pointer const*, const void* const*);
  static constexpr Rows rows[] = {stream_rows<1, scaled, Source>, stream_rows<2, scaled, Source>,
                                  stream_rows<3, scaled, Source>, stream_rows<4, scaled, Source>,
                                  stream_rows<5, scaled, Source>, stream_rows<6, scaled, Source>,
                                  stream_rows<7, scaled, Source>, stream_rows<8, scaled, Source>};
  rows[t.rows - 1](t, reinterpret_cast<typename Source::Pointer const*>(b), next);
}

template <class Source>
void stream_from(const Tile& t, const void* const* b, const void* const* next) {
  t.scale == nullptr ? stream_as<false, Source>(t, b, next) : stream_as<true, Source>(t, b, next);
}

void stream(const Tile& t, const void* const* b, const void* const* next, Kind kind) {
  if (kind == Kind::bf16) return stream_as<false, Bf16Source>(t, b, next);
  kind == Kind::e5m2 ? stream_from<Fp8Source<E5M2>>(t, b, next) : stream_from<Fp8Source<E4M3>>(t, b, next);
}

#undef FP8_TARGET

}  // namespace avx512bf16_level

const Level& avx512bf16() {
  using namespace avx512bf16_level;
  static constexpr Level level{{"avx512bf16", kAvx512Bf16, Numerics::four_lanes},
                               sizeof(Element),
                               unpack_row,
                               unpack_columns,
                               tile,
                               stream,
                               kMaxStream,
                               packed_avx512bf16::stream<Dot>,
                               packed_avx512bf16::unpack_columns,
                               64,
                               packed_avx512bf16::compute_mx_shifts,
                               fourbit_avx512bf16::stream<Dot>,
                               fourbit_avx512bf16::unpack_columns,
                               64};
  return level;
}

}  // namespace fp8serve::gemm

#endif
