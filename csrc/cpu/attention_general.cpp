// Paged attention in FP32, for queries of FP32, BF16 or FP16 over caches of any of these or FP8.
//
// It walks the keys in tiles of 16 positions: the tile's keys and values become FP32 once and serve every
// query row of the task. attention.h describes the order of every sum.
#include <cmath>

#include "cpu/attention.h"
#include "cpu/features.h"
#include "cpu/scratch.h"
#include "cpu/tensors.h"
#include "cpu/vectormath.h"
#include "fp8.h"

namespace fp8serve::attention {
namespace {

constexpr int kTile = 16;

// A cache element that is an FP8 code.
template <class F>
struct Code {
  uint8_t bits;
};
template <class F>
FP8_INLINE float load(Code<F> x) {
  return kDecode<F>.value[x.bits];
}
using fp8serve::load;

FP8_INLINE float dot(const float* a, const float* b, int64_t width) {
  float lanes[16] = {};
  for (int64_t d = 0; d < width; d += 16) {
    for (int i = 0; i < 16; ++i) lanes[i] += a[d + i] * b[d + i];
  }
  return lane_sum(lanes);
}

// A query sees the keys [first, last) of a tile's 16. `softcap`: 0 for none.
struct VisibleKeys {
  int first, last;
  float softcap;
};

// Caps the visible scores; returns their maximum, or `top` if that is larger.
FP8_INLINE float cap(float* scores, VisibleKeys visible, float top) {
  for (int j = 0; j < kTile; ++j) {
    const float capped = visible.softcap * tanh_of(scores[j] / visible.softcap);
    scores[j] = j >= visible.first && j < visible.last ? capped : -INFINITY;
  }
  for (int j = 0; j < kTile; ++j) top = scores[j] > top ? scores[j] : top;
  return top;
}

// out = out * correction + weight * v over the keys [first, last) only: 0 * NaN of an unseen key is not 0.
FP8_INLINE void add_values(float* out, float correction, const float* weight, const float* v, int64_t width,
                           int first, int last) {
  for (int64_t d = 0; d < width; d += 16) {
    float lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = out[d + i] * correction;
    for (int j = first; j < kTile && j < last; ++j) {
      for (int i = 0; i < 16; ++i) lanes[i] += weight[j] * v[j * width + d + i];
    }
    for (int i = 0; i < 16; ++i) out[d + i] = lanes[i];
  }
}

// One query row and one tile.
FP8_INLINE void attend(const float* q, float* out, float* maximum, float* sum, const float* k, const float* v,
                       int64_t width, VisibleKeys visible) {
  float weight[kTile];
  float top = *maximum;
  for (int j = 0; j < kTile; ++j) {
    weight[j] = j >= visible.first && j < visible.last ? dot(q, k + j * width, width) : -INFINITY;
    top = weight[j] > top ? weight[j] : top;
  }
  if (visible.softcap != 0.0f) top = cap(weight, visible, *maximum);
  for (int j = 0; j < kTile; ++j) weight[j] = exp_of(weight[j] - top);
  const float correction = exp_of(*maximum - top);
  *maximum = top;
  *sum = *sum * correction + lane_sum(weight);
  if (visible.first == 0) {
    add_values(out, correction, weight, v, width, 0, visible.last);
  } else {
    add_values(out, correction, weight, v, width, visible.first, visible.last);
  }
}

struct Memory {
  Scratch rows, tile;
};
thread_local Memory memory;

template <class Q, class C>
struct Attend {
  static FP8_INLINE void gather(const Work& w, const C* cache, int64_t begin, int64_t end, int64_t width,
                                float* tile) {
    for (int64_t p = begin; p < end; ++p) {
      const C* from = cache + w.slot(p) * w.token_stride;
      for (int64_t d = 0; d < w.dim; ++d) tile[(p - begin) * width + d] = load(from[d]);
    }
  }

  // `q`: [rows][width], zeros to begin with.
  static FP8_INLINE void run(const Work* work, const Keys* keys, const State* state, float* q, float* k_tile,
                             float* v_tile) {
    const Work& w = *work;
    const int64_t width = state->width;
    const auto* queries = static_cast<const Q*>(w.q);
    for (int64_t r = 0; r < state->rows; ++r) {
      const Q* from = queries + w.row(r);
      for (int64_t d = 0; d < w.dim; ++d) q[r * width + d] = load(from[d]) * w.score_scale;
    }
    for (int64_t begin = keys->first; begin < keys->last; begin += kTile) {
      const int64_t end = begin + kTile < keys->last ? begin + kTile : keys->last;
      gather(w, static_cast<const C*>(w.k), begin, end, width, k_tile);
      gather(w, static_cast<const C*>(w.v), begin, end, width, v_tile);
      for (int64_t r = 0; r < state->rows; ++r) {
        const int64_t last = w.position(r) - begin + 1, hidden = last - w.window;
        if (last <= 0 || hidden >= kTile) continue;
        const VisibleKeys visible{hidden > 0 ? static_cast<int>(hidden) : 0,
                                  last < kTile ? static_cast<int>(last) : kTile, w.softcap};
        const float* row = q + r * width;
        float *out = state->out + r * width, *maximum = state->maximum + r, *sum = state->sums + r * 16;
        attend(row, out, maximum, sum, k_tile, v_tile, width, visible);
      }
    }
  }
};

// Each row's sum of weights is in the first of its 16 lanes.
template <class Q>
void finish(const Work& w, const State& s) {
  for (int64_t r = 0; r < s.rows; ++r) {
    Q* to = static_cast<Q*>(w.out) + w.row(r);
    for (int64_t d = 0; d < w.dim; ++d)
      store(s.out[r * s.width + d] / s.sums[r * 16] * w.value_scale, to + d);
  }
}

template <class Q, class C>
void attend_keys(const WorkItem& now, const State* states, const WorkItem&) {
  for (int64_t i = 0; i < now.count; ++i) {
    const State& s = states[i];
    float* q = memory.rows.get<float>(s.rows * s.width);
    float* tile = memory.tile.get<float>(2 * kTile * s.width);
    std::fill_n(q, s.rows * s.width, 0.0f);
    std::fill_n(tile, 2 * kTile * s.width, 0.0f);
    s.clear();
    dispatch<Attend<Q, C>>(now.heads + i, &now.keys, &s, q, tile, tile + kTile * s.width);
  }
}

template <class F>
void with_cache(ScalarType dtype, const F& f) {
  if (dtype == ScalarType::Float8_e4m3fn) return f(Type<Code<E4M3>>{});
  if (dtype == ScalarType::Float8_e5m2) return f(Type<Code<E5M2>>{});
  with_element(dtype, f);
}

}  // namespace

Path general(ScalarType query, ScalarType cache) {
  Path path{};
  with_element(query, [&](auto q) {
    with_cache(cache, [&](auto c) {
      using Q = typename decltype(q)::type;
      path = {16, attend_keys<Q, typename decltype(c)::type>, finish<Q>};
    });
  });
  return path;
}

}  // namespace fp8serve::attention
