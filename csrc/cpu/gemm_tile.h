// The tile of gemm.h in terms of a level's vectors. No include guard: included once per level, in its
// namespace, which defines:
//   FP8_TARGET              the level's target attribute
//   Element                 of a panel
//   Vector                  4 columns x 4 lanes of FP32 sums
//   kSteps                  vectors of `b` that make a run of four columns: 1 for 16 bits, 2 for FP32
//   kTileRows               rows whose sums fit the registers ...
//   kVectors<R>             ... with this many vectors of columns
//   load_a(p) broadcasts a row's step, load_b(p), multiply_add(sums, a, b), reduce(vectors[4]) to Sums,
// and the definitions that gemm_sum.h needs.
#include "cpu/gemm_sum.h"

constexpr int kStepA = 8 / kSteps, kStepB = 32 / kSteps;  // elements of a step: of a row, of four columns

// Adds one run to R rows of C vectors of columns, the first of which is at `b`.
template <int R, int C>
FP8_TARGET FP8_INLINE void multiply_run(Vector (&sums)[R * C], const Element* a, int64_t a_stride,
                                        const Element* b) {
#pragma GCC unroll 2
  for (int s = 0; s < kSteps; ++s) {
    Operand y[C];
#pragma GCC unroll 4
    for (int i = 0; i < C; ++i) y[i] = load_b(b + (s * 4 + i) * kStepB);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Operand x = load_a(a + r * a_stride + s * kStepA);
#pragma GCC unroll 4
      for (int i = 0; i < C; ++i) sums[r * C + i] = multiply_add(sums[r * C + i], x, y[i]);
    }
  }
}

// Adds up the four lanes of the sums of R rows from `row` on, and finishes these sums.
template <int R>
FP8_TARGET FP8_INLINE void finish_rows(const Vector (&sums)[R * 4], const Tile& t, int row) {
  Sums row_sums[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
    row_sums[r] = reduce({sums[r * 4], sums[r * 4 + 1], sums[r * 4 + 2], sums[r * 4 + 3]});
  finish_sums<R>(row_sums, t, row);
}

// Adds a run, and prefetches a piece of the next R rows, which may not be in a cache.
template <int R, int C>
struct PanelAdd {
  static constexpr int64_t kStep = kRun, kBytes = R * kRun * static_cast<int64_t>(sizeof(Element)) * C / 4;
  const Element *a, *b;
  int64_t a_stride;
  int first = 0;
  FP8_TARGET FP8_INLINE void operator()(Vector (&sums)[R * C], int64_t k, int64_t) const {
    const char* next_rows = reinterpret_cast<const char*>(a + R * a_stride + k * R) + first / C * kBytes;
#pragma GCC unroll 4
    for (int64_t i = 0; i < kBytes; i += 64) __builtin_prefetch(next_rows + i, 0, 2);
    multiply_run<R, C>(sums, a + k, a_stride, b + k * kGroup + first * kStepB);
  }
};

template <int R, bool scaled>
FP8_TARGET void panel_rows(const Tile& t, int row) {
  const Element* a = static_cast<const Element*>(t.a) + row * t.a_stride;
  Vector sums[R * 4];
  sum_columns<R, kVectors<R>, scaled>(
      sums, t, row, PanelAdd<R, kVectors<R>>{a, static_cast<const Element*>(t.b), t.a_stride});
  finish_rows<R>(sums, t, row);
}

template <int R>
FP8_INLINE void rows_from(const Tile& t, int row) {
  t.scale == nullptr ? panel_rows<R, false>(t, row) : panel_rows<R, true>(t, row);
}

FP8_TARGET void tile(const Tile& t) {
  if constexpr (kTileRows == kMaxRows) {
    if (t.rows == 6) return rows_from<6>(t, 0);
    if (t.rows == 5) return rows_from<5>(t, 0);
    if (t.rows == 4) return rows_from<4>(t, 0);
    if (t.rows == 3) return rows_from<3>(t, 0);
    if (t.rows == 2) return rows_from<2>(t, 0);
  }
  for (int row = 0; row < t.rows; ++row) rows_from<1>(t, row);
}
