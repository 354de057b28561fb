// attention_backward: the gradients of causal attention within each sequence, of BF16.
//
// This file checks the op's arguments and distributes sequences and heads to the threads
// (attention_backward.h). The gradients of heads that share keys are summed in order, so that the bits depend
// neither on threads nor on other sequences.
#include "cpu/attention_backward.h"

#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "check.h"
#include "cpu/features.h"
#include "cpu/pair_product.h"
#include "cpu/scratch.h"
#include "cpu/tensors.h"

namespace fp8serve {
namespace attention_backward {
namespace {

// Sums the gradients of a group's heads in order and rounds the sums. `stride`: elements from a head to the
// next.
struct SumHeads {
  static FP8_INLINE void run(const float* from, int64_t group, int64_t stride, int64_t dim, BF16* out) {
    for (int64_t d = 0; d < dim; ++d) {
      float sum = 0.0f;
      for (int64_t g = 0; g < group; ++g) sum += from[g * stride + d];
      store(sum, out + d);
    }
  }
};

struct Outputs {
  uint16_t *q, *k, *v;
  float* sinks;
};

// The groups of heads are computed in batches of one to four heads per thread: four, unless their dK and dV,
// which are FP32 until they are summed, take more than kMaxFloats values.
constexpr int64_t kMaxFloats = 1 << 25;

class Backward {
 public:
  Backward(const Inputs& in, const std::vector<Sequence>& sequences, const Outputs& out)
      : in_(in), sequences_(sequences), out_(out) {
    for (const Sequence& s : sequences) size_ = std::max(size_, Gradients::size(s, in.width()));
  }

  void run() {
    thread_local Scratch gradients;
    const int64_t all = static_cast<int64_t>(sequences_.size()) * in_.kv_heads, group = in_.group();
    const int64_t threads = static_cast<int64_t>(torch::stable::get_num_threads());
    const int64_t tasks = std::clamp(kMaxFloats / size_, threads, 4 * threads);
    const int64_t group_count = std::min(all, (tasks + group - 1) / group);
    memory_ = gradients.get<float>(group_count * group * size_);
    for (int64_t first = 0; first < all; first += group_count)
      run_groups(first, std::min(all, first + group_count));
  }

 private:
  struct Group {
    const Sequence& sequence;
    int64_t kv_head;
  };
  Group group_at(int64_t i) const {
    return {sequences_[static_cast<size_t>(i / in_.kv_heads)], i % in_.kv_heads};
  }

  void run_groups(int64_t first, int64_t last) {
    const int64_t group = in_.group();
    parallel_tasks((last - first) * group, [&](int64_t task) {
      const Group g = group_at(first + task / group);
      const Gradients out = Gradients::at(memory_ + task * size_, g.sequence, in_.width());
      differentiate(in_, g.sequence, g.kv_head * group + task % group, out, out_.q);
    });
    parallel_tasks(last - first,
                   [&](int64_t i) { finish(group_at(first + i), memory_ + i * group * size_); });
    for (int64_t task = 0; in_.sinks != nullptr && task < (last - first) * group; ++task) {
      const Group g = group_at(first + task / group);
      out_.sinks[g.kv_head * group + task % group] +=
          *Gradients::at(memory_ + task * size_, g.sequence, in_.width()).sink;
    }
  }

  void finish(const Group& g, const float* heads) {
    const int64_t width = in_.width(), values = g.sequence.rows() * width;
    for (int64_t t = 0; t < g.sequence.length; ++t) {
      const int64_t to = ((g.sequence.first + t) * in_.kv_heads + g.kv_head) * in_.dim;
      const float* from = heads + t * width;
      dispatch<SumHeads>(from, in_.group(), size_, in_.dim, reinterpret_cast<BF16*>(out_.k) + to);
      dispatch<SumHeads>(from + values, in_.group(), size_, in_.dim, reinterpret_cast<BF16*>(out_.v) + to);
    }
  }

  const Inputs& in_;
  const std::vector<Sequence>& sequences_;
  const Outputs& out_;
  float* memory_ = nullptr;
  int64_t size_ = 0;
};

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_in, const Tensor& q_in,
                                                    const Tensor& k_in, const Tensor& v_in,
                                                    const std::vector<int64_t> lengths, double softmax_scale,
                                                    std::optional<int64_t> window,
                                                    std::optional<double> softcap,
                                                    const std::optional<Tensor>& sinks_in) {
  const Contract check("attention_backward");
  check.rank("q", q_in, 3);
  check.rank("k", k_in, 3);
  const Size t{"T", q_in.size(0)}, heads{"heads", q_in.size(1)}, dim{"head_dim", q_in.size(2)},
      kv_heads{"kv_heads", k_in.size(1)};
  for (const auto& [name, x, of] : {std::tuple{"grad", &grad_in, heads},
                                    {"q", &q_in, heads},
                                    {"k", &k_in, kv_heads},
                                    {"v", &v_in, kv_heads}})
    check.tensor(name, *x, {ScalarType::BFloat16}, {t, of, dim});
  check.require(kv_heads.value() > 0 && heads.value() % kv_heads.value() == 0, "q", "has ", heads.value(),
                " heads, must be a multiple of the ", kv_heads.value(), " of k");
  check.require(window.value_or(1) > 0, "window", "is ", window.value_or(1), ", must be positive");
  check.require(softcap.value_or(1) > 0, "softcap", "is ", softcap.value_or(1), ", must be positive");
  if (sinks_in) check.tensor("sinks", *sinks_in, {ScalarType::Float}, {heads});
  std::vector<Sequence> sequences;
  int64_t tokens = 0;
  for (const int64_t length : lengths) {
    check.require(length >= 0, "lengths", "holds ", length, ", must not be negative");
    if (length > 0) sequences.push_back({tokens, length});
    tokens += length;
  }
  check.require(tokens == t.value(), "lengths", "add up to ", tokens, ", must be T = ", t.value());

  const Tensor grad = dense(grad_in), q = dense(q_in), k = dense(k_in), v = dense(v_in);
  const std::optional<Tensor> sinks = sinks_in ? std::optional(dense(*sinks_in)) : std::nullopt;
  const Tensor d_q = empty({t.value(), heads.value(), dim.value()}, ScalarType::BFloat16),
               d_k = empty({t.value(), kv_heads.value(), dim.value()}, ScalarType::BFloat16),
               d_v = empty({t.value(), kv_heads.value(), dim.value()}, ScalarType::BFloat16),
               d_sinks = empty({heads.value()}, ScalarType::Float);
  std::fill_n(data<float>(d_sinks), heads.value(), 0.0f);
  const Inputs in{.q = data<const uint16_t>(q),
                  .k = data<const uint16_t>(k),
                  .v = data<const uint16_t>(v),
                  .grad = data<const uint16_t>(grad),
                  .sinks = sinks ? data<const float>(*sinks) : nullptr,
                  .heads = heads.value(),
                  .kv_heads = kv_heads.value(),
                  .dim = dim.value(),
                  .window = std::min(window.value_or(t.value() + 1), t.value() + 1),
                  .scale = static_cast<float>(softmax_scale),
                  .softcap = static_cast<float>(softcap.value_or(0))};
  if (q.numel() > 0)
    Backward(in, sequences,
             {data<uint16_t>(d_q), data<uint16_t>(d_k), data<uint16_t>(d_v), data<float>(d_sinks)})
        .run();
  return {d_q, d_k, d_v, d_sinks};
}

}  // namespace
}  // namespace attention_backward
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("attention_backward", TORCH_BOX(&fp8serve::attention_backward::backward));
  fp8serve::report<fp8serve::pairs::kVariants>("attention_backward");
}
