// sample: logits become one token each, after temperature, top_k, top_p and min_p.
//
// Short rows have a block each, in one launch. A long row is read by up to 16 blocks first, each of which has
// a part of it: one launch finds the largest logit, the next weighs every token, as the first level of a
// search. Then one block goes on. How a row is divided, and thereby the order of its sums, depends on its
// length alone.
//
// Nothing is sorted. top_k and top_p each end at a border: a logit and, among equal ones, how many by their
// ids. To find it the distance from the largest logit, in steps of FP32, is cut into 16 bins with a count and
// a mass each, the bin that holds the border into 16 again, and so on, until one token or one value is left:
// 8 levels at most. (min_p is a comparison of weights, and needs no search.) The draw is the same search over
// token ids: the inverse of the cumulative distribution of what is kept.
//
// Every thread has bins of its own in shared memory: sums without atomics, in an order that depends on
// nothing but the length of the row. Weights are FP64 as in the reference, in sums of another order: a token
// differs from the reference's only where its random number is within some 1e-15 of a border. (Logits too
// close for FP64 to give them two weights are told apart here, as on the CPU; the reference takes them for
// equal.)
//
// A row without filters is read twice: largest logit, draw. The first level of a search is one more read,
// which top_k and top_p share, and the second one more for each; in it every thread keeps what lies in the
// bin, and the levels after it read that. So top_k or top_p makes 4 reads and both 5, and sixteenths of one.
// The draw weighs what is kept, the first level of top_p every token. In parts both of these reads, and the
// one that finds the largest logit, are shared; then a row without filters is read once more, where its token
// is.
#include <torch/csrc/stable/library.h>

#include "cuda/sample_row.h"
#include "sample.h"

namespace fp8serve {
namespace sampling {
namespace {

constexpr int kThreads = 512;

// A block for each part of each row: blockIdx.y, blockIdx.x.
template <bool kAligned>
__global__ void __launch_bounds__(kThreads) find_ranges(const __grid_constant__ Draws draws) {
  after_earlier_kernels();
  __shared__ Shared shared;
  const Span tokens = tokens_of_part(draws);
  const Range range = find_range<kAligned>(draws, shared, tokens.begin, tokens.last);
  Part& part = draws.parts[blockIdx.x * kBins + blockIdx.y];
  if (threadIdx.x == 0) part.largest = range.largest, part.depth = range.depth;
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads) weigh_parts(const __grid_constant__ Draws draws) {
  after_earlier_kernels();
  __shared__ Shared shared;
  const Span tokens = tokens_of_part(draws);
  Row<kAligned> row(draws, shared, range_of_parts(draws));
  Part& part = draws.parts[blockIdx.x * kBins + blockIdx.y];
  draws.is_filtered(blockIdx.x)
      ? row.count_distances(tokens.begin, tokens.last, part.bins)
      : row.weigh_all(tokens.begin, tokens.last, draws.min_p[blockIdx.x], part.bins);
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads) draw(const __grid_constant__ Draws draws) {
  after_earlier_kernels();
  __shared__ Shared shared;
  const Range range = draws.parts == nullptr ? find_range<kAligned>(draws, shared, 0, draws.vocab - 1)
                                             : range_of_parts(draws);
  Row<kAligned> row(draws, shared, range);
  Border border = row.everything();
  if (draws.is_filtered(blockIdx.x)) {
    const bool few = draws.is_few(blockIdx.x);
    border =
        row.filtered(few ? static_cast<uint32_t>(draws.top_k[blockIdx.x]) : kAny, draws.top_p[blockIdx.x]);
  }
  const uint32_t token = row.draw(border, draws.min_p[blockIdx.x], draws.uniform[blockIdx.x]);
  if (threadIdx.x == 0) draws.out[blockIdx.x] = token;
}

constexpr int64_t kShort = 8192;  // tokens of a row that is not parted

// Threads for a row, and the floats that they keep of one.
int threads_for(int64_t vocab) {
  return static_cast<int>(std::min<int64_t>(32 * ceil_over(vocab, 32 * kChunk), kThreads));
}
int64_t kept_by(int threads, int64_t vocab) { return ceil_over(vocab, threads * kChunk) * threads * kChunk; }

Tensor sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
              const Tensor& min_p, const Tensor& uniform) {
  check_sample(DeviceContract("sample", logits), logits, temperature, top_k, top_p, min_p, uniform);
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  const OnDevice device(logits);
  const Tensor use[] = {dense(logits), dense(temperature), dense(top_k),
                        dense(top_p),  dense(min_p),       dense(uniform)};
  Tensor out = empty(logits, {rows}, ScalarType::Long);
  if (rows == 0) return out;
  const int threads = threads_for(vocab);
  const int64_t stride = kept_by(threads, vocab);
  const Tensor members = empty(logits, {rows, stride}, ScalarType::Float);
  const bool parted = vocab > kShort;
  const Tensor parts =
      empty(logits, {parted ? rows * kBins * static_cast<int64_t>(sizeof(Part)) : 0}, ScalarType::Byte);
  const Draws draws{.logits = data<const float>(use[0]),
                    .temperature = data<const double>(use[1]),
                    .top_k = data<const int64_t>(use[2]),
                    .top_p = data<const double>(use[3]),
                    .min_p = data<const double>(use[4]),
                    .uniform = data<const double>(use[5]),
                    .out = data<int64_t>(out),
                    .members = data<float>(members),
                    .vocab = static_cast<uint32_t>(vocab),
                    .stride = stride,
                    .parts = parted ? reinterpret_cast<Part*>(data<uint8_t>(parts)) : nullptr,
                    .parted = span_of(0, static_cast<uint32_t>(vocab - 1)).shift};
  const bool fast = vocab % kChunk == 0 && aligned(draws.logits, 16);
  if (parted) {
    const dim3 grid(static_cast<unsigned>(rows), count_of_parts(draws.vocab));
    launch_early(fast ? find_ranges<true> : find_ranges<false>, grid, threads, 0, device.stream(), draws);
    launch_early(fast ? weigh_parts<true> : weigh_parts<false>, grid, threads, threads * kColumn,
                 device.stream(), draws);
  }
  launch_early(fast ? draw<true> : draw<false>, static_cast<unsigned>(rows), threads, threads * kColumn,
               device.stream(), draws);
  return out;
}

}  // namespace
}  // namespace sampling
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(FP8SERVE_OPS, FP8SERVE_DEVICE_KEY, m) {
  m.impl("sample", TORCH_BOX(&fp8serve::sampling::sample));
}
