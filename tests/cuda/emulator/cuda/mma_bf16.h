// The emulated counterpart of csrc/cuda/mma_bf16.h.
#pragma once

#include "cuda/device.h"

namespace fp8serve {

inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  struct Operands {
    uint32_t a[4], b[2];
  };
  const int self = emulator::machine.running % 32;
  Operands mine{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  const float4 sums = emulator::exchange(mine, [&](auto of) {
    float4 out;
    for (int e = 0; e < 4; ++e) {
      const int row = self / 4 + e / 2 * 8, column = self % 4 * 2 + e % 2;
      double sum = 0;
      for (int k = 0; k < 16; ++k) {
        const auto half = [&](uint32_t word) {
          return __uint_as_float(k % 2 == 0 ? word << 16 : word & 0xffff0000u);
        };
        const uint32_t from_a = of(row % 8 * 4 + k % 8 / 2).a[row / 8 + k / 8 * 2];
        const uint32_t from_b = of(column * 4 + k % 8 / 2).b[k / 8];
        sum += static_cast<double>(half(from_a)) * half(from_b);
      }
      (&out.x)[e] = static_cast<float>(sum);
    }
    return out;
  });
  for (int e = 0; e < 4; ++e) c[e] += (&sums.x)[e];
}

}  // namespace fp8serve
