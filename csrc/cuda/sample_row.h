// A block's work on a row of logits, or on its part of one: the largest logit, what lies in bins, the borders
// of top_k and top_p, and the draw. sample.cu says in which order, and what is read how often.
#pragma once

#include "cuda/sample_search.h"

namespace fp8serve {
namespace sampling {

constexpr uint32_t kAny = 0xffffffffu;

// What a block found in its part of a row.
struct Part {
  int largest, depth;  // as those of a row
  Bin bins[kBins];     // of a filtered row: the first level of its searches; else all mass is in the first
};

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
    sampling::for_tokens<kAligned>(logits_, vocab_, first, last, f);
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

}  // namespace sampling
}  // namespace fp8serve
