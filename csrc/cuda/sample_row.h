// A block's work on its part of a row of logits: the largest logit, the sums of bins, the borders of top_k
// and top_p, the kept tokens, and the draw. sample.cu describes the order.
#pragma once

#include "cuda/amax_scratch.h"
#include "cuda/sample_search.h"

namespace fp8serve {
namespace sampling {

constexpr uint32_t kMostParts = 256;  // of a row
constexpr uint32_t kListed = 2048;    // at most so many tokens of a bin are listed
constexpr uint32_t kAny = 0xffffffffu;
constexpr int kLowest = -0x7fffffff;
constexpr double kNothing = 750.0;  // nats below the largest logit at which a weight is 0 in FP64

enum Filter { kTopK, kTopP };

// The largest logit, and the largest -x of logits x other than -inf.
struct Range {
  float largest, depth;
};

// The goal of a search: a sum reaches it if its mass or its count does.
struct Goal {
  Mass mass;
  uint32_t count;

  __device__ bool reached(const Sum& sum) const { return sum.count >= count || !(sum.mass < mass); }
};

// Where the kept tokens end: all larger keys are kept, and of those with this key the first `room` by their
// ids.
struct Border {
  int key;
  uint32_t room;
  Mass spare;  // of the tokens with this key that are not kept
};

// A filter's sums by bin, the bin that contains its border, and the tokens in this bin.
struct Step {
  Sum bins[kBins];
  Goal goal;
  Found found;
  int lowest;  // earlier filters keep no smaller key
  uint32_t listed;
  float members[kListed];  // logits in any order; if `listed` is more, the row is read again
};

// The results that the blocks of a row share.
struct Work {
  Range ranges[kMostParts];
  Step steps[2];  // of top_k and top_p
  Border border;  // of top_k, for top_p
  Sum parts[kMostParts];
  unsigned arrived;
};

struct Draws {
  const float* logits;  // [rows, vocab]
  const double* temperature;
  const int64_t* top_k;
  const double *top_p, *min_p, *uniform;
  int64_t* out;
  Work* work;  // [rows]
  uint32_t vocab, part;

  __device__ bool wants(int filter) const {
    const uint32_t row = blockIdx.x;
    return filter == kTopK ? top_k[row] > 0 && top_k[row] < vocab : top_p[row] < 1.0;
  }
};

// The kept tokens of a row. take() adds a token to a sum: tokens above the border to its mass, tokens at the
// border to its count. Of the latter only the first `border.room` are kept.
struct Kept {
  Weights weight;
  Border border;
  double least;  // the smallest weight that min_p keeps
  Mass tie, at;  // of one token at the border; the goal of the draw

  __device__ __forceinline__ void take(float x, Sum& sum) const {
    const int key = key_of(x);
    if (key > border.key) {
      const double heavy = weight(x);
      if (heavy >= least) sum.mass = sum.mass + mass_of_weight(heavy);
    }
    sum.count += key == border.key;
  }
  __device__ Mass mass(const Sum& sum) const { return sum.mass + tie * min(sum.count, border.room); }
  __device__ bool reached(const Sum& sum) const { return !(mass(sum) < at); }
};

// Calls f(x) for this thread's share of the values [begin, end), filled up with -inf to a multiple of
// kAtOnce.
template <class F>
__device__ __forceinline__ void for_each(const float* values, uint32_t begin, uint32_t end, const F& f) {
  constexpr int kAtOnce = 4;
  for (uint32_t at = begin + threadIdx.x; at < end; at += kAtOnce * blockDim.x) {
    float x[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      x[i] = at + i * blockDim.x < end ? values[at + i * blockDim.x] : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) f(x[i]);
  }
}

// Returns the range of the values that each(f) passes to f, in all threads of the block.
template <class Each>
__device__ Range find_range(Shared& shared, const Each& each) {
  float largest = -INFINITY, depth = -INFINITY;
  each([&](float x) {
    largest = fmaxf(largest, x);
    if (x > -INFINITY) depth = fmaxf(depth, -x);
  });
  if (threadIdx.x == 0) shared.largest = shared.depth = key_of(-INFINITY);
  __syncthreads();
  largest = lanes_max<32>(largest), depth = lanes_max<32>(depth);
  if (threadIdx.x % 32 == 0) atomicMax(&shared.largest, key_of(largest));
  if (threadIdx.x % 32 == 0) atomicMax(&shared.depth, key_of(depth));
  __syncthreads();
  return {logit_of(shared.largest), logit_of(shared.depth)};
}

// Returns the range of the block's row, from the ranges of its parts.
__device__ __forceinline__ Range range_of_parts(const Work& work) {
  float largest = -INFINITY, depth = -INFINITY;
  for (uint32_t p = threadIdx.x % 32; p < gridDim.y; p += 32) {
    largest = fmaxf(largest, work.ranges[p].largest), depth = fmaxf(depth, work.ranges[p].depth);
  }
  return {lanes_max<32>(largest), lanes_max<32>(depth)};
}

class Row {
 public:
  __device__ Row(const Draws& draws, Shared& shared)
      : draws_(draws),
        logits_(draws.logits + static_cast<int64_t>(blockIdx.x) * draws.vocab),
        begin_(blockIdx.y * draws.part),
        end_(min(draws.vocab, begin_ + draws.part)),
        shared_(shared),
        work_(draws.work[blockIdx.x]),
        range_(range_of_parts(work_)),
        weight_(range_.largest, draws.temperature[blockIdx.x]) {
    const auto nothing = static_cast<float>(kNothing * draws.temperature[blockIdx.x]);
    const float reach = fminf(range_.largest + range_.depth, nothing);
    per_unit_ = reach > 0.0f ? (kBins - 1) / reach : 0.0f;
  }

  // Adds this part's tokens, as far as earlier filters keep them, to the row's bins.
  template <int kFilter>
  __device__ void count() {
    const Border border = before<kFilter>();
    if (kFilter == kTopP && is_first()) work_.border = border;
    clear_bins();
    for_each(logits_, begin_, end_, [&](float x) {
      const uint32_t bin = bin_of(x);
      if (bin != kNone && key_of(x) >= border.key) add_to_bin<kFilter>(bin, x);
    });
    __syncthreads();
    for (uint32_t b = threadIdx.x; b < kBins; b += blockDim.x) {
      if (shared_.bins[b].count > 0) add(&work_.steps[kFilter].bins[b], shared_.bins[b]);
    }
  }

  // Finds the bin that contains the border, and lists this part's tokens in it.
  template <int kFilter>
  __device__ void collect() {
    Step& step = work_.steps[kFilter];
    const Border border = kFilter == kTopP ? work_.border : everything();
    const uint32_t most = draws_.wants(kTopK) ? static_cast<uint32_t>(draws_.top_k[blockIdx.x]) : kAny;
    Goal goal{{1ll << 60, 0}, most};
    const Found found = search(
        shared_, kBins, {{0, 0}, 0}, [&](uint32_t b) { return step.bins[b]; },
        [&](const Sum& total) {
          if (kFilter == kTopP) goal.mass = share_of(total.mass - border.spare);
          return goal;
        });
    if (is_first()) step.goal = goal, step.found = found, step.lowest = border.key;
    for_each(logits_, begin_, end_, [&](float x) {
      if (bin_of(x) != found.index || found.index == kNone || key_of(x) < border.key) return;
      const uint32_t at = atomicAdd(&step.listed, 1u);
      if (at < kListed) step.members[at] = x;
    });
  }

  // Returns the tokens that all filters keep.
  __device__ Kept kept() {
    const Border border = draws_.wants(kTopP)   ? refined<kTopP>()
                          : draws_.wants(kTopK) ? refined<kTopK>()
                                                : everything();
    const double least = fmin(draws_.min_p[blockIdx.x], 1.0), tie = weight_(logit_of(border.key));
    return {weight_, border, least, tie >= least ? mass_of_weight(tie) : Mass{0, 0}, {0, 0}};
  }

  // Adds up the kept weights of this part. Returns whether this block is the row's last to do so: it then
  // sees the sums of all parts.
  __device__ bool weigh(const Kept& kept) {
    Sum mine{{0, 0}, 0};
    for_each(logits_, begin_, end_, [&](float x) { kept.take(x, mine); });
    const Sum total = scan(shared_, mine).total;
    if (threadIdx.x == 0) {
      work_.parts[blockIdx.y] = total;
      shared_.last = is_last({nullptr, &work_.arrived}, gridDim.y);
    }
    __syncthreads();
    return shared_.last;
  }

  // Returns the token at `uniform` (0 to 1) of the cumulative distribution. Its weight is above 0.
  __device__ uint32_t draw(Kept kept, double uniform) {
    Found found = search(
        shared_, gridDim.y, {{0, 0}, 0}, [&](uint32_t p) { return work_.parts[p]; },
        [&](const Sum& total) {
          const Mass all = kept.mass(total), more = mass_of(uniform * wide(all)) + Mass{0, 1};
          kept.at = more < all ? more : all;
          return kept;
        });
    uint32_t begin = 0, span = draws_.part;
    while (found.index != kNone) {
      begin += found.index * span;
      const uint32_t end = min(draws_.vocab, begin + span);
      if (span == 1) break;
      span = (span + blockDim.x - 1) / blockDim.x;
      found = search(
          shared_, blockDim.x, found.before,
          [&](uint32_t i) {
            Sum sum{{0, 0}, 0};
            for (uint32_t id = begin + i * span; id < min(end, begin + (i + 1) * span); ++id) {
              kept.take(logits_[id], sum);
            }
            return sum;
          },
          [&](const Sum&) { return kept; });
    }
    return begin;
  }

 private:
  __device__ static Border everything() { return {kLowest, 0, {0, 0}}; }
  __device__ static bool is_first() { return blockIdx.y == 0 && threadIdx.x == 0; }

  // Returns the border of the filters before this one.
  template <int kFilter>
  __device__ Border before() {
    return kFilter == kTopP && draws_.wants(kTopK) ? refined<kTopK>() : everything();
  }

  // Returns a logit's bin, by its distance from the largest one; kNone if its weight is 0.
  __device__ __forceinline__ uint32_t bin_of(float x) const {
    const float at = (range_.largest - x) * per_unit_;
    return at < static_cast<float>(kBins) ? static_cast<uint32_t>(at) : kNone;  // NaN: none
  }

  // Returns the share top_p of a mass.
  __device__ Mass share_of(const Mass& all) const {
    const Mass share = mass_of(draws_.top_p[blockIdx.x] * wide(all));
    return share < all ? share : all;
  }

  __device__ void clear_bins() {
    for (uint32_t b = threadIdx.x; b < kBins; b += blockDim.x) shared_.bins[b] = {{0, 0}, 0};
    __syncthreads();
  }
  template <int kFilter>
  __device__ __forceinline__ void add_to_bin(uint32_t bin, float x) {
    add(&shared_.bins[bin], {kFilter == kTopP ? mass_of_weight(weight_(x)) : Mass{0, 0}, 1});
  }

  // Calls f(x) for this thread's tokens of the step's bin.
  template <class F>
  __device__ void for_members(const Step& step, const F& f) const {
    if (step.listed <= kListed) return for_each(step.members, 0, step.listed, f);
    for_each(logits_, 0, draws_.vocab, [&](float x) {
      if (bin_of(x) == step.found.index && key_of(x) >= step.lowest) f(x);
    });
  }

  // Finds the border in the step's bin: divides the bin's range into bins, then the one of these that
  // contains the border, until one token or one value is left.
  template <int kFilter>
  __device__ Border refined() {
    const Step& step = work_.steps[kFilter];
    if (step.found.index == kNone) return everything();
    const Range range = find_range(shared_, [&](const auto& f) { for_members(step, f); });
    int top = key_of(range.largest);
    uint32_t width = static_cast<uint32_t>(top) + static_cast<uint32_t>(key_of(range.depth));
    Found found = step.found;
    do {
      int shift = 0;
      while (width >> shift >= kBins) ++shift;
      clear_bins();
      for_members(step, [&](float x) {
        const uint32_t at = static_cast<uint32_t>(top) - static_cast<uint32_t>(key_of(x));
        if (at <= width) add_to_bin<kFilter>(at >> shift, x);
      });
      __syncthreads();
      found = search(
          shared_, kBins, found.before, [&](uint32_t b) { return shared_.bins[b]; },
          [&](const Sum&) { return step.goal; });
      if (found.index == kNone) return everything();
      const uint32_t beyond = found.index << shift;
      top = static_cast<int>(static_cast<uint32_t>(top) - beyond);
      width = min(width - beyond, (1u << shift) - 1);
    } while (found.inside.count > 1 && width > 0);
    return border_at(static_cast<int>(static_cast<uint32_t>(top) - width), found, step.goal);
  }

  __device__ Border border_at(int key, const Found& found, const Goal& goal) const {
    const double tie = weight_(logit_of(key)), missing = wide(goal.mass - found.before.mass);
    const double wanted = fmin(ceil(missing / tie), static_cast<double>(goal.count - found.before.count));
    const double room = fmax(1.0, fmin(wanted, static_cast<double>(found.inside.count)));
    const auto count = static_cast<uint32_t>(room);  // a NaN, of 0 / 0, is ignored by fmin
    return {key, count, mass_of_weight(tie) * (found.inside.count - count)};
  }

  const Draws& draws_;
  const float* logits_;
  uint32_t begin_, end_;  // tokens of this part
  Shared& shared_;
  Work& work_;
  Range range_;
  Weights weight_;
  float per_unit_;  // bins per unit of a logit
};

}  // namespace sampling
}  // namespace fp8serve
