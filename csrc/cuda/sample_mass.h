// The weights of tokens, and their exact sums. sample.cu says why they are exact.
#pragma once

#include <cmath>

#include "cuda/cast.h"

namespace fp8serve {
namespace sampling {

// key_of maps logits to integers of the same order, and logit_of maps them back; 0 and -0 have the same key.
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
  // Returns x / temperature in three operations: the product with the inverse, corrected by its remainder.
  __device__ __forceinline__ double quotient(float x) const {
    const double wide = x, near = wide * inverse_;
    return fma(fma(-near, temperature_, wide), inverse_, near);
  }

  double temperature_, inverse_, top_;
};

// A multiple of 2^-80: high * 2^-40 + low * 2^-80. Sums are exact in any order. `low` may exceed its kLow
// bits; carried() moves the excess to `high`.
struct Mass {
  long long high, low;
};
constexpr int kLow = 40;  // bits
__device__ __forceinline__ Mass operator+(const Mass& a, const Mass& b) {
  return {a.high + b.high, a.low + b.low};
}
__device__ __forceinline__ Mass operator-(const Mass& a, const Mass& b) {
  return {a.high - b.high, a.low - b.low};
}
__device__ __forceinline__ Mass operator*(const Mass& a, uint32_t n) { return {a.high * n, a.low * n}; }
__device__ __forceinline__ Mass carried(const Mass& a) {
  return {a.high + (a.low >> kLow), a.low & ((1ll << kLow) - 1)};
}
__device__ __forceinline__ bool operator<(const Mass& a, const Mass& b) {
  const Mass left = carried(a), right = carried(b);
  return left.high < right.high || (left.high == right.high && left.low < right.low);
}
__device__ __forceinline__ double wide(const Mass& a) {
  const Mass whole = carried(a);
  return static_cast<double>(whole.high) * 0x1p-40 + static_cast<double>(whole.low) * 0x1p-80;
}
// Returns x, at most 2^22, rounded down to a multiple of 2^-80.
__device__ __forceinline__ Mass mass_of(double x) {
  const auto high = static_cast<long long>(x * 0x1p40);
  return {high, static_cast<long long>((x - static_cast<double>(high) * 0x1p-40) * 0x1p80)};
}
// Returns the mass of a weight. A weight above 0 has a mass above 0, so that its token can be drawn. NaN has
// the mass 0.
__device__ __forceinline__ Mass mass_of_weight(double weight) {
  return weight > 0.0 ? mass_of(fmax(weight, 0x1p-80)) : Mass{0, 0};
}

struct Sum {
  Mass mass;
  uint32_t count;
};
__device__ __forceinline__ Sum operator+(const Sum& a, const Sum& b) {
  return {a.mass + b.mass, a.count + b.count};
}
__device__ __forceinline__ Sum operator-(const Sum& a, const Sum& b) {
  return {a.mass - b.mass, a.count - b.count};
}

// Atomic additions to sums in shared or global memory.
__device__ __forceinline__ void add(long long* to, long long value) {
  if (value != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
  }
}
__device__ __forceinline__ void add(Sum* to, const Sum& sum) {
  add(&to->mass.high, sum.mass.high);
  add(&to->mass.low, sum.mass.low);
  atomicAdd(&to->count, sum.count);
}

}  // namespace sampling
}  // namespace fp8serve
