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

#include <cmath>

#include "cuda/cast.h"
#include "sample.h"

namespace fp8serve {
namespace {

constexpr int kThreads = 512;
constexpr uint32_t kBins = 16;
constexpr uint32_t kAny = 0xffffffffu;

// What a block found in its part of a row.
struct Part;

struct Draws {
  const float* logits;  // [rows, vocab]
  const double* temperature;
  const int64_t* top_k;
  const double *top_p, *min_p, *uniform;
  int64_t* out;
  float* members;  // [rows, stride]: what the threads keep of a row during a search
  uint32_t vocab;
  int64_t stride;
  Part* parts;  // [rows, kBins]; null: every row is one
  int parted;   // a part is 2^parted tokens

  __device__ bool is_few(int64_t row) const { return top_k[row] > 0 && top_k[row] < vocab; }
  __device__ bool is_filtered(int64_t row) const { return is_few(row) || top_p[row] < 1.0; }
};

// --- weights
// --------------------------------------------------------------------------------------------------

// The order of the logits as integers; 0 and -0 are one.
__device__ __forceinline__ int key_of(float x) {
  const int bits = __float_as_int(x);
  return bits < 0 ? -(bits & 0x7fffffff) : bits;
}
__device__ __forceinline__ float logit_of(int key) {
  const float size = __uint_as_float(static_cast<uint32_t>(key < 0 ? -key : key));
  return key < 0 ? -size : size;
}

// e^((x - largest) / temperature), rounded where the reference rounds: both quotients, then their difference.
class Weights {
 public:
  __device__ Weights(float largest, double temperature)
      : temperature_(temperature), inverse_(1.0 / temperature), top_(quotient(largest)) {}
  __device__ __forceinline__ double operator()(float x) const {
    return x > -INFINITY ? exp(quotient(x) - top_) : 0.0;
  }

 private:
  // x / temperature in three operations: what the product with the inverse leaves over corrects it.
  __device__ __forceinline__ double quotient(float x) const {
    const double wide = x, near = wide * inverse_;
    return fma(fma(-near, temperature_, wide), inverse_, near);
  }

  double temperature_, inverse_, top_;
};

// --- searches: positions are distances from the largest logit, or token ids
// -----------------------------------

struct Bin {
  double mass;
  uint32_t count;
};
__device__ __forceinline__ Bin operator+(const Bin& a, const Bin& b) {
  return {a.mass + b.mass, a.count + b.count};
}

struct Part {
  int largest, depth;  // as those of a row
  Bin bins[kBins];     // of a filtered row: the first level of its searches; else all mass is in the first
};

// Positions [begin, last], in bins of 2^shift.
struct Span {
  uint32_t begin, last;
  int shift;
};
__host__ __device__ __forceinline__ Span span_of(uint32_t begin, uint32_t last) {
  int shift = 0;
  while ((last - begin) >> shift >= kBins) ++shift;
  return {begin, last, shift};
}

// Where a search stands: what lies before the span, and in it.
struct Place {
  Span span;
  Bin before, inside;
};

// The search is for the first token with which one of the two is reached.
struct Goal {
  double mass;
  uint32_t count;

  __device__ bool reached(const Bin& sum) const { return sum.mass >= mass || sum.count >= count; }
};

// The bin with the goal; the last that holds something, if rounding has put the goal behind it.
__device__ Place walk(const Bin* bins, const Place& from, const Goal& goal) {
  Place found{span_of(from.span.begin, from.span.begin), from.before, {0.0, 0}};
  Bin sum = from.before;
  for (uint32_t b = 0; b < kBins; ++b) {
    if (bins[b].count == 0 && bins[b].mass == 0.0) continue;
    const uint32_t begin = from.span.begin + (b << from.span.shift);
    const uint32_t rest = min(from.span.last - begin, (1u << from.span.shift) - 1);
    found = {span_of(begin, begin + rest), sum, bins[b]};
    sum = sum + bins[b];
    if (goal.reached(sum)) break;
  }
  return found;
}

__device__ double mass_of(const Bin* bins) {
  double mass = 0.0;
  for (uint32_t b = 0; b < kBins; ++b) mass += bins[b].mass;
  return mass;
}

__device__ double more_than(double mass) { return nextafter(mass, static_cast<double>(INFINITY)); }

// Where the kept tokens end: larger logits are in, and `room` equal ones, of mass `tie` each.
struct Border {
  int key;
  uint32_t room;
  double tie;
  double mass;  // of all that is kept
};
constexpr int kLowest = -0x7fffffff;

__device__ Border border_at(const Place& at, int key, double tie, const Goal& goal) {
  const double by_mass = ceil((goal.mass - at.before.mass) / tie);  // NaN if both are 0, which fmin ignores
  const double wanted = fmin(by_mass, static_cast<double>(goal.count - at.before.count));
  const double room = fmax(1.0, fmin(wanted, static_cast<double>(at.inside.count)));
  const auto count = static_cast<uint32_t>(room);
  return {key, count, tie, at.before.mass + (count == at.inside.count ? at.inside.mass : room * tie)};
}

// --- a block's row
// --------------------------------------------------------------------------------------------

// A thread's own bins: a column of shared memory.
class Column {
 public:
  __device__ explicit Column(unsigned char* memory)
      : mass_(reinterpret_cast<double*>(memory)),
        count_(reinterpret_cast<uint32_t*>(memory + kBins * blockDim.x * sizeof(double))) {}

  __device__ void clear() {
    for (uint32_t b = 0; b < kBins; ++b) mass_[own(b)] = 0.0, count_[own(b)] = 0;
  }
  __device__ __forceinline__ void add(uint32_t bin, double mass, uint32_t count) {
    mass_[own(bin)] += mass;
    count_[own(bin)] += count;
  }
  // The sums of the threads' bins, by warps.
  __device__ void gather(Bin* bins) const {
    __syncthreads();
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t b = threadIdx.x / 32; b < kBins; b += blockDim.x / 32) {
      Bin sum{0.0, 0};
      for (uint32_t t = b * blockDim.x + lane; t < (b + 1) * blockDim.x; t += 32) {
        sum = sum + Bin{mass_[t], count_[t]};
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        sum = sum +
              Bin{__shfl_xor_sync(kAllLanes, sum.mass, step), __shfl_xor_sync(kAllLanes, sum.count, step)};
      }
      if (lane == 0) bins[b] = sum;
    }
    __syncthreads();
  }

 private:
  __device__ __forceinline__ uint32_t own(uint32_t bin) const { return bin * blockDim.x + threadIdx.x; }
  double* mass_;
  uint32_t* count_;
};
constexpr int kColumn = kBins * (sizeof(double) + sizeof(uint32_t));  // bytes

struct Shared {
  Bin first[kBins], bins[kBins];
  Place place;
  Border border;
  int largest, depth;
};

// Keys of the largest logit, and of the largest -x where x is not -inf.
struct Range {
  int largest, depth;
};

// f(id, logit) for the tokens [first, last] that this thread has.
template <bool kAligned, class F>
__device__ __forceinline__ void for_tokens(const float* logits, uint32_t vocab, uint32_t first, uint32_t last,
                                           const F& f) {
  for (uint32_t at = first / kChunk * kChunk + threadIdx.x * kChunk; at <= last; at += blockDim.x * kChunk) {
    const Chunk chunk = load_chunk<kAligned>(logits, at, vocab);
#pragma unroll
    for (uint32_t i = 0; i < kChunk; ++i) {
      if (at + i >= first && at + i <= last) f(at + i, chunk.value[i]);
    }
  }
}

// The range of the tokens [first, last] of the block's row.
template <bool kAligned>
__device__ Range find_range(const Draws& draws, Shared& shared, uint32_t first, uint32_t last) {
  const float* logits = draws.logits + static_cast<int64_t>(blockIdx.x) * draws.vocab;
  float largest = -INFINITY, depth = -INFINITY;
  for_tokens<kAligned>(logits, draws.vocab, first, last, [&](uint32_t, float x) {
    largest = fmaxf(largest, x);
    if (x > -INFINITY) depth = fmaxf(depth, -x);
  });
  if (threadIdx.x == 0) shared.largest = shared.depth = key_of(-INFINITY);
  __syncthreads();
  largest = lanes_max<32>(largest), depth = lanes_max<32>(depth);
  if (threadIdx.x % 32 == 0) atomicMax(&shared.largest, key_of(largest));
  if (threadIdx.x % 32 == 0) atomicMax(&shared.depth, key_of(depth));
  __syncthreads();
  return {shared.largest, shared.depth};
}

// The parts of a row are the bins of the first level of a draw.
__host__ __device__ __forceinline__ uint32_t count_of_parts(uint32_t vocab) {
  const Span whole = span_of(0, vocab - 1);
  return (whole.last >> whole.shift) + 1;
}
__device__ __forceinline__ Span tokens_of_part(const Draws& draws) {
  const uint32_t begin = blockIdx.y << draws.parted;
  return {begin, min(draws.vocab - 1, begin + (1u << draws.parted) - 1), 0};
}

// The range of the block's row, from its parts.
__device__ __forceinline__ Range range_of_parts(const Draws& draws) {
  const Part* parts = draws.parts + blockIdx.x * kBins;
  Range all{parts[0].largest, parts[0].depth};
  for (uint32_t p = 1; p < count_of_parts(draws.vocab); ++p) {
    all = {max(all.largest, parts[p].largest), max(all.depth, parts[p].depth)};
  }
  return all;
}

template <bool kAligned>
class Row {
 public:
  // Of its row, which a range is known of.
  __device__ Row(const Draws& draws, Shared& shared, const Range& range)
      : logits_(draws.logits + static_cast<int64_t>(blockIdx.x) * draws.vocab),
        members_(draws.members + blockIdx.x * draws.stride + threadIdx.x),
        vocab_(draws.vocab),
        shared_(shared),
        column_(dynamic_shared()),
        range_(range),
        weight_(logit_of(range.largest), draws.temperature[blockIdx.x]),
        parts_(draws.parts == nullptr ? nullptr : draws.parts + blockIdx.x * kBins),
        weigh_(draws.top_p[blockIdx.x] < 1.0) {}

  __device__ Border everything() const { return {kLowest, 0, 0.0, 0.0}; }

  // The border of the `top_k` largest and, of these, the first that have `top_p` of their mass.
  __device__ Border filtered(uint32_t top_k, double top_p) {
    parts_ == nullptr ? count_distances(0, vocab_ - 1, shared_.first) : add_parts();
    Border border = everything();
    border.mass = mass_of(shared_.first);
    if (top_k < vocab_) border = search({INFINITY, top_k});
    if (weigh_) border = search({top_p * border.mass, top_k});
    return border;
  }

  // The first level of both searches, for the tokens [first, last].
  __device__ void count_distances(uint32_t first, uint32_t last, Bin* bins) {
    const Span whole = distances();
    column_.clear();
    for_tokens(first, last, [&](uint32_t, float x) { take(x, whole); });
    column_.gather(bins);
  }

  // The first level of a draw from everything, for the tokens [first, last] as one bin.
  __device__ void weigh_all(uint32_t first, uint32_t last, double min_p, Bin* bins) {
    const double least = fmin(min_p, 1.0);
    column_.clear();
    for_tokens(first, last, [&](uint32_t, float x) {
      const double weight = weight_(x);
      if (weight >= least) column_.add(0, weight, 0);
    });
    column_.gather(bins);
  }

  // The token at `uniform` of the cumulative distribution: always one that weighs something.
  __device__ uint32_t draw(const Border& border, double min_p, double uniform) {
    const double least = fmin(min_p, 1.0);
    const double tie = border.tie >= least ? border.tie : 0.0;
    const uint32_t room = tie > 0.0 ? border.room : 0;  // what weighs nothing is not drawn
    Place at{span_of(0, vocab_ - 1), {0.0, 0}, {0.0, 0}};
    Goal goal{-1.0, kAny};
    bool known = parts_ != nullptr && border.key == kLowest;  // the first level of a draw from everything
    do {
      if (known) {
        take_parts();
        known = false;
      } else {
        column_.clear();
        for_tokens(at.span.begin, at.span.last, [&](uint32_t id, float x) {
          const int key = key_of(x);
          if (key < border.key) return;
          const double weight = key > border.key ? weight_(x) : 0.0;
          const bool equal = key == border.key;
          if (equal || weight >= least) column_.add((id - at.span.begin) >> at.span.shift, weight, equal);
        });
        column_.gather(shared_.bins);
      }
      if (threadIdx.x == 0) {
        keep_ties(room - at.before.count, tie);
        if (goal.mass < 0.0) goal.mass = more_than(uniform * mass_of(shared_.bins));
      }
      at = next(shared_.bins, at, goal);
    } while (at.span.begin < at.span.last);
    return at.span.begin;
  }

 private:
  template <class F>
  __device__ __forceinline__ void for_tokens(uint32_t first, uint32_t last, const F& f) const {
    fp8serve::for_tokens<kAligned>(logits_, vocab_, first, last, f);
  }

  // The first level of the searches, from the parts, in their order.
  __device__ void add_parts() {
    if (threadIdx.x < kBins) {
      Bin sum{0.0, 0};
      for (uint32_t p = 0; p < count_of_parts(vocab_); ++p) sum = sum + parts_[p].bins[threadIdx.x];
      shared_.first[threadIdx.x] = sum;
    }
    __syncthreads();
  }

  // The first level of a draw, whose bins the parts are.
  __device__ void take_parts() {
    if (threadIdx.x < kBins) {
      const bool is_there = threadIdx.x < count_of_parts(vocab_);
      shared_.bins[threadIdx.x] = is_there ? parts_[threadIdx.x].bins[0] : Bin{0.0, 0};
    }
    __syncthreads();
  }

  // From the largest logit down to the smallest that is not -inf.
  __device__ Span distances() const {
    return span_of(0, static_cast<uint32_t>(range_.largest) + static_cast<uint32_t>(range_.depth));
  }

  // Into its bin with a logit, if it lies in the span.
  __device__ __forceinline__ bool take(float x, const Span& span) {
    const uint32_t at = static_cast<uint32_t>(range_.largest) - static_cast<uint32_t>(key_of(x)) - span.begin;
    if (!(x > -INFINITY) || at > span.last - span.begin) return false;
    column_.add(at >> span.shift, weigh_ ? weight_(x) : 0.0, 1);
    return true;
  }

  // From the bins of the first level, which both searches share, to one token or one value.
  __device__ Border search(const Goal& goal) {
    Place at{distances(), {0.0, 0}, {0.0, 0}};
    at = next(shared_.first, at, goal);
    for (uint32_t level = 1, held = 0; at.inside.count > 1 && at.span.begin < at.span.last; ++level) {
      column_.clear();
      held = level == 1 ? taken_of_row(at.span) : taken_again(at.span, held);
      column_.gather(shared_.bins);
      at = next(shared_.bins, at, goal);
    }
    if (threadIdx.x == 0) {
      const int key = static_cast<int>(static_cast<uint32_t>(range_.largest) - at.span.last);
      shared_.border = border_at(at, key, weight_(logit_of(key)), goal);
    }
    __syncthreads();
    return shared_.border;
  }

  // How many of this thread's logits lie in the span; they are kept for the next level.
  __device__ uint32_t taken_of_row(const Span& span) {
    uint32_t held = 0;
    for_tokens(0, vocab_ - 1, [&](uint32_t, float x) {
      if (take(x, span)) members_[held++ * blockDim.x] = x;
    });
    return held;
  }
  __device__ uint32_t taken_again(const Span& span, uint32_t had) {
    uint32_t held = 0;
    for (uint32_t i = 0; i < had; ++i) {
      const float x = members_[i * blockDim.x];
      if (take(x, span)) members_[held++ * blockDim.x] = x;
    }
    return held;
  }

  // The first `room` of the tokens that equal the border join the others of their bins.
  __device__ void keep_ties(uint32_t room, double tie) {
    for (Bin& bin : shared_.bins) {
      bin.count = min(bin.count, room);
      bin.mass += bin.count * tie;
      room -= bin.count;
    }
  }

  // One thread's step, told to all.
  __device__ Place next(const Bin* bins, const Place& from, const Goal& goal) {
    if (threadIdx.x == 0) shared_.place = walk(bins, from, goal);
    __syncthreads();
    return shared_.place;
  }

  const float* logits_;
  float* members_;
  uint32_t vocab_;
  Shared& shared_;
  Column column_;
  Range range_;
  Weights weight_;
  const Part* parts_;
  bool weigh_;  // top_p is wanted
};

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
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(FP8SERVE_OPS, FP8SERVE_DEVICE_KEY, m) {
  m.impl("sample", TORCH_BOX(&fp8serve::sample));
}
