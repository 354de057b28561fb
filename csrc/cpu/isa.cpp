// The instruction-set table and `fp8serve::cpu_isa(str cap) -> str`, which caps the level and returns the
// one in force.
//
// It is a test hook: a cap holds for the whole process, "best" lifts it, "" only asks. Having no tensor
// argument it is registered for no device.
#include "cpu/isa.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <string>

#include "check.h"

namespace fp8serve {
namespace {

constexpr std::array<const char*, 4> kNames = {"portable", "avx2", "avx512", "avx512bf16"};

Isa detect() {
#if FP8_X86
  __builtin_cpu_init();
  const auto has = [](bool a, bool b) { return a && b; };
  if (!has(__builtin_cpu_supports("avx2"), __builtin_cpu_supports("fma"))) return Isa::portable;
  if (!has(__builtin_cpu_supports("avx512f"), __builtin_cpu_supports("avx512bw"))) return Isa::avx2;
  if (!has(__builtin_cpu_supports("avx512dq"), __builtin_cpu_supports("avx512vl"))) return Isa::avx2;
  if (!has(__builtin_cpu_supports("avx512bf16"), __builtin_cpu_supports("avx512vbmi"))) return Isa::avx512;
  return Isa::avx512bf16;
#else
  return Isa::portable;
#endif
}

std::atomic<Isa> current{detect()};

std::string cpu_isa(std::string cap) {
  if (cap == "best") {
    current = detect();
  } else if (!cap.empty()) {
    const auto found = std::find(kNames.begin(), kNames.end(), cap);
    Contract("cpu_isa").require(found != kNames.end(), "cap", "is '", cap,
                                "', must be portable, avx2, avx512, avx512bf16, best, or empty to ask");
    current = std::min(detect(), static_cast<Isa>(std::distance(kNames.begin(), found)));
  }
  return kNames[static_cast<size_t>(current.load())];
}

}  // namespace

Isa isa() { return current.load(std::memory_order_relaxed); }

}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&fp8serve::cpu_isa));
}
