// delayed_update: the delayed-scaling step of many tensors, up to 800 in one launch (docs/numerics.md,
// "Delayed scaling").
//
// State per tensor: scale FP32 [], amax_history FP32 [N] (0 staging, 1 oldest, N-1 newest), nonfinite and
// steps int64 []. A block updates one state. The states are scattered over memory. Their addresses are passed
// as kernel arguments (those of 800 states take 32 KB, the limit for arguments), so that nothing is copied to
// the device and nothing waits for the host.
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <string>
#include <vector>

#include "cuda/cast.h"

namespace fp8serve {
namespace {

constexpr int kThreads = 256;
constexpr float kLargest = 3.4028234663852886e38f;

struct State {
  float *scale, *history;
  int64_t *nonfinite, *steps;
  float limit;  // fp8_max / 2^margin
  int length;
};

template <int kCapacity>
struct States {
  State state[kCapacity];
  int64_t interval;
  bool most_recent;
};

// In place, kThreads at a time: new[0] = 0, new[N-1] = staged, new[i] = old[i+1].
__device__ __forceinline__ void rotate(float* history, int length, float staged) {
  for (int base = 1; base < length - 1; base += kThreads) {
    const int to = base + static_cast<int>(threadIdx.x);
    const float value = to + 1 < length ? history[to + 1] : 0.0f;
    __syncthreads();  // all slots that are written here or in later iterations have been read
    if (to + 1 < length) history[to] = value;
  }
  if (threadIdx.x == 0) {
    if (length > 1) history[length - 1] = staged;
    history[0] = 0.0f;
  }
}

template <int kCapacity>
__global__ void __launch_bounds__(kThreads) update(const __grid_constant__ States<kCapacity> states) {
  __shared__ float memory[32];
  const State& s = states.state[blockIdx.x];
  const bool first = threadIdx.x == 0;
  const float staged = s.history[0];
  float amax = 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < s.length; i += kThreads) amax = fmaxf(amax, s.history[i]);
  amax = block_max(amax, memory);  // all threads have read what is written below
  // A staged amax that is not finite is dropped and counted. A staged 0 means that the module did not run.
  if (!isfinite(staged) || !(staged > 0.0f)) {
    if (first && !isfinite(staged)) *s.nonfinite += 1;
    if (first) s.history[0] = 0.0f;
    return;
  }
  if (states.most_recent) amax = staged;
  if (first) {
    const int64_t step = *s.steps;
    if (step % states.interval == 0 && isfinite(amax)) *s.scale = fminf(s.limit / amax, kLargest);
    *s.steps = step + 1;
  }
  rotate(s.history, s.length, staged);
}

using Tensors = std::vector<Tensor>;

void check_state(const DeviceContract& check, const Tensor& scale, const Tensor& history,
                 const Tensor& nonfinite, const Tensor& steps) {
  check.tensor("scales", scale, {ScalarType::Float}, {});
  check.here("amax_histories", history);
  check.dtype("amax_histories", history, {ScalarType::Float});
  check.rank("amax_histories", history, 1);
  check.require(history.size(0) > 0, "amax_histories", "is empty, must hold at least the staging slot");
  check.require(history.is_contiguous(), "amax_histories", "must be contiguous");
  check.tensor("nonfinite", nonfinite, {ScalarType::Long}, {});
  check.tensor("steps", steps, {ScalarType::Long}, {});
}

template <int kCapacity>
void launch_update(const std::vector<State>& all, size_t begin, size_t count, int64_t interval,
                   bool most_recent, Stream stream) {
  States<kCapacity> states{};
  std::copy_n(all.begin() + static_cast<std::ptrdiff_t>(begin), count, states.state);
  states.interval = interval;
  states.most_recent = most_recent;
  launch(update<kCapacity>, static_cast<unsigned>(count), kThreads, 0, stream, states);
}

void delayed_update(const Tensors scales, const Tensors histories, const Tensors nonfinite,
                    const Tensors steps, const std::vector<double> fp8_maxes, int64_t margin,
                    int64_t interval, std::string algo) {
  const size_t count = scales.size();
  if (count == 0) return;
  const DeviceContract check("delayed_update", scales[0]);
  const bool same_length = histories.size() == count && nonfinite.size() == count && steps.size() == count &&
                           fp8_maxes.size() == count;
  check.require(same_length, "scales", "holds ", count, " states, and every other list must hold as many");
  check.require(algo == "max" || algo == "most_recent", "algo", "is '", algo,
                "', must be max or most_recent");
  check.require(interval > 0, "interval", "is ", interval, ", must be at least 1");
  std::vector<State> all;
  all.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    check_state(check, scales[i], histories[i], nonfinite[i], steps[i]);
    all.push_back({data<float>(scales[i]), data<float>(histories[i]), data<int64_t>(nonfinite[i]),
                   data<int64_t>(steps[i]),
                   static_cast<float>(std::ldexp(fp8_maxes[i], static_cast<int>(-margin))),
                   static_cast<int>(histories[i].size(0))});
  }
  const OnDevice device(scales[0]);
  constexpr size_t kFew = 96, kMany = 800;
  for (size_t begin = 0; begin < count; begin += kMany) {
    const size_t part = std::min(kMany, count - begin);
    part <= kFew ? launch_update<kFew>(all, begin, part, interval, algo == "most_recent", device.stream())
                 : launch_update<kMany>(all, begin, part, interval, algo == "most_recent", device.stream());
  }
}

}  // namespace
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(FP8SERVE_OPS, FP8SERVE_DEVICE_KEY, m) {
  m.impl("delayed_update", TORCH_BOX(&fp8serve::delayed_update));
}
