// sample: logits become one token each, after temperature, top_k, top_p and min_p.
//
// A row is divided into parts, of which each has a block: as many as the chip has room for. Six launches read
// it. The first finds the largest logit. Two for top_k and two for top_p find where what is kept ends, and
// end at once for rows that do not want the filter. The last weighs what is kept, and the block that ends
// last in a row draws from it.
//
// Nothing is sorted. top_k and top_p each end at a border: a logit and, among equal ones, how many by their
// ids. One launch counts, and weighs for top_p, what lies in each of 1024 bins of the distance from the
// largest logit; the next lists the tokens in the bin that holds the border, which are few; and every block
// of the launch after it finds the border among those. top_p sees only what top_k left. (min_p is a
// comparison of weights, and needs no search.) The draw is the inverse of the cumulative distribution of what
// is kept: the sums of the parts give the part, those of its threads the token.
//
// Weights are FP64 as in the reference, their sums integers (sample_mass.h), which are exact in any order: so
// neither the division into parts nor the order of atomics shows, and a row gives the same token in any
// batch. A token differs from the reference's only where its random number is within some 1e-15 of a border.
// (Logits too close for FP64 to give them two weights are told apart here, as on the CPU; the reference takes
// them for equal.)
#include <torch/csrc/stable/library.h>

#include "cuda/sample_row.h"
#include "sample.h"

namespace fp8serve {
namespace sampling {
namespace {

constexpr int kThreads = 512;
constexpr uint32_t kLeastPart = 2048;  // tokens, unless the row is shorter

// All with a block for each part of each row: blockIdx.y, blockIdx.x.
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

// Two blocks for each multiprocessor, if there are tokens enough.
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
