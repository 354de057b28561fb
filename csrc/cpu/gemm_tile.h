// The tile of gemm.h in terms of a level's vectors. No include guard: included once per level, in its
// namespace, which defines:
//   FP8_TARGET              the level's target attribute
//   Element                 of a panel
//   Vector                  4 columns x 4 lanes of FP32 sums
//   kSteps                  vectors of `b` that make a run of four columns: 1 for BF16, 2 for FP32
//   kTileRows               rows whose sums fit the registers
//   zero(), load_a(p) broadcasts a row's step, load_b(p), multiply_add(sums, a, b),
//   promote(total, partial, a_scale, b_scale[16], i), reduce(vectors[4], sums[16])

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

template <int R>
FP8_TARGET FP8_INLINE void finish_rows(const Vector (&sums)[R * 4], float* out, bool add) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const Vector row[4] = {sums[r * 4], sums[r * 4 + 1], sums[r * 4 + 2], sums[r * 4 + 3]};
    reduce(row, out + r * kGroup, add);
  }
}

template <int R>
FP8_TARGET void plain_rows(const Tile& t, const Element* a, float* out) {
  const Element* b = static_cast<const Element*>(t.b);
  Vector sums[R * 4];
  zero_all<R>(sums);
  for (int64_t k = 0; k < t.k; k += kRun) run_of<R>(sums, a + k, t.a_stride, b + k * kGroup);
  finish_rows<R>(sums, out, t.add);
}

// Block scales: fresh lanes for every 128 of K, promoted into the total.
template <int R>
FP8_TARGET void scaled_rows(const Tile& t, const Element* a, const float* const* a_scale, float* out) {
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
        total[r * 4 + i] =
            promote(total[r * 4 + i], sums[r * 4 + i], a_scale[r][block], t.b_scale + block * kGroup, i);
      }
    }
  }
  finish_rows<R>(total, out, t.add);
}

template <int R>
FP8_TARGET FP8_INLINE void rows_from(const Tile& t, int row) {
  const Element* a = static_cast<const Element*>(t.a) + row * t.a_stride;
  float* out = t.out + row * kGroup;
  t.a_scale == nullptr ? plain_rows<R>(t, a, out) : scaled_rows<R>(t, a, t.a_scale + row, out);
}

FP8_TARGET void tile(const Tile& t) {
  if constexpr (kTileRows == 4) {
    if (t.rows == 4) return rows_from<4>(t, 0);
    if (t.rows == 3) return rows_from<3>(t, 0);
    if (t.rows == 2) return rows_from<2>(t, 0);
  }
  for (int row = 0; row < t.rows; ++row) rows_from<1>(t, row);
}
