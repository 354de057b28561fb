// count_saturated: what serving keeps of every FP8 input, its largest magnitude and how many elements were
// cut off. One launch for both; the codes are read only in the rare step whose amax lies beyond the limit,
// which the kernel sees without the host.
#include <torch/csrc/stable/library.h>

#include "cuda/cast.h"
#include "watch.h"

namespace fp8serve {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 64;  // enough for the codes of a decoding step; a prompt that saturates waits longer

struct Watch {
  const uint8_t* q;
  const float* amax;
  float* seen;
  int64_t* saturated;
  const int64_t* rows;  // null for all
  int64_t count, width;
  float limit;
};

__global__ void __launch_bounds__(kThreads) count(const __grid_constant__ Watch w) {
  __shared__ float memory[32];
  const float amax = *w.amax;
  const bool first = blockIdx.x == 0 && threadIdx.x == 0;
  if (first) *w.seen = fmaxf(*w.seen, amax);
  if (!(amax > w.limit)) return;
  const int64_t live = w.rows == nullptr ? w.count : min(w.count, *w.rows * w.width);
  unsigned found = 0;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < live;
       at += static_cast<int64_t>(gridDim.x) * kThreads) {
    found += (w.q[at] & 0x7f) == 0x7e;
  }
  const float total = block_sum(static_cast<float>(found), memory);  // exact: below 2^24 in a block
  if (threadIdx.x == 0 && total > 0.0f) {
    atomicAdd(reinterpret_cast<unsigned long long*>(w.saturated), static_cast<unsigned long long>(total));
  }
}

void count_saturated(const Tensor& q_in, const Tensor& amax, const Tensor& seen, const Tensor& saturated,
                     double limit, const std::optional<Tensor>& rows) {
  const DeviceContract check("count_saturated", q_in);
  check_counters(check, q_in, amax, seen, saturated, rows);
  const OnDevice device(q_in);
  const Tensor q = dense(q_in);
  const int64_t blocks = std::max<int64_t>(1, ceil_over(q.numel(), kThreads * 64));
  const Watch w{.q = data<const uint8_t>(q),
                .amax = data<const float>(amax),
                .seen = data<float>(seen),
                .saturated = data<int64_t>(saturated),
                .rows = rows ? data<const int64_t>(*rows) : nullptr,
                .count = q.numel(),
                .width = q.size(1),
                .limit = static_cast<float>(limit)};
  launch(count, static_cast<unsigned>(std::min<int64_t>(blocks, kBlocks)), kThreads, 0, device.stream(), w);
}

}  // namespace
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(FP8SERVE_OPS, FP8SERVE_DEVICE_KEY, m) {
  m.impl("count_saturated", TORCH_BOX(&fp8serve::count_saturated));
}
