// A sum over K in terms of a level's vectors: the loop, the promotion at every 128 of K with block scales,
// and the end of a block of K. No include guard: included once per level, in its namespace, which defines:
//   FP8_TARGET              the level's target attribute
//   Vector                  FP32 sums, some lanes of some columns: zero(), promote(total, partial, scales),
//                           same_scale(scale), and for the i-th vector of 16 columns
//                           scales_of(a_scale, b_scale[16], i)
//   Sums                    of 16 columns: plus(), load_sums(p), store_sums(p, sums),
//                           apply_epilogue_to_rows<R>(epilogue, row, sums[R])

template <int N>
FP8_TARGET FP8_INLINE void zero_all(Vector (&sums)[N]) {
#pragma GCC unroll 32
  for (int i = 0; i < N; ++i) sums[i] = zero();
}

// Adds the scaled sums of 128 of K to the totals and sets the sums to zero.
template <int R, int C>
FP8_TARGET FP8_INLINE void promote_all(Vector (&total)[R * C], Vector (&sums)[R * C], const Tile& t, int row,
                                       int first, int64_t block) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const float scale = t.scale[row + r][block];
    const Vector same = same_scale(scale);
#pragma GCC unroll 4
    for (int i = 0; i < C; ++i) {
      const Vector scales =
          t.b_scale == nullptr ? same : scales_of(scale, t.b_scale + block * kGroup, first + i);
      total[r * C + i] = promote(total[r * C + i], sums[r * C + i], scales);
    }
  }
  zero_all(sums);
}

// Sums over the tile's K for R rows from `row` on and C vectors of columns from `first` on, with or without
// block scales. add(sums, k, left) adds the products of Add::kStep of K, or of the last `left`. Block scales
// do not make it two nested loops: with few rows, starting an inner loop costs as much as promoting its sums.
template <int R, int C, bool scaled, class Add>
FP8_TARGET FP8_INLINE void sum_over_k(Vector (&total)[R * C], const Tile& t, int row, int first,
                                      const Add& add) {
  constexpr int64_t kStep = Add::kStep;
  Vector lanes[R * C];
  Vector(&sums)[R * C] = scaled ? lanes : total;
  zero_all(total);
  zero_all(sums);
  int64_t k = 0;
  for (; k + kStep <= t.k; k += kStep) {
    add(sums, k, kStep);
    if (scaled && (k + kStep) % kScaleBlock == 0)
      promote_all<R, C>(total, sums, t, row, first, k / kScaleBlock);
  }
  if (k < t.k) add(sums, k, t.k - k);
  if (scaled && t.k % kScaleBlock != 0) promote_all<R, C>(total, sums, t, row, first, t.k / kScaleBlock);
}

// The same for all 16 columns, C vectors of columns at a time. An Add has the first of these vectors as
// `first`.
template <int R, int C, bool scaled, class Add>
FP8_TARGET FP8_INLINE void sum_columns(Vector (&all)[R * 4], const Tile& t, int row, Add add) {
  if constexpr (C == 4) {
    sum_over_k<R, C, scaled>(all, t, row, 0, add);
  } else {
    for (; add.first < 4; add.first += C) {
      Vector sums[R * C];
      sum_over_k<R, C, scaled>(sums, t, row, add.first, add);
#pragma GCC unroll 32
      for (int i = 0; i < R * C; ++i) all[i / C * 4 + add.first + i % C] = sums[i];
    }
  }
}

// Adds the sums of earlier blocks of K to those of R rows from `row` on. Stores them in the tile's buffer or,
// at the last block, applies the epilogue.
template <int R>
FP8_TARGET FP8_INLINE void finish_sums(Sums (&sums)[R], const Tile& t, int row) {
  float* out = t.out + row * kGroup;
  if (t.add) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r] = plus(load_sums(out + r * kGroup), sums[r]);
  }
  if (t.epilogue != nullptr) return apply_epilogue_to_rows<R>(*t.epilogue, row, sums);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store_sums(out + r * kGroup, sums[r]);
}
