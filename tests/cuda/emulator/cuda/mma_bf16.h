// The emulated counterpart of csrc/cuda/mma_bf16.h.
#pragma once

#include "cuda/device.h"

namespace fp8serve {

inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const auto half = [](uint32_t word, int i) {
    return __uint_as_float(i == 0 ? word << 16 : word & 0xffff0000u);
  };
  multiply_words<2>(c, a, b, half, half);
}

}  // namespace fp8serve
