// How a token's border or place is found without sorting: by bins, of the distance from the largest logit or
// of token ids, the one that holds what is sought into bins again, until one token or one value is left.
// sample.cu says why; here is the arithmetic of one thread.
#pragma once

#include <cmath>

#include "cuda/cast.h"

namespace fp8serve {
namespace sampling {

constexpr uint32_t kBins = 16;

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
__device__ inline Place walk(const Bin* bins, const Place& from, const Goal& goal) {
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

__device__ inline double mass_of(const Bin* bins) {
  double mass = 0.0;
  for (uint32_t b = 0; b < kBins; ++b) mass += bins[b].mass;
  return mass;
}

__device__ inline double more_than(double mass) { return nextafter(mass, static_cast<double>(INFINITY)); }

// Where the kept tokens end: larger logits are in, and `room` equal ones, of mass `tie` each.
struct Border {
  int key;
  uint32_t room;
  double tie;
  double mass;  // of all that is kept
};
constexpr int kLowest = -0x7fffffff;

__device__ inline Border border_at(const Place& at, int key, double tie, const Goal& goal) {
  const double by_mass = ceil((goal.mass - at.before.mass) / tie);  // NaN if both are 0, which fmin ignores
  const double wanted = fmin(by_mass, static_cast<double>(goal.count - at.before.count));
  const double room = fmax(1.0, fmin(wanted, static_cast<double>(at.inside.count)));
  const auto count = static_cast<uint32_t>(room);
  return {key, count, tie, at.before.mass + (count == at.inside.count ? at.inside.mass : room * tie)};
}

}  // namespace sampling
}  // namespace fp8serve
