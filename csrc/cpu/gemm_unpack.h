// FP8 or BF16 -> panels, with vectors; and the tile that needs no panel. No include guard: included once per
// level, after gemm_tile.h, which also defines:
//   kOnlyFp8                whether no values in BF16 occur
//   kStreamRows             rows that stream() takes, at most
//   Runs                    a run (8 k) of columns i, i + 4, i + 8 and i + 12 as BF16 or FP16
//   load_fp8<F>(columns, runs[2])     16 FP8 values of each of four columns -> two runs
//   load_values(columns, runs[2])     ... of 16 BF16
//   step<S>(run)            its step S as an Operand: of FP32 the odd k, then the even ones, else the run
//   store(p, operand)       stores the elements of an operand
//
// Every FP8 value is exact in BF16: 16-bit arithmetic decodes twice as many at a time as 32-bit would. A BF16
// is the upper half of its FP32: half of the FP32 come out of a mask, half out of a shift.

constexpr int64_t kStepValues = 16;  // k of two runs

template <class T>
const T* const* as(const void* const* columns) {
  return reinterpret_cast<const T* const*>(columns);
}

// Loads `left` values of columns i, i + 4, i + 8, i + 12 from `k` on, with zeros after the end.
template <class Source>
FP8_TARGET FP8_INLINE void load_runs(const typename Source::Value* const* columns, int64_t k, int64_t left,
                                     Runs (&runs)[2]) {
  using Value = typename Source::Value;
  Value padded[4][kStepValues];
  const Value* from[4];
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    from[q] = columns[4 * q] + k;
    if (left < kStepValues) {
      for (int64_t i = 0; i < kStepValues; ++i) padded[q][i] = i < left ? from[q][i] : Value{0};
      from[q] = padded[q];
    }
  }
  Source::load(from, runs);
}

template <class F>
struct Fp8Source {
  using Value = uint8_t;
  FP8_TARGET static FP8_INLINE void load(const uint8_t* const* from, Runs (&runs)[2]) {
    load_fp8<F>(from, runs);
  }
};
struct Bf16Source {
  using Value = uint16_t;
  FP8_TARGET static FP8_INLINE void load(const uint16_t* const* from, Runs (&runs)[2]) {
    load_values(from, runs);
  }
};

template <class Source>
FP8_TARGET void unpack_columns_of(const typename Source::Value* const* columns, int64_t k, Element* panel) {
  for (int64_t begin = 0; begin < k; begin += kStepValues) {
    for (int i = 0; i < 4; ++i) {
      Runs runs[2];
      load_runs<Source>(columns + i, begin, k - begin, runs);
#pragma GCC unroll 2
      for (int r = 0; r < 2; ++r) {
        Element* to = panel + (begin + r * kRun) * kGroup + i * kStepB;
        store(to, step<0>(runs[r]));
        if constexpr (kSteps == 2) store(to + 4 * kStepB, step<1>(runs[r]));
      }
    }
  }
}

// Loads 64 values of a row like four columns of 16 values.
template <class Source>
FP8_TARGET void unpack_row_of(const typename Source::Value* values, int64_t k, Element* row) {
  using Value = typename Source::Value;
  for (int64_t begin = 0; begin < k; begin += kChunk) {
    Value padded[kChunk];
    const Value* from = values + begin;
    if (k - begin < kChunk) {
      for (int64_t i = 0; i < kChunk; ++i) padded[i] = i < k - begin ? from[i] : Value{0};
      from = padded;
    }
    const Value* const quarters[4] = {from, from + 16, from + 32, from + 48};
    Runs runs[2];
    Source::load(quarters, runs);
    for (int r = 0; r < 2; ++r) {
      alignas(64) Element steps[kSteps][kStepB];
      store(steps[0], step<0>(runs[r]));
      if constexpr (kSteps == 2) store(steps[1], step<1>(runs[r]));
      for (int i = 0; i < 32; ++i)
        row[begin + i / 8 * 16 + r * kRun + i % 8] = steps[i / kStepA % kSteps][i / 8 * kStepA + i % kStepA];
    }
  }
}

// Calls f(source) with the source that reads values of `kind`.
template <class F>
FP8_INLINE void with_source(Kind kind, const F& f) {
  if constexpr (!kOnlyFp8) {
    if (kind == Kind::bf16) return f(Bf16Source{});
  }
  kind == Kind::e5m2 ? f(Fp8Source<E5M2>{}) : f(Fp8Source<E4M3>{});
}

void unpack_row(const void* from, int64_t k, Kind kind, void* row) {
  with_source(kind, [&](auto source) {
    using Source = decltype(source);
    unpack_row_of<Source>(static_cast<const typename Source::Value*>(from), k, static_cast<Element*>(row));
  });
}
void unpack_columns(const void* const* from, int64_t k, Kind kind, void* panel) {
  with_source(kind, [&](auto source) {
    using Source = decltype(source);
    unpack_columns_of<Source>(as<typename Source::Value>(from), k, static_cast<Element*>(panel));
  });
}

// --- weights read once: converted in registers, never stored

template <class Source, int R, int C>
struct ColumnsAdd {
  static constexpr int64_t kStep = kStepValues;
  const Element* a;
  int64_t a_stride;
  const typename Source::Value* const* b;
  int first = 0;
  FP8_TARGET FP8_INLINE void operator()(Vector (&sums)[R * C], int64_t k, int64_t left) const {
#pragma GCC unroll 4
    for (int i = 0; i < C; ++i) {
      Runs runs[2];
      load_runs<Source>(b + first + i, k, left, runs);
#pragma GCC unroll 2
      for (int s = 0; s < 2; ++s) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const Element* x = a + r * a_stride + k + s * kRun;
          sums[r * C + i] = multiply_add(sums[r * C + i], load_a(x), step<0>(runs[s]));
          if constexpr (kSteps == 2)
            sums[r * C + i] = multiply_add(sums[r * C + i], load_a(x + kStepA), step<1>(runs[s]));
        }
      }
    }
  }
};

template <class Source, int R, bool scaled>
FP8_TARGET void stream_rows(const Tile& t, const typename Source::Value* const* b) {
  const ColumnsAdd<Source, R, kVectors<R>> add{static_cast<const Element*>(t.a), t.a_stride, b};
  Vector sums[R * 4];
  sum_columns<R, kVectors<R>, scaled>(sums, t, 0, add);
  finish_rows<R>(sums, t, 0);
}

template <class Source, int R>
void stream_from(const Tile& t, const void* const* b) {
  if constexpr (R > 1) {
    if (t.rows < R) return stream_from<Source, R - 1>(t, b);
  }
  const auto* columns = as<typename Source::Value>(b);
  t.scale == nullptr ? stream_rows<Source, R, false>(t, columns) : stream_rows<Source, R, true>(t, columns);
}

void stream(const Tile& t, const void* const* b, const void* const*, Kind kind) {
  with_source(kind, [&](auto source) { stream_from<decltype(source), kStreamRows>(t, b); });
}
