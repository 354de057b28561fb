// The two FP8 formats and their casts, bit for bit as docs/numerics.md: round to nearest, ties to even;
// finite values and infinities beyond the maximum saturate to +-max; NaN stays NaN with its sign.
//
// Everything is branch-free integer and float arithmetic on one value, so that a loop over it vectorises at
// every instruction set: the compiler makes the AVX-512 kernel from the scalar lines below.
#pragma once

#include <bit>
#include <cstdint>

#ifdef __CUDACC__
#define FP8_INLINE __host__ __device__ __forceinline__
#else
#define FP8_INLINE inline __attribute__((always_inline))
#endif

namespace fp8serve {

// Bits of |x| as FP32; float order is integer order for these.
constexpr int32_t kMagnitude = 0x7fffffff;
constexpr int32_t kInfinity = 0x7f800000;

template <int kMantissa, int kBias, int32_t kMaxBits, uint32_t kMaxFp8>
struct Format {
  static constexpr int mantissa = kMantissa;
  static constexpr int bias = kBias;
  static constexpr int32_t max_bits = kMaxBits;  // the largest finite value, as FP32 bits
  static constexpr uint32_t max_fp8 = kMaxFp8;   // ... and as FP8 bits
  static constexpr int shift = 23 - kMantissa;   // mantissa bits that a cast from FP32 drops
  static constexpr int32_t min_normal = (128 - kBias) << 23;
  // Adding this to a value below min_normal leaves the rounded subnormal in the low mantissa bits.
  static constexpr int32_t magic = (127 + 24 - kBias - kMantissa) << 23;
  static constexpr float max() { return std::bit_cast<float>(kMaxBits); }
};

using E4M3 = Format<3, 7, 0x43e00000, 0x7e>;   // 448, no infinity, 0x7f is NaN
using E5M2 = Format<2, 15, 0x47600000, 0x7b>;  // 57344, 0x7c infinity, above it NaN

// FP32 -> FP8. The result's low 8 bits are the FP8 value.
template <class F>
FP8_INLINE int32_t encode(float x) {
  const int32_t bits = std::bit_cast<int32_t>(x);
  const int32_t sign = (bits >> 24) & 0x80;
  const int32_t magnitude = bits & kMagnitude;
  const int32_t mag = magnitude < F::max_bits ? magnitude : F::max_bits;
  const int32_t ties_to_even = (1 << (F::shift - 1)) - 1 + ((mag >> F::shift) & 1);
  const int32_t normal = ((mag + ties_to_even) >> F::shift) - ((127 - F::bias) << F::mantissa);
  const float shifted = std::bit_cast<float>(mag) + std::bit_cast<float>(F::magic);
  const int32_t subnormal = std::bit_cast<int32_t>(shifted) - F::magic;
  const int32_t finite = mag < F::min_normal ? subnormal : normal;
  return sign | (magnitude > kInfinity ? 0x7f : finite);
}

// Whether a product x * scale exceeds the format's range by more than the rounding of FP32: with a scale
// computed from x, the roundings of its inverse and of the product may together lead to four FP32 steps above
// the maximum.
template <class F>
FP8_INLINE bool is_cut_off(float product) {
  const int32_t magnitude = std::bit_cast<int32_t>(product) & kMagnitude;
  return magnitude > F::max_bits + 4 && magnitude <= kInfinity;  // NaN is not cut off
}

// FP8 -> FP32, exact.
template <class F>
constexpr float decode(uint8_t code) {
  const int32_t sign = static_cast<int32_t>(code & 0x80) << 24;
  const int32_t mag = code & 0x7f;
  const int32_t nan = sign | 0x7fc00000;
  if (mag > static_cast<int32_t>(F::max_fp8)) {
    return std::bit_cast<float>(mag == 0x7c && F::mantissa == 2 ? sign | kInfinity : nan);
  }
  const int32_t exponent = mag >> F::mantissa;
  const int32_t fraction = mag & ((1 << F::mantissa) - 1);
  if (exponent > 0) {
    return std::bit_cast<float>(sign | ((exponent + 127 - F::bias) << 23) | (fraction << F::shift));
  }
  const float unit = std::bit_cast<float>((128 - F::bias - F::mantissa) << 23);  // the smallest subnormal
  const float value = static_cast<float>(fraction) * unit;
  return sign != 0 ? -value : value;
}

// All 256 values of a format as FP32.
template <class F>
struct DecodeTable {
  float value[256];
  constexpr DecodeTable() : value() {
    for (int i = 0; i < 256; ++i) value[i] = decode<F>(static_cast<uint8_t>(i));
  }
};
template <class F>
inline constexpr DecodeTable<F> kDecode{};

// Returns the scale that maps `amax` to the format's maximum (docs/numerics.md): 1 for an amax that is zero
// or not finite, the largest finite FP32 where the quotient overflows, rounded down to a power of two on
// request.
FP8_INLINE float scale_for(float amax, float fp8_max, bool power_2) {
  const int32_t bits = std::bit_cast<int32_t>(amax);
  if (bits <= 0 || bits >= kInfinity) return 1.0f;
  const int32_t quotient = std::bit_cast<int32_t>(fp8_max / amax);
  const int32_t finite = quotient < kInfinity ? quotient : kInfinity - 1;
  return std::bit_cast<float>(power_2 ? finite & kInfinity : finite);
}

// Returns the factor that dequantizes data quantized by `scale`. With `infinity_is_nan` it is NaN if `amax`,
// from which the scale was computed, is infinite: the cast saturates, but a check for values that are not
// finite must still find one.
FP8_INLINE float inverse_of(float scale, float amax, bool infinity_is_nan) {
  const bool hides = infinity_is_nan && std::bit_cast<int32_t>(amax) >= kInfinity;
  return hides ? std::bit_cast<float>(0x7fc00000) : 1.0f / scale;
}

// Returns sum * a * b, rounded after each product. If a is far from 1 and b on the other side of 1, the first
// product may leave the range of FP32 although the second would return to it. Then a factor of 2^64 is moved
// from one to the other, which changes no bit of a result that stays in range. With an a from 2^-64 to 2^64
// no sum leaves the range.
constexpr float kFarUp = 0x1p64f, kFarDown = 0x1p-64f;
FP8_INLINE float scaled_by(float sum, float a, float b) {
  const bool up = a > kFarUp && b < 1.0f, down = a < kFarDown && b > 1.0f;
  const float of_a = up ? kFarDown : (down ? kFarUp : 1.0f), of_b = up ? kFarUp : (down ? kFarDown : 1.0f);
  return sum * (a * of_a) * (b * of_b);
}

}  // namespace fp8serve
