// Which instruction set the kernels use: one table, filled once, with a cap that tests lower to force every
// path.
//
// Two ways to write a kernel:
//  * a struct whose always-inline `run` is plain C++: `dispatch<Kernel>(args...)` compiles it once per level
//    inside a function with that level's `target` attribute, and the compiler vectorises it (quantize.cpp);
//  * intrinsics in functions marked with the macros below, chosen by `isa()` (gemm_*.cpp).
// There are no architecture flags anywhere: nothing outside these functions may use more than the baseline.
#pragma once

#include "fp8.h"

#if defined(__x86_64__)
#define FP8_X86 1
#define FP8_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#if defined(__clang__)
#define FP8_WIDE
#else
#define FP8_WIDE ",prefer-vector-width=512"
#endif
#define FP8_TARGET_AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl" FP8_WIDE)))
#define FP8_TARGET_AVX512BF16 \
  __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16" FP8_WIDE)))
#else
#define FP8_X86 0
#endif

namespace fp8serve {

enum class Isa : int { portable, avx2, avx512, avx512bf16 };

Isa isa();

#if FP8_X86
template <class Kernel, class... Args>
FP8_TARGET_AVX2 void run_avx2(Args... args) {
  Kernel::run(args...);
}
template <class Kernel, class... Args>
FP8_TARGET_AVX512 void run_avx512(Args... args) {
  Kernel::run(args...);
}
#endif

// Kernel::run(args...) at the best level this machine has. AVX-512 BF16 adds nothing to plain vector code.
template <class Kernel, class... Args>
void dispatch(Args... args) {
#if FP8_X86
  const Isa level = isa();
  if (level >= Isa::avx512) return run_avx512<Kernel>(args...);
  if (level == Isa::avx2) return run_avx2<Kernel>(args...);
#endif
  Kernel::run(args...);
}

}  // namespace fp8serve
