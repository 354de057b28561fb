// Paged attention for BF16 queries with AVX-512 BF16: both products are `vdpbf16ps`, an FP8 cache becomes
// BF16 on the way.
//
// Scores are the GEMM tile of gemm.h with 16 keys as its columns. For the second product two keys at a time
// are interleaved, so that a pair of weights multiplies a pair of values; weights are rounded to BF16 before
// they are summed, which keeps the mean of a uniform attention exact. A tile has 64 keys, so that 64 scores
// share one maximum and one rescaling.
//
// A tile of 64 keys and 64 dimensions is unpacked in about 300 cycles and costs a query row 130, so that
// four rows (heads of a group, or tokens of a prompt) already hide it.
#include "cpu/attention.h"
#include "cpu/features.h"

#if FP8_X86
#include <immintrin.h>

#include <cmath>

#include "cpu/gemm.h"
#include "cpu/scratch.h"
#include "cpu/tensors.h"

#define FP8_TARGET FP8_TARGET_AVX512BF16

namespace fp8serve::attention {
namespace {

constexpr int64_t kKeys = 64;  // a tile
constexpr int64_t kDims = 64;  // dimensions handled at once

// A task's state and scratch memory.
struct Workspace : State {
  uint16_t* q;        // [heads][rows][width]
  float* scores;      // [4 groups of 16 keys][rows][16]
  uint16_t* weights;  // [rows][64]
  float* correction;  // [rows]
  uint16_t* k;        // 4 panels of 16 keys (gemm.h)
  uint16_t* v_rows;   // [64][width]
  uint16_t* v;        // [32 pairs of keys][width][2]
};

Workspace allocate(const State& state, int64_t heads) {
  thread_local Scratch scratch[7];
  const int64_t rows = state.rows, width = state.width;
  return {state,
          scratch[0].get<uint16_t>(heads * rows * width),
          scratch[1].get<float>(rows * kKeys),
          scratch[2].get<uint16_t>(rows * kKeys),
          scratch[3].get<float>(rows),
          scratch[4].get<uint16_t>(kKeys * width),
          scratch[5].get<uint16_t>(kKeys * width),
          scratch[6].get<uint16_t>(kKeys * width)};
}

// e^x for x <= 0, 0 far below, NaN for NaN: 2^n * p(r), |r| <= ln 2 / 2.
FP8_TARGET FP8_INLINE __m512 exp16(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-110.0f), x);  // in this order NaN stays
  const __m512 n =
      _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.3981999507e-3f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

// tanh(x), NaN for NaN, as tanh_of() of vectormath.h.
FP8_TARGET FP8_INLINE __m512 tanh16(__m512 x) {
  const __m512 size = _mm512_abs_ps(x), square = _mm512_mul_ps(x, x), one = _mm512_set1_ps(1.0f);
  __m512 p = _mm512_set1_ps(-5.70498872745e-3f);
  p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(2.06390887954e-2f));
  p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(-5.37397155531e-2f));
  p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(1.33314422036e-1f));
  p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(-3.33332819422e-1f));
  const __m512 near = _mm512_fmadd_ps(_mm512_mul_ps(p, square), x, x);
  const __m512 rest = exp16(_mm512_mul_ps(_mm512_set1_ps(-2.0f), size));
  const __m512 far = _mm512_div_ps(_mm512_sub_ps(one, rest), _mm512_add_ps(one, rest));
  const __m512 signed_far = _mm512_or_ps(far, _mm512_and_ps(x, _mm512_set1_ps(-0.0f)));
  return _mm512_mask_mov_ps(signed_far, _mm512_cmp_ps_mask(size, _mm512_set1_ps(0.625f), _CMP_LT_OQ), near);
}

// --- tiles

struct Tile {
  int64_t begin;  // position of the first key
  int64_t count;  // keys before the end of the sequence
};

gemm::Kind kind_of(ScalarType cache) {
  if (cache == ScalarType::BFloat16) return gemm::Kind::bf16;
  return cache == ScalarType::Float8_e5m2 ? gemm::Kind::e5m2 : gemm::Kind::e4m3;
}

// Computes the offset of each key of a tile in the cache, in bytes. Keys after the end of the sequence get
// the offset of the last key; their scores are masked. One division serves all keys: 64 divisions took longer
// than the tile's products.
void locate(const Work& w, Tile tile, int64_t* at) {
  const int64_t bytes = w.token_stride * gemm::bytes_of(kind_of(w.cache));
  int64_t block = tile.begin / w.block_size, place = tile.begin % w.block_size;
  for (int64_t i = 0; i < tile.count; ++i) {
    at[i] = (w.blocks[block] * w.block_size + place) * bytes;
    if (++place == w.block_size) place = 0, ++block;
  }
  std::fill(at + tile.count, at + kKeys, at[tile.count - 1]);
}

void get_pointers(const void* cache, const int64_t* at, const void** key) {
  for (int64_t i = 0; i < kKeys; ++i) key[i] = static_cast<const char*>(cache) + at[i];
}

// Prefetches the next tile of all heads, a few lines at a time, so that memory delivers it while the current
// tile is computed. It does not prefetch the lines of many keys at once, because a processor drops prefetches
// beyond a few dozen in flight.
class Prefetcher {
 public:
  // prefetch_some() is called `steps` times between two calls.
  void set_target(const WorkItem& next, int64_t first, int64_t steps) {
    const Tile tile{first, std::min(kKeys, next.keys.last - first)};
    token_ = line_ = 0;
    tokens_ = tile.count;  // 0 after the last tile
    if (tokens_ == 0) return;
    const Work& w = *next.heads;
    k_ = static_cast<const char*>(w.k);
    v_ = static_cast<const char*>(w.v);
    lines_ = (next.count * w.dim * gemm::bytes_of(kind_of(w.cache)) + 63) / 64;
    share_ = (tokens_ * lines_ + steps - 1) / steps;
    locate(w, tile, at_);
  }

  void prefetch_some() {
    for (int64_t i = 0; i < share_ && token_ < tokens_; ++i) {
      const int64_t at = at_[token_] + line_ * 64;
      __builtin_prefetch(k_ + at, 0, 2);
      __builtin_prefetch(v_ + at, 0, 2);
      if (++line_ == lines_) line_ = 0, ++token_;
    }
  }

 private:
  const char *k_ = nullptr, *v_ = nullptr;
  int64_t tokens_ = 0, lines_ = 0;  // keys, and cache lines of a key
  int64_t token_ = 0, line_ = 0;    // the next ones to prefetch
  int64_t share_ = 0;               // lines to prefetch in a call
  int64_t at_[kKeys];
};

// Up to 32 BF16, zeros after the end.
FP8_TARGET FP8_INLINE __m512i load32(const uint16_t* p, int64_t left) {
  return left >= 32 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16((1u << left) - 1, p);
}

// Interleaves two BF16 rows into pairs. in_order() restores the order of the dimensions.
FP8_TARGET void interleave(const uint16_t* even, const uint16_t* odd, int64_t dim, int64_t width,
                           uint16_t* out) {
  for (int64_t d = 0; d < width; d += 32) {
    const int64_t left = dim - d;
    const __m512i a = left > 0 ? load32(even + d, left) : _mm512_setzero_si512();
    const __m512i b = left > 0 && odd != nullptr ? load32(odd + d, left) : _mm512_setzero_si512();
    _mm512_storeu_si512(out + 2 * d, _mm512_unpacklo_epi16(a, b));
    _mm512_storeu_si512(out + 2 * d + 32, _mm512_unpackhi_epi16(a, b));
  }
}
// Stores two vectors of sums, in the order of interleave(), as 32 dimensions in order.
FP8_TARGET FP8_INLINE void in_order(__m512 low, __m512 high, float* out) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  _mm512_storeu_ps(out, _mm512_permutex2var_ps(low, first, high));
  _mm512_storeu_ps(out + 16, _mm512_permutex2var_ps(low, second, high));
}

// Unpacks a tile's keys into panels of 16 and its values into pairs. FP8 values become BF16 rows first.
void unpack(const Work& w, Tile tile, const int64_t* at, const Workspace& s, Prefetcher& prefetcher) {
  const gemm::Level& level = gemm::avx512bf16();
  const gemm::Kind kind = kind_of(w.cache);
  const void* key[kKeys];
  get_pointers(w.k, at, key);
  for (int64_t g = 0; g < tile.count; g += 16) level.unpack_columns(key + g, w.dim, kind, s.k + g * s.width);
  get_pointers(w.v, at, key);
  for (int64_t i = 0; i < tile.count && kind != gemm::Kind::bf16; ++i) {
    level.unpack_row(key[i], w.dim, kind, s.v_rows + i * s.width);
    key[i] = s.v_rows + i * s.width;
  }
  for (int64_t i = 0; i < tile.count; i += 2) {
    interleave(static_cast<const uint16_t*>(key[i]),
               i + 1 < tile.count ? static_cast<const uint16_t*>(key[i + 1]) : nullptr, w.dim, s.width,
               s.v + i * s.width);
    prefetcher.prefetch_some();
  }
}

// --- one tile onto every row

// A row sees the keys [first, last) of the tile.
struct VisibleKeys {
  int64_t first, last;
  bool operator==(const VisibleKeys&) const = default;
};

VisibleKeys visible_keys(const Work& w, Tile tile, int64_t row) {
  const int64_t last = w.position(row) - tile.begin + 1;
  return {std::max<int64_t>(0, last - w.window), std::min(last, kKeys)};
}

// Computes the scores of rows [first, last).
void score(const Work& w, Tile tile, const Workspace& s, int64_t first, int64_t last) {
  const gemm::Level& level = gemm::avx512bf16();
  for (int64_t g = 0; g < tile.count; g += 16) {
    for (int64_t r = first; r < last; r += gemm::kMaxRows) {
      level.tile({.a = s.q + r * s.width,
                  .b = s.k + g * s.width,
                  .a_stride = s.width,
                  .k = w.dim,
                  .rows = static_cast<int>(std::min(gemm::kMaxRows, last - r)),
                  .out = s.scores + (g / 16 * s.rows + r) * 16});
    }
  }
}

// Converts the scores of a row to weights in BF16 and updates its maximum, its sums and the correction of its
// earlier output. A score is multiplied by `scale` or, if kCapped, becomes scale * tanh(inner * score).
template <bool kCapped>
FP8_TARGET void update_softmax(const Workspace& s, int64_t row, VisibleKeys visible, float scale,
                               float inner) {
  const uint64_t mask =
      (visible.last >= kKeys ? ~0ull : (1ull << visible.last) - 1) & (~0ull << visible.first);
  const __m512 nothing = _mm512_set1_ps(-INFINITY);
  __m512 score[4];
  __m512 top = _mm512_set1_ps(s.maximum[row]);
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    const auto lanes = static_cast<__mmask16>(mask >> (16 * g));
    __m512 raw = _mm512_maskz_loadu_ps(lanes, s.scores + (g * s.rows + row) * 16);
    if constexpr (kCapped) raw = tanh16(_mm512_mul_ps(raw, _mm512_set1_ps(inner)));
    score[g] = _mm512_mask_mul_ps(nothing, lanes, raw, _mm512_set1_ps(scale));
    top = _mm512_max_ps(score[g], top);
  }
  const float maximum = _mm512_reduce_max_ps(top);
  const __m512 highest = _mm512_set1_ps(maximum);
  const __m512 shrink = exp16(_mm512_sub_ps(_mm512_set1_ps(s.maximum[row]), highest));
  __m512 sum = _mm512_mul_ps(_mm512_loadu_ps(s.sums + row * 16), shrink);
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    const auto lanes = static_cast<__mmask16>(mask >> (16 * g));
    const __m512 weight = _mm512_maskz_mov_ps(lanes, exp16(_mm512_sub_ps(score[g], highest)));
    const __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(weight));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(s.weights + row * kKeys + g * 16), rounded);
    sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16)));
  }
  _mm512_storeu_ps(s.sums + row * 16, sum);
  s.maximum[row] = maximum;
  s.correction[row] = _mm512_cvtss_f32(shrink);
}

FP8_TARGET FP8_INLINE __m512 dot(__m512 sum, __m512i weights, __m512i values) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(values));
}

// R rows from `row` that see the same keys: out = out * correction + weights * values, 64 dimensions at a
// time. kLate: these rows do not see the tile's first keys.
template <int R, bool kLate>
FP8_TARGET void add_values(const Workspace& s, int64_t row, VisibleKeys visible) {
  const __m512i even_only = _mm512_set1_epi32(0xffff), odd_only = _mm512_set1_epi32(-0x10000);
  for (int64_t d = 0; d < s.width; d += kDims) {
    __m512 sum[R][4];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m512 correction = _mm512_set1_ps(s.correction[row + r]);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        sum[r][i] = _mm512_mul_ps(_mm512_loadu_ps(s.out + (row + r) * s.width + d + 16 * i), correction);
      }
    }
    for (int64_t j = kLate ? visible.first / 2 * 2 : 0; j < visible.last; j += 2) {
      const uint16_t* pair = s.v + j * s.width + 2 * d;
      __m512i value[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        value[i] = _mm512_loadu_si512(pair + 32 * i);
        if (j + 1 == visible.last)
          value[i] = _mm512_and_si512(value[i], even_only);  // 0 * NaN of an unseen key is not 0
        if (kLate && j < visible.first) value[i] = _mm512_and_si512(value[i], odd_only);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        int32_t two;
        std::memcpy(&two, s.weights + (row + r) * kKeys + j, sizeof(two));
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sum[r][i] = dot(sum[r][i], _mm512_set1_epi32(two), value[i]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) _mm512_storeu_ps(s.out + (row + r) * s.width + d + 16 * i, sum[r][i]);
    }
  }
}

void add_values_to_rows(const Workspace& s, int64_t row, int64_t count, VisibleKeys visible) {
  if (visible.first > 0) {
    count == 4 ? add_values<4, true>(s, row, visible) : add_values<1, true>(s, row, visible);
  } else {
    count == 4 ? add_values<4, false>(s, row, visible) : add_values<1, false>(s, row, visible);
  }
}

void attend_tile(const Work& w, Tile tile, const Workspace& s, Prefetcher& prefetcher) {
  const auto visible = [&](int64_t row) { return visible_keys(w, tile, row); };
  const bool capped = w.softcap > 0.0f;
  const float scale = capped ? w.softcap : w.score_scale, inner = capped ? w.score_scale / w.softcap : 0.0f;
  const int64_t end = w.first_row_past(tile.begin + kKeys);
  int64_t row = 0;
  while (row < end && visible(row).last <= 0) ++row;
  score(w, tile, s, row, end);
  while (row < end) {
    const VisibleKeys here = visible(row);
    const int64_t count = row + 3 < end && visible(row + 3) == here ? 4 : 1;  // both ends only rise
    for (int64_t r = row; r < row + count; ++r) {
      capped ? update_softmax<true>(s, r, here, scale, inner)
             : update_softmax<false>(s, r, here, scale, inner);
      prefetcher.prefetch_some();
    }
    add_values_to_rows(s, row, count, here);
    row += count;
  }
}

// --- a task

void load_queries(const Work& w, const Workspace& s) {
  for (int64_t r = 0; r < s.rows; ++r) {
    const auto* from = static_cast<const uint16_t*>(w.q) + w.row(r);
    std::fill(std::copy_n(from, w.dim, s.q + r * s.width), s.q + (r + 1) * s.width, uint16_t{0});
  }
}

// Returns one head's part of the workspace.
Workspace of_head(const Workspace& all, const State& state, int64_t head) {
  Workspace s = all;
  static_cast<State&>(s) = state;
  s.q += head * state.rows * state.width;
  return s;
}

// Computes each tile for all heads before the next tile.
void attend(const WorkItem& now, const State* states, const WorkItem& next) {
  const Workspace all = allocate(*states, now.count);
  for (int64_t i = 0; i < now.count; ++i) {
    states[i].clear();
    load_queries(now.heads[i], of_head(all, states[i], i));
  }
  Prefetcher prefetcher;
  for (int64_t first = now.keys.first; first < now.keys.last; first += kKeys) {
    const Tile tile{first, std::min(kKeys, now.keys.last - first)};
    const int64_t steps = now.count * (tile.count / 2 + states->rows);
    const bool more = first + kKeys < now.keys.last;
    prefetcher.set_target(more ? now : next, more ? first + kKeys : next.keys.first, steps);
    int64_t at[kKeys];
    locate(*now.heads, tile, at);
    for (int64_t i = 0; i < now.count; ++i) {
      const Workspace s = of_head(all, states[i], i);
      unpack(now.heads[i], tile, at, s, prefetcher);
      attend_tile(now.heads[i], tile, s, prefetcher);
    }
  }
}

FP8_TARGET void finish(const Work& w, const State& s) {
  for (int64_t r = 0; r < s.rows; ++r) {
    alignas(64) float ordered[kMaxDim];
    const __m512 scale =
        _mm512_set1_ps(w.value_scale / _mm512_reduce_add_ps(_mm512_loadu_ps(s.sums + r * 16)));
    for (int64_t d = 0; d < s.width; d += 32) {
      const float* sums = s.out + r * s.width + d;
      in_order(_mm512_mul_ps(_mm512_loadu_ps(sums), scale), _mm512_mul_ps(_mm512_loadu_ps(sums + 16), scale),
               ordered + d);
    }
    auto* out = static_cast<BF16*>(w.out) + w.row(r);
    for (int64_t d = 0; d < w.dim; ++d) store(ordered[d], out + d);
  }
}

}  // namespace

Path bf16() { return {kDims, attend, finish}; }

}  // namespace fp8serve::attention

#else
namespace fp8serve::attention {
Path bf16() { return general(ScalarType::BFloat16, ScalarType::BFloat16); }  // never called
}  // namespace fp8serve::attention
#endif
