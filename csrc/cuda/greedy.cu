// greedy_tokens: returns for each row of logits the token with the largest logit, the first of equal ones,
// or -1 if the largest is not finite. It is one launch for logits of any type.
//
// Each row has one block. A logit and its token are packed into a 64-bit number. The order of these numbers
// is that of the logits, with NaN above all, and among equal logits the reverse order of the tokens, so
// their maximum does not depend on the order of the reduction.
#include <torch/csrc/stable/library.h>

#include "cuda/rows.h"

namespace fp8serve {
namespace {

constexpr int kThreads = 1024;
constexpr uint32_t kMinusInfinity = 0x007fffff, kInfinity = 0xff800000;  // as ordered() returns them

using Candidate = unsigned long long;  // a logit, and its token

// Returns bits whose unsigned order is that of the logits.
__device__ __forceinline__ uint32_t ordered(float logit) {
  if (isnan(logit)) return 0xffffffff;
  const uint32_t bits = __float_as_uint(logit + 0.0f);  // -0 becomes +0
  return (bits & 0x80000000) != 0 ? ~bits : bits | 0x80000000;
}

__device__ __forceinline__ int64_t token_of(Candidate best) {
  const auto logit = static_cast<uint32_t>(best >> 32);
  const bool finite = logit > kMinusInfinity && logit < kInfinity;
  return finite ? static_cast<int64_t>(0xffffffff - static_cast<uint32_t>(best)) : -1;
}

__device__ __forceinline__ Candidate lanes_best(Candidate best) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) best = max(best, __shfl_xor_sync(kAllLanes, best, step));
  return best;
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads) find_best(const T* logits, int64_t vocab, int64_t* out) {
  after_earlier_kernels();
  __shared__ Candidate of_warp[kThreads / 32];
  const int64_t row = blockIdx.x;
  Candidate best = 0;
  for (int64_t at = static_cast<int64_t>(threadIdx.x) * kChunk; at < vocab; at += kThreads * kChunk) {
    const Chunk chunk = load_chunk<kAligned>(logits + row * vocab, at, vocab);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const auto token = static_cast<uint32_t>(at + i);
      const Candidate one = static_cast<Candidate>(ordered(chunk.value[i])) << 32 | (0xffffffff - token);
      if (kAligned || at + i < vocab) best = max(best, one);
    }
  }
  best = lanes_best(best);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  best = lanes_best(threadIdx.x < kThreads / 32 ? of_warp[threadIdx.x] : 0);
  if (threadIdx.x == 0) out[row] = token_of(best);
}

Tensor greedy_tokens(const Tensor& logits_in) {
  const DeviceContract check("greedy_tokens", logits_in);
  check.rank("logits", logits_in, 2);
  const Size rows{"rows", logits_in.size(0)}, vocab{"vocab", logits_in.size(1)};
  check.tensor("logits", logits_in, kHigh, {rows, vocab});
  check.require(vocab.value() > 0, "logits", "have no tokens to choose from");
  check.require(vocab.value() < 0xffffffff, "logits", "have more tokens than 32 bits can count");
  const OnDevice device(logits_in);
  const Tensor logits = dense(logits_in), out = empty(logits, {rows.value()}, ScalarType::Long);
  if (rows.value() == 0) return out;
  const bool fast = vocab.value() % kChunk == 0 && aligned(logits.data_ptr(), 16);
  with_element(logits.scalar_type(), [&](auto element) {
    using T = typename decltype(element)::type;
    launch_early(fast ? find_best<T, true> : find_best<T, false>, rows.value(), kThreads, 0, device.stream(),
                 data<T>(logits), vocab.value(), data<int64_t>(out));
  });
  return out;
}

}  // namespace
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(FP8SERVE_OPS, FP8SERVE_DEVICE_KEY, m) {
  m.impl("greedy_tokens", TORCH_BOX(&fp8serve::greedy_tokens));
}
