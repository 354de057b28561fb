// choose_experts: selects each token's experts and computes their weights from the router's logits, in one
// pass. Composed of torch's ops, it was seven calls per layer, which took longer than the router's product at
// decoding.
//
// Every instruction set gives the same bits: no sum precedes the comparisons, and the weights are made of our
// own exponential (vectormath.h).
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <optional>
#include <tuple>

#include "check.h"
#include "cpu/features.h"
#include "cpu/rows.h"
#include "cpu/tensors.h"
#include "cpu/vectormath.h"

namespace fp8serve {
namespace {

constexpr int64_t kElements = 16;  // a logit takes as long as this many elements of another op
constexpr auto kFloats = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};

enum Scores : int64_t { kSoftmax, kSigmoid, kSoftmaxOfChosen };

struct Routing {
  int64_t experts, count, scores, groups, kept;
  bool normalizes;
  float scale;
  const float* correction;  // of each expert, or none
};

// Replaces x by e^(x - max(x)) and computes the sum, as 16 running sums.
struct Exponentials {
  static FP8_INLINE void run(float* x, int64_t n, float* sum) {
    float highest = -kTooLarge;
    for (int64_t i = 0; i < n; ++i) highest = x[i] > highest ? x[i] : highest;
    float lanes[16] = {};
    const int64_t whole = n / 16 * 16;
    for (int64_t i = 0; i < n; ++i) x[i] = exp_of(x[i] - highest);
    for (int64_t i = 0; i < whole; i += 16) {
      for (int j = 0; j < 16; ++j) lanes[j] += x[i + j];
    }
    for (int64_t i = whole; i < n; ++i) lanes[i - whole] += x[i];
    *sum = lane_sum(lanes);
  }
};

struct Sigmoids {
  static FP8_INLINE void run(float* x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x[i] = 1.0f / (1.0f + exp_of(-x[i]));
  }
};

bool is_above(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

// Returns the indices of the `count` largest of x [n], in descending order; of equal values the first.
void largest(const float* x, int64_t n, int64_t count, int64_t* places) {
  for (int64_t i = 0, size = 0; i < n; ++i) {
    if (size == count && !is_above(x[i], x[places[count - 1]])) continue;
    int64_t at = size < count ? size++ : count - 1;
    for (; at > 0 && is_above(x[i], x[places[at - 1]]); --at) places[at] = places[at - 1];
    places[at] = i;
  }
}

// Sets the scores `by` of experts outside of the best groups to -inf.
void leave_best_groups(const Routing& routing, float* by) {
  const int64_t size = routing.experts / routing.groups, best = routing.scores == kSigmoid ? 2 : 1;
  std::vector<float> values(static_cast<size_t>(routing.groups));
  std::vector<int64_t> kept(static_cast<size_t>(routing.kept));
  for (int64_t g = 0; g < routing.groups; ++g) {
    int64_t places[2] = {};
    const float* group = by + g * size;
    largest(group, size, best, places);
    values[static_cast<size_t>(g)] = group[places[0]] + (best == 2 ? group[places[1]] : 0.0f);
  }
  largest(values.data(), routing.groups, routing.kept, kept.data());
  for (int64_t g = 0; g < routing.groups; ++g) {
    const bool stays = std::find(kept.begin(), kept.end(), g) != kept.end();
    if (!stays) std::fill_n(by + g * size, size, -kTooLarge);
  }
}

// Selects the experts of one token and computes their `weights` [count]. Overwrites the logits [E]; `by` [E]
// is scratch memory.
void choose(const Routing& routing, float* logits, float* by, int64_t* chosen, float* weights) {
  const int64_t n = routing.experts, count = routing.count;
  if (routing.scores == kSigmoid) dispatch<Sigmoids>(logits, n);
  for (int64_t e = 0; e < n; ++e) by[e] = logits[e] + (routing.correction ? routing.correction[e] : 0.0f);
  if (routing.kept < routing.groups) leave_best_groups(routing, by);
  largest(by, n, count, chosen);
  float sum = 1.0f;
  if (routing.scores == kSoftmax) dispatch<Exponentials>(logits, n, &sum);
  for (int64_t j = 0; j < count; ++j) weights[j] = logits[chosen[j]];
  if (routing.scores == kSoftmaxOfChosen) dispatch<Exponentials>(weights, count, &sum);
  for (int64_t j = 0; j < count; ++j) weights[j] /= sum;
  if (routing.normalizes) {
    float total = 0.0f;
    for (int64_t j = 0; j < count; ++j) total += weights[j];
    for (int64_t j = 0; j < count; ++j) weights[j] /= total;
  }
  for (int64_t j = 0; j < count; ++j) weights[j] *= routing.scale;
}

// Chooses the experts of a row, with logits and weights of any type.
template <class In, class Out>
void choose_row(const Routing& routing, const In* logits, int64_t* chosen, Out* weights) {
  std::vector<float> scratch(static_cast<size_t>(2 * routing.experts + routing.count));
  float *row = scratch.data(), *by = row + routing.experts, *best = by + routing.experts;
  for (int64_t i = 0; i < routing.experts; ++i) row[i] = load(logits[i]);
  choose(routing, row, by, chosen, best);
  for (int64_t j = 0; j < routing.count; ++j) store(best[j], weights + j);
}

void check_routing(const Contract& check, const Routing& routing) {
  const auto [experts, count, scores, groups, kept, normalizes, scale, correction] = routing;
  check.require(scores >= kSoftmax && scores <= kSoftmaxOfChosen, "scores", "is ", scores,
                ", must be 0 to 2");
  check.require(groups > 0 && experts % groups == 0, "groups", "is ", groups, ", must divide E = ", experts);
  const int64_t size = experts / groups, least = scores == kSigmoid && kept < groups ? 2 : 1;
  check.require(kept > 0 && kept <= groups && size >= least, "kept", "is ", kept, ", must be at most ",
                groups, ", of groups of two experts or more");
  check.require(count > 0 && count <= kept * size, "count", "is ", count, ", must be at most ", kept * size);
}

std::tuple<Tensor, Tensor> choose_experts(const Tensor& logits_in, const std::optional<Tensor>& correction_in,
                                          int64_t count, int64_t scores, int64_t groups, int64_t kept,
                                          bool normalizes, double scale, ScalarType dtype) {
  const Contract check("choose_experts");
  check.rank("logits", logits_in, 2);
  const Size t{"T", logits_in.size(0)}, e{"E", logits_in.size(1)};
  check.tensor("logits", logits_in, kFloats, {t, e});
  if (correction_in) check.tensor("correction", *correction_in, {ScalarType::Float}, {e});
  check.require(std::find(kFloats.begin(), kFloats.end(), dtype) != kFloats.end(), "dtype",
                "must be float, bfloat16 or half");
  const Tensor logits = dense(logits_in), correction = correction_in ? dense(*correction_in) : Tensor();
  const auto* corrections = correction_in ? data<const float>(correction) : nullptr;
  const Routing routing{e.value(),  count, scores, groups, kept, normalizes, static_cast<float>(scale),
                        corrections};
  check_routing(check, routing);
  const Tensor chosen = empty({t.value(), count}, ScalarType::Long);
  const Tensor weights = empty({t.value(), count}, dtype);
  with_element(logits.scalar_type(), [&](auto in) {
    with_element(dtype, [&](auto out) {
      const auto* from = data<const typename decltype(in)::type>(logits);
      auto* to = data<typename decltype(out)::type>(weights);
      parallel_rows(t.value(), kElements * e.value(), [&](int64_t r) {
        choose_row(routing, from + r * e.value(), data<int64_t>(chosen) + r * count, to + r * count);
      });
    });
  });
  return {chosen, weights};
}

}  // namespace
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("choose_experts", TORCH_BOX(&fp8serve::choose_experts));
  fp8serve::report<fp8serve::kVector<fp8serve::Numerics::last_bit>>("choose_experts");
}
