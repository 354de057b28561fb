// paged_attention: causal attention of new tokens over paged caches of FP32, BF16, FP16 or FP8, heads in
// groups.
//
// A task is one sequence, one kv head and up to 16 query tokens. It walks the sequence's keys in tiles of 16
// positions: the tile's keys and values become FP32 once and serve every query row of the task. attention.h
// says in which order sums are taken; nothing of it depends on the task's neighbours.
#include "cpu/attention.h"

#include <torch/csrc/stable/library.h>

#include <cmath>
#include <type_traits>
#include <vector>

#include "check.h"
#include "cpu/isa.h"
#include "cpu/tensors.h"
#include "cpu/vectormath.h"
#include "fp8.h"

namespace fp8serve {
namespace attention {
namespace {

constexpr int64_t kTile = 16;
constexpr int64_t kQueryTokens = 16;
constexpr int64_t kMaxDim = 512;

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

// Query rows of a task with their running softmax; padded to whole vectors.
struct Rows {
  float *q, *out, *maximum, *sum;
  int64_t count, width;  // width: dim rounded up to 16
};

FP8_INLINE float dot(const float* a, const float* b, int64_t width) {
  float lanes[16] = {};
  for (int64_t d = 0; d < width; d += 16) {
    for (int i = 0; i < 16; ++i) lanes[i] += a[d + i] * b[d + i];
  }
  return lane_sum(lanes);
}

// One query row and one tile: `seen` of its 16 keys are at or before the query's position.
FP8_INLINE void attend(const float* q, float* out, float* maximum, float* sum, const float* k, const float* v,
                       int64_t width, int64_t seen) {
  float weight[kTile];
  float top = *maximum;
  for (int j = 0; j < kTile; ++j) {
    weight[j] = j < seen ? dot(q, k + j * width, width) : -INFINITY;
    top = weight[j] > top ? weight[j] : top;
  }
  for (int j = 0; j < kTile; ++j) weight[j] = exp_of(weight[j] - top);
  const float correction = exp_of(*maximum - top);
  *maximum = top;
  *sum = *sum * correction + lane_sum(weight);
  for (int64_t d = 0; d < width; d += 16) {
    float lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = out[d + i] * correction;
    for (int j = 0; j < kTile && j < seen;
         ++j) {  // a NaN behind the query's position must not get in as 0 * NaN
      for (int i = 0; i < 16; ++i) lanes[i] += weight[j] * v[j * width + d + i];
    }
    for (int i = 0; i < 16; ++i) out[d + i] = lanes[i];
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

  static FP8_INLINE void run(const Work* work, const Rows* rows, float* k_tile, float* v_tile) {
    const Work& w = *work;
    const auto* q = static_cast<const Q*>(w.q);
    for (int64_t r = 0; r < rows->count; ++r) {
      const Q* from = q + (r / w.group * w.heads + r % w.group) * w.dim;
      for (int64_t d = 0; d < w.dim; ++d) rows->q[r * rows->width + d] = load(from[d]) * w.score_scale;
    }
    for (int64_t begin = 0; begin < w.context; begin += kTile) {
      const int64_t end = begin + kTile < w.context ? begin + kTile : w.context;
      gather(w, static_cast<const C*>(w.k), begin, end, rows->width, k_tile);
      gather(w, static_cast<const C*>(w.v), begin, end, rows->width, v_tile);
      for (int64_t r = 0; r < rows->count; ++r) {
        const int64_t position = w.context - w.tokens + r / w.group;
        if (position < begin) continue;
        attend(rows->q + r * rows->width, rows->out + r * rows->width, rows->maximum + r, rows->sum + r,
               k_tile, v_tile, rows->width, position - begin + 1);
      }
    }
    auto* out = static_cast<Q*>(w.out);
    for (int64_t r = 0; r < rows->count; ++r) {
      Q* to = out + (r / w.group * w.heads + r % w.group) * w.dim;
      for (int64_t d = 0; d < w.dim; ++d)
        store(rows->out[r * rows->width + d] / rows->sum[r] * w.value_scale, to + d);
    }
  }
};

template <class Q, class C>
void run(const Work& w) {
#if FP8_X86
  constexpr bool short_enough = std::is_same_v<Q, BF16> && sizeof(C) <= 2 && !std::is_same_v<C, F16>;
  if (short_enough && isa() == Isa::avx512bf16) return attend_bf16(w);
#endif
  const int64_t count = w.tokens * w.group, width = (w.dim + 15) / 16 * 16;
  float* memory_rows = memory.rows.get<float>(count * (2 * width + 2));
  std::fill_n(memory_rows, count * (2 * width + 2), 0.0f);
  const Rows rows{.q = memory_rows,
                  .out = memory_rows + count * width,
                  .maximum = memory_rows + 2 * count * width,
                  .sum = memory_rows + 2 * count * width + count,
                  .count = count,
                  .width = width};
  std::fill_n(rows.maximum, count, -INFINITY);
  float* tile = memory.tile.get<float>(2 * kTile * width);
  std::fill_n(tile, 2 * kTile * width, 0.0f);
  dispatch<Attend<Q, C>>(&w, &rows, tile, tile + kTile * width);
}

template <class F>
void with_cache(ScalarType dtype, const F& f) {
  if (dtype == ScalarType::Float8_e4m3fn) return f(Type<Code<E4M3>>{});
  if (dtype == ScalarType::Float8_e5m2) return f(Type<Code<E5M2>>{});
  with_element(dtype, f);
}

// --- contract

struct Batch {
  Tensor q, out, k_cache, v_cache, tables, lengths, starts;
  float k_scale, v_scale, softmax_scale;
};

struct Task {
  int64_t sequence, kv_head, first, last;  // query tokens [first, last) of the sequence
};

void check_sequences(const Contract& check, const Batch& b) {
  const auto* lengths = data<const int32_t>(b.lengths);
  const auto* starts = data<const int32_t>(b.starts);
  const auto* table = data<const int32_t>(b.tables);
  const int64_t width = b.tables.size(1), size = b.k_cache.size(1), blocks = b.k_cache.size(0);
  check.require(starts[0] == 0 && starts[b.lengths.numel()] == b.q.size(0), "query_starts",
                "must run from 0 to the ", b.q.size(0), " rows of q");
  for (int64_t s = 0; s < b.lengths.numel(); ++s) {
    const int64_t tokens = static_cast<int64_t>(starts[s + 1]) - starts[s];
    check.require(tokens >= 0 && tokens <= lengths[s], "context_lens", "sequence ", s, " has ", lengths[s],
                  " tokens, fewer than its ", tokens, " queries");
    const int64_t used = (lengths[s] + size - 1) / size;
    check.require(used <= width, "block_tables", "holds ", width, " blocks, sequence ", s, " needs ", used);
    for (int64_t i = 0; i < used && tokens > 0; ++i) {
      const int32_t block = table[s * width + i];
      check.require(block >= 0 && block < blocks, "block_tables", "block ", block, " of sequence ", s,
                    " is not one of the cache's ", blocks);
    }
  }
}

std::vector<Task> tasks_of(const Batch& b) {
  std::vector<Task> tasks;
  const auto* starts = data<const int32_t>(b.starts);
  for (int64_t s = 0; s < b.lengths.numel(); ++s) {
    const int64_t tokens = starts[s + 1] - starts[s];
    for (int64_t first = 0; first < tokens; first += kQueryTokens) {
      for (int64_t h = 0; h < b.k_cache.size(2); ++h)
        tasks.push_back({s, h, first, std::min(tokens, first + kQueryTokens)});
    }
  }
  return tasks;
}

Work work_of(const Batch& b, const Task& task) {
  const int64_t heads = b.q.size(1), dim = b.q.size(2), kv_heads = b.k_cache.size(2),
                group = heads / kv_heads;
  const auto* starts = data<const int32_t>(b.starts);
  const int64_t row = ((starts[task.sequence] + task.first) * heads + task.kv_head * group) * dim;
  const int64_t q_bytes = static_cast<int64_t>(b.q.element_size()),
                bytes = static_cast<int64_t>(b.k_cache.element_size());
  const int64_t after =
      starts[task.sequence + 1] - starts[task.sequence] - task.last;  // queries of later tasks
  return {.q = data<const char>(b.q) + row * q_bytes,
          .out = data<char>(b.out) + row * q_bytes,
          .k = data<const char>(b.k_cache) + task.kv_head * dim * bytes,
          .v = data<const char>(b.v_cache) + task.kv_head * dim * bytes,
          .blocks = data<const int32_t>(b.tables) + task.sequence * b.tables.size(1),
          .block_size = b.k_cache.size(1),
          .token_stride = kv_heads * dim,
          .tokens = task.last - task.first,
          .context = data<const int32_t>(b.lengths)[task.sequence] - after,
          .heads = heads,
          .group = group,
          .dim = dim,
          .score_scale = b.softmax_scale * b.k_scale,
          .value_scale = b.v_scale,
          .cache = b.k_cache.scalar_type()};
}

void compute(const Batch& b) {
  const std::vector<Task> tasks = tasks_of(b);
  with_element(b.q.scalar_type(), [&](auto query) {
    with_cache(b.k_cache.scalar_type(), [&](auto cache) {
      parallel_tasks(static_cast<int64_t>(tasks.size()), [&](int64_t i) {
        run<typename decltype(query)::type, typename decltype(cache)::type>(
            work_of(b, tasks[static_cast<size_t>(i)]));
      });
    });
  });
}

float scale_of(const Contract& check, const char* name, const std::optional<Tensor>& scale) {
  if (!scale) return 1.0f;
  check.tensor(name, *scale, {ScalarType::Float}, {});
  return *data<float>(*scale);
}

Tensor paged_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                       const Tensor& block_tables, const Tensor& context_lens, const Tensor& query_starts,
                       const std::optional<Tensor>& k_scale_inv, const std::optional<Tensor>& v_scale_inv,
                       double softmax_scale) {
  const Contract check("paged_attention");
  const auto high = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
  const auto stored = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half, ScalarType::Float8_e4m3fn,
                       ScalarType::Float8_e5m2};
  check.rank("q", q, 3);
  const Size t{"T", q.size(0)}, heads{"heads", q.size(1)}, dim{"head_dim", q.size(2)};
  check.tensor("q", q, high, {t, heads, dim});
  check.require(dim.value() <= kMaxDim, "q", "head_dim is ", dim.value(), ", must be at most ", kMaxDim);
  check.rank("k_cache", k_cache, 4);
  const Size blocks{"blocks", k_cache.size(0)}, size{"block_size", k_cache.size(1)},
      kv_heads{"kv_heads", k_cache.size(2)};
  check.tensor("k_cache", k_cache, stored, {blocks, size, kv_heads, dim});
  check.tensor("v_cache", v_cache, {k_cache.scalar_type()}, {blocks, size, kv_heads, dim});
  check.require(kv_heads.value() > 0 && heads.value() % kv_heads.value() == 0, "q", "has ", heads.value(),
                " heads, must be a multiple of the cache's ", kv_heads.value());
  check.rank("context_lens", context_lens, 1);
  const Size sequences{"S", context_lens.size(0)};
  check.tensor("context_lens", context_lens, {ScalarType::Int}, {sequences});
  check.rank("block_tables", block_tables, 2);
  check.tensor("block_tables", block_tables, {ScalarType::Int},
               {sequences, {"max_blocks", block_tables.size(1)}});
  check.tensor("query_starts", query_starts, {ScalarType::Int}, {{"S + 1", sequences.value() + 1}});
  const Batch batch{.q = dense(q),
                    .out = empty({t.value(), heads.value(), dim.value()}, q.scalar_type()),
                    .k_cache = dense(k_cache),
                    .v_cache = dense(v_cache),
                    .tables = dense(block_tables),
                    .lengths = dense(context_lens),
                    .starts = dense(query_starts),
                    .k_scale = scale_of(check, "k_scale_inv", k_scale_inv),
                    .v_scale = scale_of(check, "v_scale_inv", v_scale_inv),
                    .softmax_scale = static_cast<float>(softmax_scale)};
  check_sequences(check, batch);
  if (batch.out.numel() > 0) compute(batch);
  return batch.out;
}

}  // namespace
}  // namespace attention
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("paged_attention", TORCH_BOX(&fp8serve::attention::paged_attention));
}
