// The gradients of one head, by the formulas and in the order of attention_backward.h.
#include <bit>
#include <cmath>

#include "cpu/attention_backward.h"
#include "cpu/features.h"
#include "cpu/pair_product.h"
#include "cpu/scratch.h"
#include "cpu/tensors.h"
#include "cpu/vectormath.h"

namespace fp8serve::attention_backward {
namespace {

// A task's scratch memory.
struct Workspace {
  uint16_t *k, *v;                     // [rows][width]
  uint16_t* k_t;                       // [width][rows]
  uint16_t *q, *grad;                  // [kTile][width]: of 64 queries
  uint32_t *q_columns, *grad_columns;  // [width / 2][kTile]: pairs of dimensions
  uint32_t *q_pairs, *grad_pairs;      // [kTile / 2][width]: pairs of queries
  float *scores, *products;            // [rows][kTile]: S, then P; dP
  float* slopes;                       // [rows][kTile] of the cap, or null
  uint16_t *weights, *gradients;       // [kTile][kTile]: P and dS of 64 keys
  uint32_t* gradient_pairs;            // [kTile / 2][kTile]: dS, pairs of keys
  float* d_q;                          // [width][kTile]
};

template <class T>
T* take(char*& at, int64_t count) {
  T* array = reinterpret_cast<T*>(at);
  at += padded(count * static_cast<int64_t>(sizeof(T)), 64);
  return array;
}

Workspace allocate(char* memory, const Inputs& in, const Sequence& s, int64_t* bytes) {
  const int64_t rows = s.rows(), width = in.width();
  char* at = memory;
  Workspace workspace;
  workspace.k = take<uint16_t>(at, rows * width);
  workspace.v = take<uint16_t>(at, rows * width);
  workspace.k_t = take<uint16_t>(at, rows * width);
  workspace.q = take<uint16_t>(at, kTile * width);
  workspace.grad = take<uint16_t>(at, kTile * width);
  workspace.q_columns = take<uint32_t>(at, kTile * width / 2);
  workspace.grad_columns = take<uint32_t>(at, kTile * width / 2);
  workspace.q_pairs = take<uint32_t>(at, kTile * width / 2);
  workspace.grad_pairs = take<uint32_t>(at, kTile * width / 2);
  workspace.scores = take<float>(at, rows * kTile);
  workspace.products = take<float>(at, rows * kTile);
  workspace.slopes = in.softcap > 0.0f ? take<float>(at, rows * kTile) : nullptr;
  workspace.weights = take<uint16_t>(at, kTile * kTile);
  workspace.gradients = take<uint16_t>(at, kTile * kTile);
  workspace.gradient_pairs = take<uint32_t>(at, kTile * kTile / 2);
  workspace.d_q = take<float>(at, kTile * width);
  *bytes = at - memory;
  return workspace;
}

// --- operands in the orders that products read

// Copies `count` rows of one head, which are `stride` elements apart, and pads them with zeros to `rows` of
// `width`.
void copy_rows(const uint16_t* from, int64_t stride, int64_t count, int64_t dim, int64_t rows, int64_t width,
               uint16_t* out) {
  for (int64_t r = 0; r < rows; ++r, out += width) {
    if (r < count) std::copy_n(from + r * stride, dim, out);
    std::fill(out + (r < count ? dim : 0), out + width, uint16_t{0});
  }
}

// [kTile][width] -> pairs of dimensions by query, and pairs of queries by dimension.
struct MakePairs {
  static FP8_INLINE void run(const uint16_t* x, int64_t width, uint32_t* columns, uint32_t* rows) {
    for (int64_t i = 0; i < width / 2; ++i) {
      for (int64_t r = 0; r < kTile; ++r)
        columns[i * kTile + r] = x[r * width + 2 * i] | static_cast<uint32_t>(x[r * width + 2 * i + 1]) << 16;
    }
    for (int64_t r = 0; r < kTile; r += 2)
      pairs::interleave(x + r * width, x + (r + 1) * width, width, rows + r / 2 * width);
  }
};

// --- softmax and its gradient, down columns

// The keys [begin, end) that 64 queries see, and the first of these queries, as positions in the sequence.
struct VisibleKeys {
  int64_t begin, end, query;
};

// Replaces scores by weights that are not normalized. `share`: 1 / their sum, for each query; `top`: each
// query's highest score. Keys that a query does not see get the weight 0.
struct Softmax {
  static FP8_INLINE void run(const Inputs* in, VisibleKeys visible, float sink, const Workspace* s,
                             float* top, float* share) {
    float highest[kTile];
    for (int64_t c = 0; c < kTile; ++c) highest[c] = sink;
    for (int64_t key = visible.begin; key < visible.end; ++key) {
      float* row = s->scores + (key - visible.begin) * kTile;
      const int64_t from = key - visible.query, to = from + in->window;  // queries that see the key
      if (in->softcap > 0.0f) {
        float* slope = s->slopes + (key - visible.begin) * kTile;
        for (int64_t c = 0; c < kTile; ++c) {
          const float tanh_score = tanh_of(row[c] * in->scale / in->softcap);
          slope[c] = (1.0f - tanh_score * tanh_score) * in->scale;
          row[c] = in->softcap * tanh_score;
        }
      } else {
        for (int64_t c = 0; c < kTile; ++c) row[c] *= in->scale;
      }
      for (int64_t c = 0; c < kTile; ++c) {
        const float score = c >= from && c < to ? row[c] : -INFINITY;
        row[c] = score;
        highest[c] = score > highest[c] ? score : highest[c];
      }
    }
    float total[kTile];
    for (int64_t c = 0; c < kTile; ++c) total[c] = exp_of(sink - highest[c]);
    for (int64_t key = visible.begin; key < visible.end; ++key) {
      float* row = s->scores + (key - visible.begin) * kTile;
      for (int64_t c = 0; c < kTile; ++c) {
        row[c] = exp_of(row[c] - highest[c]);
        total[c] += row[c];
      }
    }
    for (int64_t c = 0; c < kTile; ++c) top[c] = highest[c], share[c] = 1.0f / total[c];
  }
};

// Computes D of each query from weights that are not normalized.
struct WeightedMean {
  static FP8_INLINE void run(VisibleKeys visible, const Workspace* s, const float* share, float* mean) {
    float total[kTile] = {};
    for (int64_t i = 0; i < (visible.end - visible.begin) * kTile; i += kTile) {
      for (int64_t c = 0; c < kTile; ++c) total[c] += s->scores[i + c] * s->products[i + c];
    }
    for (int64_t c = 0; c < kTile; ++c) mean[c] = total[c] * share[c];
  }
};

// Rounds 64 values to BF16. Subnormal values become zero, because some variants of the product read them as
// zero.
FP8_INLINE void round_row(const float* x, uint16_t* out) {
  for (int64_t c = 0; c < kTile; ++c) {
    const bool is_normal = (std::bit_cast<uint32_t>(x[c]) & 0x7f800000u) != 0;
    BF16 y;
    store(is_normal ? x[c] : 0.0f, &y);
    out[c] = y.bits;
  }
}

// Computes P and dS of 64 keys, from row `at` on.
struct Differentiate {
  static FP8_INLINE void run(const Inputs* in, const Workspace* s, int64_t at, const float* share,
                             const float* mean) {
    for (int64_t r = 0; r < kTile; ++r) {
      const float* weight = s->scores + (at + r) * kTile;
      const float* product = s->products + (at + r) * kTile;
      alignas(64) float p[kTile], change[kTile];
      for (int64_t c = 0; c < kTile; ++c) {
        p[c] = weight[c] * share[c];
        change[c] = p[c] * (product[c] - mean[c]);
      }
      if (s->slopes == nullptr) {
        for (int64_t c = 0; c < kTile; ++c) change[c] *= in->scale;
      } else {
        const float* slope = s->slopes + (at + r) * kTile;
        for (int64_t c = 0; c < kTile; ++c) change[c] *= slope[c];
      }
      round_row(p, s->weights + r * kTile);
      round_row(change, s->gradients + r * kTile);
    }
    for (int64_t r = 0; r < kTile; r += 2)
      pairs::interleave(s->gradients + r * kTile, s->gradients + (r + 1) * kTile, kTile,
                        s->gradient_pairs + r / 2 * kTile);
  }
};

// --- a task

class Head {
 public:
  Head(const Inputs& in, const Sequence& sequence, int64_t head, const Workspace& workspace,
       const Gradients& out, uint16_t* d_q)
      : in_(in), sequence_(sequence), head_(head), workspace_(workspace), out_(out), d_q_(d_q) {}

  void run() {
    const int64_t rows = sequence_.rows(), width = in_.width(), at = head_ / in_.group() * in_.dim;
    const int64_t stride = in_.kv_heads * in_.dim, first = sequence_.first * stride + at;
    copy_rows(in_.k + first, stride, sequence_.length, in_.dim, rows, width, workspace_.k);
    copy_rows(in_.v + first, stride, sequence_.length, in_.dim, rows, width, workspace_.v);
    pairs::transpose(workspace_.k, rows, width, rows, workspace_.k_t);
    std::fill_n(out_.k, rows * width, 0.0f);
    std::fill_n(out_.v, rows * width, 0.0f);
    *out_.sink = 0.0f;
    for (int64_t query = 0; query < sequence_.length; query += kTile) run_queries(query);
  }

 private:
  void run_queries(int64_t query) {
    const int64_t from = std::max<int64_t>(0, query - in_.window + 1) / kTile * kTile;
    const VisibleKeys visible{from, query + kTile, query};
    load(query, in_.q, workspace_.q, workspace_.q_columns, workspace_.q_pairs);
    load(query, in_.grad, workspace_.grad, workspace_.grad_columns, workspace_.grad_pairs);
    multiply_by_queries(workspace_.k, workspace_.q_columns, visible, workspace_.scores);
    multiply_by_queries(workspace_.v, workspace_.grad_columns, visible, workspace_.products);
    alignas(64) float top[kTile], share[kTile], mean[kTile];
    const float sink = in_.sinks == nullptr ? -INFINITY : in_.sinks[head_];
    dispatch<Softmax>(&in_, visible, sink, &workspace_, top, share);
    dispatch<WeightedMean>(visible, &workspace_, share, mean);
    for (int64_t c = 0; in_.sinks != nullptr && c < kTile; ++c)
      *out_.sink -= exp_of(sink - top[c]) * share[c] * mean[c];
    for (int64_t key = visible.begin; key < visible.end; key += kTile) {
      dispatch<Differentiate>(&in_, &workspace_, key - visible.begin, share, mean);
      add_keys(key, key > visible.begin);
    }
    store_queries(query);
  }

  // Loads 64 queries of the head, with zeros after the sequence's last one.
  void load(int64_t query, const uint16_t* from, uint16_t* rows, uint32_t* columns, uint32_t* row_pairs) {
    const int64_t stride = in_.heads * in_.dim, count = std::min(kTile, sequence_.length - query);
    copy_rows(from + (sequence_.first + query) * stride + head_ * in_.dim, stride, count, in_.dim, kTile,
              in_.width(), rows);
    dispatch<MakePairs>(rows, in_.width(), columns, row_pairs);
  }

  // out [keys][64 queries] = the rows of the keys times those of the queries.
  void multiply_by_queries(const uint16_t* keys, const uint32_t* columns, VisibleKeys visible, float* out) {
    const int64_t width = in_.width();
    pairs::multiply({.a = keys + visible.begin * width,
                     .a_stride = width,
                     .b = columns,
                     .b_stride = kTile,
                     .k = width,
                     .out = out,
                     .out_stride = kTile,
                     .rows = visible.end - visible.begin,
                     .columns = kTile,
                     .add = false});
  }

  // Adds the terms of these queries to dV and dK of the 64 keys from `key` on, and the terms of these keys to
  // dQ. `more`: dQ already has terms of earlier keys.
  void add_keys(int64_t key, bool more) {
    add_to_keys(workspace_.weights, workspace_.grad_pairs, out_.v + key * in_.width());
    add_to_keys(workspace_.gradients, workspace_.q_pairs, out_.k + key * in_.width());
    pairs::multiply({.a = workspace_.k_t + key,
                     .a_stride = sequence_.rows(),
                     .b = workspace_.gradient_pairs,
                     .b_stride = kTile,
                     .k = kTile,
                     .out = workspace_.d_q,
                     .out_stride = kTile,
                     .rows = in_.width(),
                     .columns = kTile,
                     .add = more});
  }

  // out [64 keys][width] += a [keys][64 queries] times the queries' rows.
  void add_to_keys(const uint16_t* a, const uint32_t* query_pairs, float* out) {
    pairs::multiply({.a = a,
                     .a_stride = kTile,
                     .b = query_pairs,
                     .b_stride = in_.width(),
                     .k = kTile,
                     .out = out,
                     .out_stride = in_.width(),
                     .rows = kTile,
                     .columns = in_.width(),
                     .add = true});
  }

  void store_queries(int64_t query) {
    const int64_t stride = in_.heads * in_.dim, count = std::min(kTile, sequence_.length - query);
    auto* out = reinterpret_cast<BF16*>(d_q_) + (sequence_.first + query) * stride + head_ * in_.dim;
    for (int64_t c = 0; c < count; ++c) {
      for (int64_t d = 0; d < in_.dim; ++d) store(workspace_.d_q[d * kTile + c], out + c * stride + d);
    }
  }

  const Inputs& in_;
  const Sequence& sequence_;
  int64_t head_;
  const Workspace& workspace_;
  const Gradients& out_;
  uint16_t* d_q_;
};

}  // namespace

void differentiate(const Inputs& in, const Sequence& sequence, int64_t head, const Gradients& out,
                   uint16_t* d_q) {
  thread_local Scratch scratch;
  int64_t bytes = 0;
  allocate(nullptr, in, sequence, &bytes);
  const Workspace workspace = allocate(scratch.get<char>(bytes), in, sequence, &bytes);
  Head(in, sequence, head, workspace, out, d_q).run();
}

}  // namespace fp8serve::attention_backward
