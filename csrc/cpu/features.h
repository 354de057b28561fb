// The features of a processor, the kernel variants that they allow, and the numerics class of a variant.
//
// A variant names the features that it needs and its numerics class. The variants of a family of kernels
// are in a table, best first, and the first whose features are all in force runs. No code tests for a
// level: a processor with more features than a table names runs the table's best variant.
//
// Two ways to write a variant:
//  * a struct whose always-inline `run` is plain C++: `dispatch<Kernel>(args...)` compiles it once for
//    each of kVector in a function with that `target` attribute, and the compiler vectorises it
//    (quantize.cpp);
//  * intrinsics in functions marked with the macros below (gemm_*.cpp).
// The build sets no architecture flags: code outside of these functions uses the baseline only.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

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
#define FP8_TARGET_AVX512VBMI \
  __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi" FP8_WIDE)))
#define FP8_TARGET_AVX512BF16 \
  __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16" FP8_WIDE)))
#define FP8_TARGET_AMX                                                                 \
  __attribute__((                                                                      \
      target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16," \
             "amx-tile,amx-bf16" FP8_WIDE)))
#else
#define FP8_X86 0
#endif

#if defined(__aarch64__)
#define FP8_NEON 1
#define FP8_TARGET_NEON_FHM __attribute__((target("arch=armv8.2-a+fp16fml")))
#define FP8_TARGET_NEON_BF16 __attribute__((target("arch=armv8.2-a+fp16fml+bf16")))
#else
#define FP8_NEON 0
#endif

namespace fp8serve {

using Features = uint32_t;  // a set of flags
namespace feature {
constexpr Features avx2 = 1 << 0, fma = 1 << 1, avx512f = 1 << 2, avx512bw = 1 << 3, avx512dq = 1 << 4,
                   avx512vl = 1 << 5, avx512vbmi = 1 << 6, avx512bf16 = 1 << 7, neon = 1 << 8, bf16 = 1 << 9,
                   amx = 1 << 10,  // tiles of BF16, which the system allows this process
    emulated_amx = 1 << 11, fhm = 1 << 12,
                   slow_dot = 1 << 13;  // `vdpbf16ps` takes longer than two FMAs
}  // namespace feature

// The features that code under each of the macros needs. Every processor with AVX2 has F16C.
constexpr Features kPortable = 0;
constexpr Features kAvx2 = feature::avx2 | feature::fma;
constexpr Features kAvx512 =
    kAvx2 | feature::avx512f | feature::avx512bw | feature::avx512dq | feature::avx512vl;
constexpr Features kAvx512Vbmi = kAvx512 | feature::avx512vbmi;
constexpr Features kAvx512Bf16 = kAvx512Vbmi | feature::avx512bf16;
constexpr Features kSlowDot = kAvx512Bf16 | feature::slow_dot;
// Not in force unless a cap names them (features.cpp).
constexpr Features kAmx = kAvx512Bf16 | feature::amx;
constexpr Features kEmulatedAmx = kAvx512Bf16 | feature::emulated_amx;
constexpr Features kNeon = feature::neon;            // which every 64-bit ARM processor has
constexpr Features kNeonFhm = kNeon | feature::fhm;  // FMLAL, from ARMv8.4 on
constexpr Features kNeonBf16 = kNeonFhm | feature::bf16;

Features features();  // the processor's, without those that a test has capped
inline bool has(Features needed) { return (features() & needed) == needed; }

// The order of a kernel's sums and their accuracy: docs/numerics.md describes each class, and tests check
// that a variant follows its class. Variants of one class give the same bits.
enum class Numerics {
  exact,
  last_bit,
  sums_fp64,
  four_lanes,
  tiles16_fp32,
  tiles64_bf16,
  pairs_bf16,
  amx_tiles
};

struct Variant {
  const char* name;
  Features needs;
  Numerics numerics;
};

// Plain C++ as the compiler vectorises it, and the same with the hand-written cast of cast_vbmi.cpp.
template <Numerics numerics>
inline constexpr std::array<Variant, 3> kVector{
    {{"avx512", kAvx512, numerics}, {"avx2", kAvx2, numerics}, {"portable", kPortable, numerics}}};
template <Numerics numerics>
inline constexpr std::array<Variant, 4> kCasting{{{"avx512vbmi", kAvx512Vbmi, numerics},
                                                  {"avx512", kAvx512, numerics},
                                                  {"avx2", kAvx2, numerics},
                                                  {"portable", kPortable, numerics}}};
inline constexpr std::array<Variant, 1> kPlain{{{"portable", kPortable, Numerics::exact}}};

// The first of a table's variants whose features are in force; its last one needs none.
template <size_t N>
const Variant& best(const std::array<Variant, N>& table) {
  return *std::find_if(table.begin(), table.end(), [](const Variant& v) { return has(v.needs); });
}

// Records which variant an op runs, for `backends()` and doctor; called where the op is registered.
void report(const char* op, const Variant& (*variant)());
template <const auto& table>
void report(const char* op) {
  report(op, []() -> const Variant& { return best(table); });
}

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

// Kernel::run(args...) as the best variant of kVector.
template <class Kernel, class... Args>
void dispatch(Args... args) {
#if FP8_X86
  if (has(kAvx512)) return run_avx512<Kernel>(args...);
  if (has(kAvx2)) return run_avx2<Kernel>(args...);
#endif
  Kernel::run(args...);
}

}  // namespace fp8serve
