// Switches, by name, for the kernels of matrix products and of attention. The self-check (fp8/selfcheck)
// switches off a kernel that gave wrong results on this machine, and the next one is used instead.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

namespace fp8serve {

// In the order in which they replace each other:
//
//   skinny            gemm_skinny.cu
//   large ... thin32  CUTLASS, by tile
//   mma               gemm_sm89.cu
//   cublaslt          torch's product with a scale per tensor
//   cublaslt_rows     torch's product with a scale per row of one operand or of both
//   tall              gemm_tall.cu, which only the invariant mode uses
//   grouped_cutlass   CUTLASS, for products of experts
//   attention_mma     attention on tensor cores; if off, attention uses no tensor cores at all
//   attention_wgmma   attention on warpgroups; if off, attention_mma takes prompts, too
//   overlap           no kernel; if off, no launch begins before the preceding ones have ended (early.h)
//   early_weights     no kernel; if off, no product reads stored weights before preceding launches have ended
//   gated             product and cast of gate and up in one launch; if off, a second launch casts
//   rotary            product of queries, keys and values, rotary embedding and cache write in one launch; if
//                     off, a second launch rotates and writes
//   normed            a product that casts the norm of its input; if off (the default), another launch casts
//   by_rows           no kernel; if off, no kernel is chosen by the number of rows (the invariant mode)
enum class GemmKernel : uint8_t {
  skinny,
  large,
  medium,
  small,
  thin128,
  thin64,
  thin32,
  mma,
  cublaslt,
  cublaslt_rows,
  tall,
  grouped_cutlass,
  attention_mma,
  attention_wgmma,
  overlap,
  early_weights,
  gated,
  rotary,
  normed,
  by_rows
};
inline constexpr std::array<std::string_view, 20> kGemmKernels = {
    "skinny",        "large",           "medium",        "small",           "thin128",
    "thin64",        "thin32",          "mma",           "cublaslt",        "cublaslt_rows",
    "tall",          "grouped_cutlass", "attention_mma", "attention_wgmma", "overlap",
    "early_weights", "gated",           "rotary",        "normed",          "by_rows"};

class GemmSwitches {
 public:
  bool on(GemmKernel kernel) const {
    return (off_.load(std::memory_order_relaxed) >> static_cast<int>(kernel) & 1) == 0;
  }

  // Returns the names of the kernels that are off, joined by "+".
  std::string off() const {
    std::string names;
    for (size_t i = 0; i < kGemmKernels.size(); ++i) {
      if (!on(static_cast<GemmKernel>(i))) names.append(names.empty() ? "" : "+").append(kGemmKernels[i]);
    }
    return names;
  }

  // Switches off the kernels that `names` lists, joined by "+", and all others on. Returns false and changes
  // nothing if a name is unknown.
  bool turn_off(std::string_view names) {
    uint32_t off = 0;
    while (!names.empty()) {
      const size_t end = std::min(names.find('+'), names.size());
      const auto* kernel = std::find(kGemmKernels.begin(), kGemmKernels.end(), names.substr(0, end));
      if (kernel == kGemmKernels.end()) return false;
      off |= 1u << (kernel - kGemmKernels.begin());
      names.remove_prefix(std::min(end + 1, names.size()));
    }
    off_ = off;
    return true;
  }

 private:
  // A bit for each GemmKernel. What no GPU has measured yet is off.
  std::atomic<uint32_t> off_{1u << static_cast<int>(GemmKernel::normed)};
};
inline GemmSwitches gemm_switches;

// Returns whether the order of every sum must not depend on the number of rows that are computed together.
inline bool is_invariant() { return !gemm_switches.on(GemmKernel::by_rows); }

}  // namespace fp8serve
