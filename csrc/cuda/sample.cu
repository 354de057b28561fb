// sample: logits become one token each, after temperature, top_k, top_p and min_p.
//
// A row of logits is divided into parts, with a block for each; the blocks of all rows together fill the
// chip. Six launches read the row. The first finds the largest logit. Two for top_k and two for top_p find
// the border of the tokens that the filter keeps, and return at once for rows without this filter. The last
// one adds up the weights of the kept tokens, and the last of a row's blocks to arrive draws the token.
//
// Nothing is sorted. The border of top_k or top_p is a logit and, of the tokens with exactly this logit, how
// many are kept, in the order of their ids. The filter's first launch counts the tokens in each of 1024 bins
// by distance from the largest logit, and for top_p adds up their weights. The second lists the tokens in the
// bin that contains the border, which are few. Every block of the launch after it finds the border among
// those. top_p sees only the tokens that top_k keeps. (min_p compares weights, and needs no search.) The draw
// inverts the cumulative distribution of the kept tokens: the parts' sums select the part, the sums of
// threads the token.
//
// Weights are FP64 as in the reference. Their sums are integers (sample_mass.h), which are exact in any
// order: neither the division into parts nor the order of atomic operations changes the result, and a row
// gives the same token in any batch. A token differs from the reference's only if the random number is within
// some 1e-15 of the boundary between two tokens. (Two logits may be so close that their FP64 weights are
// equal. Here and on the CPU the larger logit still comes first; the reference treats the two as equal.)
#include <torch/csrc/stable/library.h>

#include "cuda/sample_row.h"
#include "sample.h"

namespace fp8serve {
namespace sampling {
namespace {

constexpr int kThreads = 512;
constexpr uint32_t kLeastPart = 2048;  // tokens, unless the row is shorter

// All kernels have a block for each part (blockIdx.y) of each row (blockIdx.x).
__global__ void __launch_bounds__(kThreads) find_ranges(const __grid_constant__ Draws draws) {
  after_earlier_kernels();
  __shared__ Shared shared;
  const float* logits = draws.logits + static_cast<int64_t>(blockIdx.x) * draws.vocab;
  const uint32_t begin = blockIdx.y * draws.part, end = min(draws.vocab, begin + draws.part);
  const Range range = find_range(shared, [&](const auto& f) { for_each(logits, begin, end, f); });
  Work& work = draws.work[blockIdx.x];
  const uint32_t self = blockIdx.y * blockDim.x + threadIdx.x;
  if (threadIdx.x == 0) work.ranges[blockIdx.y] = range;
  if (self == 0) work.steps[kTopK].listed = work.steps[kTopP].listed = work.arrived = 0;
  for (uint32_t b = self; b < kBins; b += gridDim.y * blockDim.x) {
    work.steps[kTopK].bins[b] = work.steps[kTopP].bins[b] = {{0, 0}, 0};
  }
}

template <int kFilter>
__global__ void __launch_bounds__(kThreads, 2) count(const __grid_constant__ Draws draws) {
  after_earlier_kernels();
  __shared__ Shared shared;
  if (draws.wants(kFilter)) Row(draws, shared).template count<kFilter>();
}

template <int kFilter>
__global__ void __launch_bounds__(kThreads, 2) collect(const __grid_constant__ Draws draws) {
  after_earlier_kernels();
  __shared__ Shared shared;
  if (draws.wants(kFilter)) Row(draws, shared).template collect<kFilter>();
}

__global__ void __launch_bounds__(kThreads, 2) draw(const __grid_constant__ Draws draws) {
  after_earlier_kernels();
  __shared__ Shared shared;
  Row row(draws, shared);
  const Kept kept = row.kept();
  if (!row.weigh(kept)) return;
  const uint32_t token = row.draw(kept, draws.uniform[blockIdx.x]);
  if (threadIdx.x == 0) draws.out[blockIdx.x] = token;
}

// Returns the tokens of a part: few enough for two blocks per multiprocessor, but at least kLeastPart.
uint32_t part_of(int64_t rows, int64_t vocab, int multiprocessors) {
  const int64_t parts = std::clamp<int64_t>(2 * multiprocessors / rows, 1, kMostParts);
  const int64_t tokens = 32 * ceil_over(ceil_over(vocab, parts), 32);
  return static_cast<uint32_t>(std::max<int64_t>(tokens, kLeastPart));
}
int threads_for(int64_t vocab) {
  return static_cast<int>(std::min<int64_t>(32 * ceil_over(vocab, 128), kThreads));
}

Tensor sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
              const Tensor& min_p, const Tensor& uniform) {
  check_sample(DeviceContract("sample", logits), logits, temperature, top_k, top_p, min_p, uniform);
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  const OnDevice device(logits);
  const Tensor use[] = {dense(logits), dense(temperature), dense(top_k),
                        dense(top_p),  dense(min_p),       dense(uniform)};
  Tensor out = empty(logits, {rows}, ScalarType::Long);
  if (rows == 0) return out;
  const Tensor work = empty(logits, {rows * static_cast<int64_t>(sizeof(Work))}, ScalarType::Byte);
  const Draws draws{.logits = data<const float>(use[0]),
                    .temperature = data<const double>(use[1]),
                    .top_k = data<const int64_t>(use[2]),
                    .top_p = data<const double>(use[3]),
                    .min_p = data<const double>(use[4]),
                    .uniform = data<const double>(use[5]),
                    .out = data<int64_t>(out),
                    .work = reinterpret_cast<Work*>(data<uint8_t>(work)),
                    .vocab = static_cast<uint32_t>(vocab),
                    .part = part_of(rows, vocab, device.multiprocessors())};
  const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(ceil_over(vocab, draws.part)));
  for (const auto kernel : {find_ranges, count<kTopK>, collect<kTopK>, count<kTopP>, collect<kTopP>, draw}) {
    launch_early(kernel, grid, threads_for(vocab), 0, device.stream(), draws);
  }
  return out;
}

}  // namespace
}  // namespace sampling
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(FP8SERVE_OPS, FP8SERVE_DEVICE_KEY, m) {
  m.impl("sample", TORCH_BOX(&fp8serve::sampling::sample));
}
