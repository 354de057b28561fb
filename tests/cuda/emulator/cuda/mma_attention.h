// The emulated counterpart of csrc/cuda/mma_attention.h.
#pragma once

#include "cuda/mma_bf16.h"

namespace fp8serve {

using Place = uintptr_t;
inline Place place_of(const void* shared) { return reinterpret_cast<Place>(shared); }

inline Place found_anew(Place place) { return place; }
inline void copy_async_to(Place to, const void* global, bool valid) {
  copy_async(reinterpret_cast<void*>(to), global, valid);
}

template <bool kTransposed>
void load_matrices_at(uint32_t (&r)[4], Place row) {
  if constexpr (!kTransposed) return load_matrices(r, reinterpret_cast<const void*>(row));
  emulator::races::reads(reinterpret_cast<const void*>(row), 16);
  const int self = emulator::machine.lane();
  const auto words = emulator::exchange(row, [&](auto of) {
    uint4 out;
    uint32_t* word = &out.x;
    for (int m = 0; m < 4; ++m) {
      uint16_t half[2];
      for (int i = 0; i < 2; ++i) {
        const auto* from = reinterpret_cast<const char*>(of(8 * m + self % 4 * 2 + i));
        std::memcpy(half + i, from + self / 4 * 2, 2);
      }
      word[m] = half[0] | static_cast<uint32_t>(half[1]) << 16;
    }
    return out;
  });
  std::memcpy(r, &words, sizeof(r));
}

inline uint32_t bfloat_pair(float low, float high) {
  return float_to_bfloat(low) | static_cast<uint32_t>(float_to_bfloat(high)) << 16;
}

inline float exp2_of(float x) {
  const float y = std::exp2(x);
  return y < 1.17549435e-38f ? 0.0f : y;
}

}  // namespace fp8serve
