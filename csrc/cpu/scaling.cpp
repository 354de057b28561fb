// delayed_update: the delayed-scaling step of any number of tensors in one call (docs/numerics.md, "Delayed
// scaling").
//
// State per tensor: scale FP32 [], amax_history FP32 [N] (0 staging, 1 oldest, N-1 newest), nonfinite and
// steps int64 []. All in place. A thousand states of 1024 entries are 4 MiB: one thread's work of about a
// millisecond at most.
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/features.h"
#include "cpu/tensors.h"
#include "fp8.h"

namespace fp8serve {
namespace {

using Tensors = std::vector<Tensor>;

// Step 3 of docs/numerics.md; an amax that is zero or not finite leaves the scale alone.
void rescale(float* scale, float amax, float limit) {
  if (!(amax > 0.0f) || !std::isfinite(amax)) return;
  *scale = std::min(limit / amax, std::bit_cast<float>(kInfinity - 1));
}

// Step 4: new[0] = 0, new[N-1] = old[0], the rest one place older.
void rotate(float* history, int64_t n) {
  const float staged = history[0];
  if (n > 1) {
    std::copy(history + 2, history + n, history + 1);
    history[n - 1] = staged;
  }
  history[0] = 0.0f;
}

void check_state(const Contract& check, const Tensor& scale, const Tensor& history, const Tensor& nonfinite,
                 const Tensor& steps) {
  check.tensor("scales", scale, {ScalarType::Float}, {});
  check.cpu("amax_histories", history);
  check.dtype("amax_histories", history, {ScalarType::Float});
  check.rank("amax_histories", history, 1);
  check.require(history.size(0) > 0, "amax_histories", "is empty, must hold at least the staging slot");
  check.require(history.is_contiguous(), "amax_histories", "must be contiguous");
  check.tensor("nonfinite", nonfinite, {ScalarType::Long}, {});
  check.tensor("steps", steps, {ScalarType::Long}, {});
}

void delayed_update(const Tensors scales, const Tensors histories, const Tensors nonfinite,
                    const Tensors steps, const std::vector<double> fp8_maxes, int64_t margin,
                    int64_t interval, std::string algo) {
  const Contract check("delayed_update");
  const size_t states = scales.size();
  const bool aligned = histories.size() == states && nonfinite.size() == states && steps.size() == states &&
                       fp8_maxes.size() == states;
  check.require(aligned, "scales", "holds ", states, " states, and every other list must hold as many");
  check.require(algo == "max" || algo == "most_recent", "algo", "is '", algo,
                "', must be max or most_recent");
  check.require(interval > 0, "interval", "is ", interval, ", must be at least 1");
  for (size_t i = 0; i < states; ++i) {
    check_state(check, scales[i], histories[i], nonfinite[i], steps[i]);
    float* history = data<float>(histories[i]);
    const int64_t n = histories[i].size(0);
    const float staged = history[0];
    if (!std::isfinite(staged)) {  // step 6: dropped and counted, the scale stays
      *data<int64_t>(nonfinite[i]) += 1;
      history[0] = 0.0f;
      continue;
    }
    if (!(staged > 0.0f)) {  // step 5: the module did not run
      history[0] = 0.0f;
      continue;
    }
    int64_t& step = *data<int64_t>(steps[i]);
    const float amax = algo == "max" ? *std::max_element(history, history + n) : staged;
    if (step % interval == 0)
      rescale(data<float>(scales[i]), amax,
              static_cast<float>(std::ldexp(fp8_maxes[i], static_cast<int>(-margin))));
    rotate(history, n);
    step += 1;
  }
}

}  // namespace
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("delayed_update", TORCH_BOX(&fp8serve::delayed_update));
  fp8serve::report<fp8serve::kPlain>("delayed_update");
}
