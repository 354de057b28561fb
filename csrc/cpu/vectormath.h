// Functions of one float that vectorise: no table, no branch, the same bits on every instruction set.
#pragma once

#include "fp8.h"

namespace fp8serve {

constexpr float kTooLarge = std::bit_cast<float>(kInfinity);

// e^x within 2 units in the last place; 0 below -87, infinity above 88, NaN for NaN. Cephes' reduction: x =
// n ln 2 + r with |r| <= ln 2 / 2, a degree-6 polynomial in r, and 2^n added into the exponent.
FP8_INLINE float exp_of(float x) {
  const float above = x < -87.0f ? -87.0f : x;
  const float clamped = above > 88.0f ? 88.0f : above;
  const float shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the fraction is rounded away
  const float n = shifted - 12582912.0f;
  const float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float fraction = p * (r * r) + r + 1.0f;
  const int32_t power = (std::bit_cast<int32_t>(shifted) - 0x4b400000 + 127) << 23;
  const float value = fraction * std::bit_cast<float>(power);
  const float small = x < -87.0f ? 0.0f : value;
  return x > 88.0f ? kTooLarge : small;
}

// tanh(x) within 3 units in the last place; NaN for NaN. Cephes' polynomial up to 0.625, the quotient of
// exponentials beyond.
FP8_INLINE float tanh_of(float x) {
  const float size = x < 0.0f ? -x : x, square = x * x;
  float p = -5.70498872745e-3f;
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const float near = p * square * x + x;
  const float rest = exp_of(-2.0f * size), far = (1.0f - rest) / (1.0f + rest);
  const float above = x < 0.0f ? -far : far;
  return size < 0.625f ? near : above;
}

// The sum of 16 lanes, as a tree.
FP8_INLINE float lane_sum(const float* lanes) {
  float half[8], quarter[4];
  for (int i = 0; i < 8; ++i) half[i] = lanes[i] + lanes[i + 8];
  for (int i = 0; i < 4; ++i) quarter[i] = half[i] + half[i + 4];
  return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

}  // namespace fp8serve
