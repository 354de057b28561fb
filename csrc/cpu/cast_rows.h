// Rows of high-precision values: their amax, and their cast to FP8. Every quantizing kernel uses them.
//
// The plain loops are the definition and vectorise at every level. Where there is AVX-512 VBMI a
// hand-written cast takes over (cast_vbmi.cpp): it needs about a third of the instructions and makes
// quantizing a matter of memory speed.
#pragma once

#include "cpu/features.h"
#include "cpu/tensors.h"
#include "fp8.h"

namespace fp8serve {

// Returns the bits of |x|, which as integers are in the order of |x|. NaN, which an amax ignores, is 0.
FP8_INLINE int32_t magnitude(float x) {
  const int32_t mag = std::bit_cast<int32_t>(x) & kMagnitude;
  return mag > kInfinity ? 0 : mag;
}
FP8_INLINE int16_t magnitude(BF16 x) {
  const int16_t mag = static_cast<int16_t>(x.bits & 0x7fff);
  return mag > 0x7f80 ? int16_t{0} : mag;
}
FP8_INLINE int16_t magnitude(F16 x) {
  const int16_t mag = static_cast<int16_t>(x.bits & 0x7fff);
  return mag > 0x7c00 ? int16_t{0} : mag;
}
FP8_INLINE float value_of(float, int32_t mag) { return std::bit_cast<float>(mag); }
FP8_INLINE float value_of(BF16, int16_t mag) { return load(BF16{static_cast<uint16_t>(mag)}); }
FP8_INLINE float value_of(F16, int16_t mag) { return load(F16{static_cast<uint16_t>(mag)}); }

template <class T>
FP8_INLINE float amax_row(const T* x, int64_t n) {
  auto largest = magnitude(T{});
  for (int64_t i = 0; i < n; ++i) {
    const auto mag = magnitude(x[i]);
    largest = mag > largest ? mag : largest;
  }
  return value_of(T{}, largest);
}

template <class F, class T>
FP8_INLINE void cast_row_plain(const T* x, uint8_t* q, int64_t n, float scale) {
  for (int64_t i = 0; i < n; ++i) q[i] = static_cast<uint8_t>(encode<F>(load(x[i]) * scale));
}

// q = saturate(x * scale) for a positive, finite scale; AVX-512 VBMI.
template <class F, class T>
void cast_row_vbmi(const T* x, uint8_t* q, int64_t n, float scale);

// Casts the first n / 64 * 64 values. Every 32 values have a scale, which is positive and finite.
template <class F, class T>
void cast_blocks_vbmi(const T* x, uint8_t* q, int64_t n, const float* scales);

FP8_INLINE bool is_positive_finite(float scale) {
  return scale > 0.0f && scale <= std::bit_cast<float>(kInfinity - 1);
}

template <class F, class T>
FP8_INLINE void cast_row(const T* x, uint8_t* q, int64_t n, float scale) {
#if FP8_X86
  if (has(kAvx512Vbmi) && is_positive_finite(scale)) return cast_row_vbmi<F>(x, q, n, scale);
#endif
  cast_row_plain<F>(x, q, n, scale);
}

// An amax that several threads update.
class SharedAmax {
 public:
  void raise(float value) {
    float largest = amax_.load(std::memory_order_relaxed);
    while (value > largest && !amax_.compare_exchange_weak(largest, value, std::memory_order_relaxed)) {
    }
  }
  float value() const { return amax_.load(); }

 private:
  std::atomic<float> amax_{0.0f};
};

}  // namespace fp8serve
