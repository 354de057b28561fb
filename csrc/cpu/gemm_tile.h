// The tile of gemm.h in terms of a level's lanes. Included once per level, inside its namespace, which
// defines:
//   FP8_TARGET        the level's target attribute
//   Element           of a panel
//   Operand, Lanes    what a step loads; 16 FP32 sums
//   kSteps, kStep     loads per chunk, elements per load
//   kOutputs          sums that fit the registers: 16 or 4
//   zero(), load(p), multiply_add(lanes, a, b), promote(total, partial, scale), reduce(lanes[kOutputs], sums)

// One 64-chunk onto R x C sums.
template <int R, int C>
FP8_TARGET FP8_INLINE void chunk(Lanes (&lanes)[R * C], const Element* a, const Element* b, int64_t stride) {
#pragma GCC unroll 4
  for (int s = 0; s < kSteps; ++s) {
    Operand x[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) x[r] = load(a + r * stride + s * kStep);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      const Operand y = load(b + c * stride + s * kStep);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) lanes[r * C + c] = multiply_add(lanes[r * C + c], x[r], y);
    }
  }
}

template <int R, int C>
FP8_TARGET FP8_INLINE void sums(const Tile& t, const Element* a, const Element* b, float* out) {
  Lanes lanes[R * C];
#pragma GCC unroll 16
  for (int i = 0; i < R * C; ++i) lanes[i] = zero();
  for (int64_t k = 0; k < t.chunks; ++k) {
    chunk<R, C>(lanes, a + k * kChunk, b + k * kChunk, t.stride);
  }
  reduce(lanes, out);
}

// Block scales: fresh lanes for every 128 of K, promoted into the total.
template <int R, int C>
FP8_TARGET FP8_INLINE void scaled_sums(const Tile& t, int row, int column, const Element* a, const Element* b,
                                       float* out) {
  Lanes total[R * C];
#pragma GCC unroll 16
  for (int i = 0; i < R * C; ++i) total[i] = zero();
  for (int64_t k = 0; k < t.chunks; k += 2) {
    Lanes lanes[R * C];
#pragma GCC unroll 16
    for (int i = 0; i < R * C; ++i) lanes[i] = zero();
    chunk<R, C>(lanes, a + k * kChunk, b + k * kChunk, t.stride);
    if (k + 1 < t.chunks) {
      chunk<R, C>(lanes, a + (k + 1) * kChunk, b + (k + 1) * kChunk, t.stride);
    }
#pragma GCC unroll 16
    for (int i = 0; i < R * C; ++i) {
      const float scale = t.a_scale[row + i / C][k / 2] * t.b_scale[column + i % C][k / 2];
      total[i] = promote(total[i], lanes[i], scale);
    }
  }
  reduce(total, out);
}

template <int R, int C>
FP8_TARGET FP8_INLINE void part(const Tile& t, int row, int column) {
  const Element* a = static_cast<const Element*>(t.a) + row * t.stride;
  const Element* b = static_cast<const Element*>(t.b) + column * t.stride;
  alignas(64) float fresh[kOutputs];
  if (t.a_scale == nullptr) {
    sums<R, C>(t, a, b, fresh);
  } else {
    scaled_sums<R, C>(t, row, column, a, b, fresh);
  }
  for (int r = 0; r < R; ++r) {
    float* out = t.out + (row + r) * t.out_stride + column;
    for (int c = 0; c < C; ++c) out[c] = t.add ? out[c] + fresh[r * C + c] : fresh[r * C + c];
  }
}

// The whole tile in parts of kOutputs sums.
template <int kRows, int kR>
FP8_TARGET void parts(const Tile& t) {
  constexpr int kColumns = 16 / kRows, kC = kOutputs / kR;
  for (int row = 0; row < kRows; row += kR) {
    for (int column = 0; column < kColumns; column += kC) part<kR, kC>(t, row, column);
  }
}

FP8_TARGET void tile(const Tile& t) {
  constexpr int kHalf = kOutputs == 16 ? 4 : 2;
  if (t.rows == 4) return parts<4, kHalf>(t);
  if (t.rows == 2) return parts<2, 2>(t);
  parts<1, 1>(t);
}
