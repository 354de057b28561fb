// The tile of gemm.h in terms of a level's vectors. No include guard: included once per level, in its
// namespace, which defines:
//   FP8_TARGET              the level's target attribute
//   Element                 of a panel
//   Vector                  4 columns x 4 lanes of FP32 sums
//   kSteps                  vectors of `b` that make a run of four columns: 1 for BF16, 2 for FP32
//   kTileRows               rows whose sums fit the registers
//   zero(), load_a(p) broadcasts a row's step, load_b(p), multiply_add(sums, a, b),
//   promote(total, partial, a_scale, b_scale[16], i),
//   Sums                    of 16 columns: reduce(vectors[4]), plus(), load_sums(p), store_sums(p, sums),
//                           end_rows<R>(ending, row, sums[R])

constexpr int kStepA = 8 / kSteps, kStepB = 32 / kSteps;  // elements of a step: of a row, of four columns

// One run onto R rows of 16 columns.
template <int R>
FP8_TARGET FP8_INLINE void run_of(Vector (&sums)[R * 4], const Element* a, int64_t a_stride,
                                  const Element* b) {
#pragma GCC unroll 2
  for (int s = 0; s < kSteps; ++s) {
    Operand y[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) y[i] = load_b(b + (s * 4 + i) * kStepB);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Operand x = load_a(a + r * a_stride + s * kStepA);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sums[r * 4 + i] = multiply_add(sums[r * 4 + i], x, y[i]);
    }
  }
}

template <int R>
FP8_TARGET FP8_INLINE void zero_all(Vector (&sums)[R * 4]) {
#pragma GCC unroll 32
  for (int i = 0; i < R * 4; ++i) sums[i] = zero();
}

// The sums of R rows from `row` on: to the tile's buffer, or, at the last block of K, to their end.
template <int R>
FP8_TARGET FP8_INLINE void finish_rows(const Vector (&sums)[R * 4], const Tile& t, int row) {
  Sums done[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
    done[r] = reduce({sums[r * 4], sums[r * 4 + 1], sums[r * 4 + 2], sums[r * 4 + 3]});
  float* out = t.out + row * kGroup;
  if (t.add) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) done[r] = plus(load_sums(out + r * kGroup), done[r]);
  }
  if (t.ending != nullptr) return end_rows<R>(*t.ending, row, done);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store_sums(out + r * kGroup, done[r]);
}

template <int R>
FP8_TARGET void plain_rows(const Tile& t, const Element* a, int row) {
  const Element* b = static_cast<const Element*>(t.b);
  Vector sums[R * 4];
  zero_all<R>(sums);
  for (int64_t k = 0; k < t.k; k += kRun) run_of<R>(sums, a + k, t.a_stride, b + k * kGroup);
  finish_rows<R>(sums, t, row);
}

// Block scales: fresh lanes for every 128 of K, promoted into the total.
template <int R>
FP8_TARGET void scaled_rows(const Tile& t, const Element* a, int row) {
  const Element* b = static_cast<const Element*>(t.b);
  Vector total[R * 4];
  zero_all<R>(total);
  for (int64_t block = 0; block * kScaleBlock < t.k; ++block) {
    const int64_t begin = block * kScaleBlock, end = t.k < begin + kScaleBlock ? t.k : begin + kScaleBlock;
    Vector sums[R * 4];
    zero_all<R>(sums);
    for (int64_t k = begin; k < end; k += kRun) run_of<R>(sums, a + k, t.a_stride, b + k * kGroup);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        total[r * 4 + i] = promote(total[r * 4 + i], sums[r * 4 + i], t.a_scale[row + r][block],
                                   t.b_scale + block * kGroup, i);
      }
    }
  }
  finish_rows<R>(total, t, row);
}

template <int R>
FP8_TARGET FP8_INLINE void rows_from(const Tile& t, int row) {
  const Element* a = static_cast<const Element*>(t.a) + row * t.a_stride;
  t.a_scale == nullptr ? plain_rows<R>(t, a, row) : scaled_rows<R>(t, a, row);
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
