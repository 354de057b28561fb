// paged_attention: causal attention of new tokens over paged caches of FP32, BF16, FP16 or FP8, heads in
// groups.
//
// This file checks the op's arguments and cuts its work into tasks. A task is one sequence, up to 16 query
// tokens and one kv head (several adjacent ones, if one has few rows), and goes through the parts of its
// keys. If there would be fewer tasks than threads, the parts of a long sequence are separate tasks and are
// merged when all are done, with the same arithmetic and therefore the same bits. attention.h describes the
// order of every sum.
#include "cpu/attention.h"

#include <torch/csrc/stable/library.h>

#include <vector>

#include "check.h"
#include "cpu/features.h"
#include "cpu/scratch.h"
#include "cpu/tensors.h"
#include "cpu/vectormath.h"

namespace fp8serve {
namespace attention {
namespace {

constexpr int64_t kQueryTokens = 16;
constexpr int64_t kMaxRows = 64;  // query rows of a task with several heads, at most
constexpr int64_t kMaxHeads = 8;  // of a task
// Fewer products with keys finish before another thread wakes up.
constexpr int64_t kMinParallelProducts = 1 << 17;

// --- contract

struct Batch {
  Tensor q, out, k_cache, v_cache, tables, lengths, starts;
  std::optional<Tensor> sinks;
  int64_t window;
  float k_scale, v_scale, softmax_scale, softcap;
};

struct Task {
  int64_t sequence, kv_head, first, last;  // query tokens [first, last) of the sequence
};

// A thread's unit of work: a whole task, or one part of a task's keys, whose states are written to `memory`.
struct Piece {
  const Work* heads;
  int64_t count;
  float* memory;
  int64_t part;  // -1: all parts
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
          .cache = b.k_cache.scalar_type(),
          .window = b.window,
          .softcap = b.softcap,
          .sinks = b.sinks ? data<const float>(*b.sinks) + task.kv_head * group : nullptr};
}

// --- parts

// The parts of which some row of the task sees a key; `part` counts from the first of them.
int64_t first_part(const Work& w) { return w.first_key(0) / kPart; }
int64_t parts_of(const Work& w) { return (w.context + kPart - 1) / kPart - first_part(w); }
int64_t begin_of(const Work& w, int64_t part) { return (first_part(w) + part) * kPart; }
Keys keys_of(const Work& w, int64_t part) {
  const int64_t begin = begin_of(w, part), from = w.first_key(0) / kAligned * kAligned;
  return {std::max(begin, from), std::min(w.context, begin + kPart)};
}

// Merges the state of a part into that of the parts before it, for rows [first, last).
struct Join {
  static FP8_INLINE void run(const State* total, const State* part, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const float before = total->maximum[r], here = part->maximum[r], top = here > before ? here : before;
      const float old_factor = exp_of(before - top), new_factor = exp_of(here - top);
      const auto add = [&](float* sum, const float* values, int64_t count) {
        for (int64_t i = 0; i < count; ++i) sum[i] = sum[i] * old_factor + values[i] * new_factor;
      };
      add(total->out + r * total->width, part->out + r * total->width, total->width);
      add(total->sums + r * 16, part->sums + r * 16, 16);
      total->maximum[r] = top;
    }
  }
};

// Merges a sink into the state of the parts before it.
struct JoinSink {
  static FP8_INLINE void run(const State* total, const float* sinks, int64_t group) {
    for (int64_t r = 0; r < total->rows; ++r) {
      const float before = total->maximum[r], here = sinks[r % group], top = here > before ? here : before;
      const float old_factor = exp_of(before - top), new_factor = exp_of(here - top);
      for (int64_t i = 0; i < total->width; ++i) total->out[r * total->width + i] *= old_factor;
      for (int64_t i = 0; i < 16; ++i) total->sums[r * 16 + i] *= old_factor;
      total->sums[r * 16] += new_factor;
      total->maximum[r] = top;
    }
  }
};

// The states of a task's heads.
struct States {
  State head[kMaxHeads];

  static int64_t size(const Path& path, const Work& w) {
    return State::size(w.tokens * w.group, path.width(w.dim));
  }
  States(const Path& path, const Work& w, int64_t heads, float* memory) {
    for (int64_t i = 0; i < heads; ++i)
      head[i] = State::at(memory + i * size(path, w), w.tokens * w.group, path.width(w.dim));
  }
};

void join(const Piece& p, int64_t part, const States& total, const States& part_states) {
  for (int64_t i = 0; i < p.count; ++i) {
    const Work& w = p.heads[i];
    const int64_t begin = begin_of(w, part), first_new = w.first_row_past(begin);
    dispatch<Join>(&total.head[i], &part_states.head[i], w.first_row(begin), first_new);
    for (int64_t r = first_new; r < w.first_row_past(begin + kPart); ++r)
      total.head[i].copy_row(part_states.head[i], r);
  }
}

void finish(const Path& path, const Piece& p, const States& total) {
  for (int64_t i = 0; i < p.count; ++i) {
    const Work& w = p.heads[i];
    if (w.sinks != nullptr) dispatch<JoinSink>(&total.head[i], w.sinks, w.group);
    path.finish(w, total.head[i]);
  }
}

WorkItem work_item(const Piece& p, int64_t part) { return {p.heads, p.count, keys_of(*p.heads, part)}; }

void attend_task(const Path& path, const Piece& p, const WorkItem& next) {
  thread_local Scratch memory[2];
  const int64_t size = p.count * States::size(path, *p.heads), parts = parts_of(*p.heads);
  const States total(path, *p.heads, p.count, memory[0].get<float>(size));
  const States part_states(path, *p.heads, p.count, memory[1].get<float>(size));
  for (int64_t part = 0; part < parts; ++part) {
    const States& states = part == 0 ? total : part_states;
    path.attend(work_item(p, part), states.head, part + 1 < parts ? work_item(p, part + 1) : next);
    if (part > 0) join(p, part, total, part_states);
  }
  finish(path, p, total);
}

// --- pieces

// Returns the number of adjacent heads of a task: several if they have few rows, but not so many that a
// thread has no task.
int64_t heads_together(const Work& w, int64_t kv_heads, int64_t tasks) {
  const int64_t min_tasks = 2 * static_cast<int64_t>(torch::stable::get_num_threads());
  int64_t count = std::min({kv_heads, kMaxHeads, std::max<int64_t>(1, kMaxRows / (w.tokens * w.group))});
  while (count > 1 && tasks * ((kv_heads + count - 1) / count) < min_tasks) count /= 2;
  return count;
}

// All pieces of an op. A task with more than an equal share of all parts is cut into one piece per part.
// `cut` holds these pieces, those of a task next to each other.
struct Plan {
  std::vector<Piece> pieces, cut;
};

Plan plan(const Path& path, const std::vector<Work>& works) {
  thread_local Scratch states;
  const int64_t threads = static_cast<int64_t>(torch::stable::get_num_threads());
  const int64_t kv_heads = works.front().heads / works.front().group;
  const int64_t tasks = static_cast<int64_t>(works.size()) / kv_heads;
  int64_t all = 0, floats = 0;
  for (const Work& w : works) all += parts_of(w);
  const auto is_long = [&](const Work& w) { return parts_of(w) > 1 && parts_of(w) * threads > all; };
  for (const Work& w : works) floats += is_long(w) ? parts_of(w) * States::size(path, w) : 0;
  float* memory = states.get<float>(floats);
  Plan out;
  for (const Work* w = works.data(); w < works.data() + works.size();) {
    const int64_t head = (w - works.data()) % kv_heads;
    const int64_t count = std::min(heads_together(*w, kv_heads, tasks), kv_heads - head);
    if (!is_long(*w)) out.pieces.push_back({w, count, nullptr, -1});
    for (int64_t part = 0; is_long(*w) && part < parts_of(*w); ++part) {
      out.cut.push_back({w, count, memory, part});
      memory += count * States::size(path, *w);
    }
    w += count;
  }
  out.pieces.insert(out.pieces.begin(), out.cut.begin(), out.cut.end());  // the long ones first
  return out;
}

bool is_serial(const std::vector<Work>& works) {
  int64_t products = 0;
  for (const Work& w : works) products += w.tokens * w.group * (w.context - w.first_key(0)) * w.dim;
  return products < kMinParallelProducts;
}

void compute_piece(const Path& path, const Piece& p, const Piece* next) {
  const WorkItem next_item =
      next == nullptr ? WorkItem{} : work_item(*next, std::max<int64_t>(next->part, 0));
  if (p.part < 0) return attend_task(path, p, next_item);
  path.attend(work_item(p, p.part), States(path, *p.heads, p.count, p.memory).head, next_item);
}

void join_parts(const Path& path, const Piece* first) {
  const auto states = [&](int64_t part) {
    return States(path, *first->heads, first->count, first[part].memory);
  };
  for (int64_t part = 1; part < parts_of(*first->heads); ++part) join(*first, part, states(0), states(part));
  finish(path, *first, states(0));
}

void compute(const Path& path, const std::vector<Work>& works) {
  if (is_serial(works)) {
    for (const Work& w : works) attend_task(path, {&w, 1, nullptr, -1}, {});
    return;
  }
  const Plan schedule = plan(path, works);
  const auto count = static_cast<int64_t>(schedule.pieces.size());
  parallel_tasks(count, [&](int64_t i) {
    const Piece* p = schedule.pieces.data() + i;
    compute_piece(path, *p, i + 1 < count ? p + 1 : nullptr);
  });
  parallel_tasks(static_cast<int64_t>(schedule.cut.size()), [&](int64_t i) {
    if (schedule.cut[static_cast<size_t>(i)].part == 0) join_parts(path, schedule.cut.data() + i);
  });
}

// Variants for BF16 queries; other queries use those from the second on. attention_general.cpp dispatches
// by itself.
constexpr std::array<Variant, 4> kVariants{{{"avx512bf16", kAvx512Bf16, Numerics::tiles64_bf16},
                                            {"avx512", kAvx512, Numerics::tiles16_fp32},
                                            {"avx2", kAvx2, Numerics::tiles16_fp32},
                                            {"portable", kPortable, Numerics::tiles16_fp32}}};

Path path_of(const Batch& b) {
  const ScalarType query = b.q.scalar_type(), cache = b.k_cache.scalar_type();
  const bool short_enough = cache != ScalarType::Float && cache != ScalarType::Half;
  const bool takes_bf16 = query == ScalarType::BFloat16 && short_enough;
  return takes_bf16 && &best(kVariants) == &kVariants[0] ? bf16() : general(query, cache);
}

float scale_of(const Contract& check, const char* name, const std::optional<Tensor>& scale) {
  if (!scale) return 1.0f;
  check.tensor(name, *scale, {ScalarType::Float}, {});
  return *data<float>(*scale);
}

Tensor paged_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                       const Tensor& block_tables, const Tensor& context_lens, const Tensor& query_starts,
                       const std::optional<Tensor>& k_scale_inv, const std::optional<Tensor>& v_scale_inv,
                       double softmax_scale, std::optional<int64_t> window, std::optional<double> softcap,
                       const std::optional<Tensor>& sinks) {
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
  check.require(window.value_or(1) > 0, "window", "is ", window.value_or(1), ", must be positive");
  check.require(softcap.value_or(1) > 0, "softcap", "is ", softcap.value_or(1), ", must be positive");
  if (sinks) check.tensor("sinks", *sinks, {ScalarType::Float}, {heads});
  const Batch batch{.q = dense(q),
                    .out = empty({t.value(), heads.value(), dim.value()}, q.scalar_type()),
                    .k_cache = dense(k_cache),
                    .v_cache = dense(v_cache),
                    .tables = dense(block_tables),
                    .lengths = dense(context_lens),
                    .starts = dense(query_starts),
                    .sinks = sinks ? std::optional(dense(*sinks)) : std::nullopt,
                    .window = std::min(window.value_or(kNoWindow), kNoWindow),
                    .k_scale = scale_of(check, "k_scale_inv", k_scale_inv),
                    .v_scale = scale_of(check, "v_scale_inv", v_scale_inv),
                    .softmax_scale = static_cast<float>(softmax_scale),
                    .softcap = static_cast<float>(softcap.value_or(0))};
  check_sequences(check, batch);
  std::vector<Work> works;
  for (const Task& task : tasks_of(batch)) works.push_back(work_of(batch, task));
  if (batch.out.numel() > 0) compute(path_of(batch), works);
  return batch.out;
}

}  // namespace
}  // namespace attention
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("paged_attention", TORCH_BOX(&fp8serve::attention::paged_attention));
  fp8serve::report<fp8serve::attention::kVariants>("paged_attention");
}
