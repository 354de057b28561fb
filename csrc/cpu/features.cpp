// The features of this processor; `fp8serve::cpu_isa(str cap) -> str`, which caps them and returns the level
// in force; and `fp8serve::cpu_kernels() -> str`, which returns the variant that each op runs, as JSON.
//
// The cap is a test hook: it holds for the whole process, "best" lifts it, "" only asks. It is a level, which
// is a name for a set of features, or several levels and features joined by "+". The level in force is the
// highest one whose features are all in force. "slow_dot" is measured when the library is loaded; a cap that
// names it puts it in force anywhere, since it changes no bit. "amx" and "emulated_amx" are in force only
// while a cap names them, because no machine with AMX has measured their kernels. Neither op takes a tensor,
// so they are registered for no device.
#include "cpu/features.h"

#include <torch/csrc/stable/library.h>

#include <atomic>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "check.h"

#if FP8_X86 && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if FP8_X86
#include <immintrin.h>
#endif
#if FP8_NEON && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace fp8serve {
namespace {

struct Named {
  std::string_view name;
  Features features;
};
constexpr std::array<Named, 9> kLevels{{{"portable", kPortable},
                                        {"avx2", kAvx2},
                                        {"avx512", kAvx512},
                                        {"avx512bf16", kAvx512Bf16},
                                        {"amx", kAmx},
                                        {"emulated_amx", kEmulatedAmx},
                                        {"neon", kNeon},
                                        {"neonfhm", kNeonFhm},
                                        {"neonbf16", kNeonBf16}}};
constexpr std::array<Named, 7> kFlags{{{"fma", feature::fma},
                                       {"avx512f", feature::avx512f},
                                       {"avx512bw", feature::avx512bw},
                                       {"avx512dq", feature::avx512dq},
                                       {"avx512vl", feature::avx512vl},
                                       {"avx512vbmi", feature::avx512vbmi},
                                       {"slow_dot", feature::slow_dot}}};

#if FP8_X86
// Returns the processor's time for many instructions of one kind, in ticks: eight sums at a time.
template <bool is_dot>
FP8_TARGET_AVX512BF16 __attribute__((noinline)) uint64_t time_sums() {
  __m512 sums[8], one = _mm512_set1_ps(1.0f);
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  const uint64_t begin = __rdtsc();
  for (int i = 0; i < 64; ++i) {
#pragma GCC unroll 8
    for (__m512& sum : sums) {
      const auto pairs = reinterpret_cast<__m512bh>(one);
      sum = is_dot ? _mm512_dpbf16_ps(sum, pairs, pairs) : _mm512_fmadd_ps(one, one, sum);
      asm volatile("" : "+v"(sum), "+v"(one));
    }
  }
  return __rdtsc() - begin;
}

// Whether the processor takes longer for a BF16 dot product than for two FP32 FMAs, which do the same work.
// On a Zen 4 it takes half as long, on a Granite Rapids twice as long. An interruption makes a time longer,
// never shorter.
bool has_slow_dot() {
  uint64_t dot = UINT64_MAX, fma = UINT64_MAX;
  for (int i = 0; i < 16; ++i) {
    dot = std::min(dot, time_sums<true>());
    fma = std::min(fma, time_sums<false>());
  }
  return dot > 2 * fma;
}
#endif

Features detect_features() {
#if FP8_X86
  __builtin_cpu_init();
  const auto flag = [](bool has_feature, Features f) { return has_feature ? f : 0; };
  const Features found = flag(__builtin_cpu_supports("avx2"), feature::avx2) |
                         flag(__builtin_cpu_supports("fma"), feature::fma) |
                         flag(__builtin_cpu_supports("avx512f"), feature::avx512f) |
                         flag(__builtin_cpu_supports("avx512bw"), feature::avx512bw) |
                         flag(__builtin_cpu_supports("avx512dq"), feature::avx512dq) |
                         flag(__builtin_cpu_supports("avx512vl"), feature::avx512vl) |
                         flag(__builtin_cpu_supports("avx512vbmi"), feature::avx512vbmi) |
                         flag(__builtin_cpu_supports("avx512bf16"), feature::avx512bf16);
  return found | flag((found & kAvx512Bf16) == kAvx512Bf16 && has_slow_dot(), feature::slow_dot);
#elif FP8_NEON && defined(__linux__)
  return kNeon | ((getauxval(AT_HWCAP) & HWCAP_ASIMDFHM) != 0 ? feature::fhm : 0) |
         ((getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0 ? feature::bf16 : 0);
#elif FP8_NEON
  return kNeon;
#else
  return kPortable;
#endif
}

Features detect() {
  static const Features detected = detect_features();
  return detected;
}

// Whether the processor has tiles of BF16, and the system saves them and allows this process to use them.
bool allows_amx() {
#if FP8_X86 && defined(__linux__)
  constexpr unsigned amx_bf16 = 1 << 22, amx_tile = 1 << 24, tile_state = 3 << 17;
  constexpr long request_permission = 0x1023, tile_data = 18;  // of arch_prctl
  unsigned a = 0, b = 0, c = 0, d = 0, saved = 0, high = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  if ((d & amx_bf16) == 0 || (d & amx_tile) == 0) return false;
  asm volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  return (saved & tile_state) == tile_state && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

// The features that a cap can put in force although they were not detected. The system is asked for AMX only
// where the cap names it, because its permission lasts as long as the process.
Features detect_optional(Features named) {
  if ((detect() & kAvx512Bf16) != kAvx512Bf16) return 0;
  return feature::emulated_amx | (named & feature::slow_dot) |
         ((named & feature::amx) != 0 && allows_amx() ? feature::amx : 0);
}

std::atomic<Features> in_force{detect()};

template <size_t N>
std::optional<Features> find(const std::array<Named, N>& names, std::string_view name) {
  const auto entry = std::find_if(names.begin(), names.end(), [&](const Named& n) { return n.name == name; });
  return entry == names.end() ? std::nullopt : std::optional(entry->features);
}

// Returns the features that a cap such as "avx512" or "avx512+avx512vbmi" names.
Features parse(const std::string& cap) {
  Features all = kPortable;
  for (size_t begin = 0, end = 0; begin <= cap.size(); begin = end + 1) {
    end = std::min(cap.find('+', begin), cap.size());
    const std::string_view name = std::string_view(cap).substr(begin, end - begin);
    const auto level = find(kLevels, name), features = level ? level : find(kFlags, name);
    Contract("cpu_isa").require(features.has_value(), "cap", "is '", cap,
                                "', must be portable, avx2, avx512, avx512bf16, amx, neon, neonfhm, "
                                "neonbf16, one of these with features such as +avx512vbmi, best, or empty to "
                                "ask");
    all |= *features;
  }
  return all;
}

std::string cpu_isa(std::string cap) {
  if (cap == "best") {
    in_force = detect();
  } else if (!cap.empty()) {
    const Features named = parse(cap);
    in_force = (detect() | detect_optional(named)) & named;
  }
  std::string_view highest;
  for (const Named& level : kLevels) {
    if (has(level.features)) highest = level.name;
  }
  return std::string(highest);
}

using Reports = std::map<std::string, const Variant& (*)()>;
Reports& reports() {
  static Reports all;  // made on first use: libraries of ops are registered in no particular order
  return all;
}

const char* name_of(Numerics numerics) {
  constexpr std::array<const char*, 8> names = {"exact",        "last_bit",     "sums_fp64",  "four_lanes",
                                                "tiles16_fp32", "tiles64_bf16", "pairs_bf16", "amx_tiles"};
  return names[static_cast<size_t>(numerics)];
}

std::string cpu_kernels() {
  std::string json = "{";
  for (const auto& [op, variant] : reports()) {
    const Variant& v = variant();
    json += json.size() > 1 ? ", \"" : "\"";
    json += op + R"(": {"variant": ")" + v.name + R"(", "numerics": ")" + name_of(v.numerics) + "\"}";
  }
  return json + "}";
}

}  // namespace

Features features() { return in_force.load(std::memory_order_relaxed); }

void report(const char* op, const Variant& (*variant)()) { reports().emplace(op, variant); }

}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&fp8serve::cpu_isa));
  m.impl("cpu_kernels", TORCH_BOX(&fp8serve::cpu_kernels));
}
