// The kernels of matrix products and of attention that can be switched off, by name: the self-check
// (fp8/selfcheck) does so with one that gave wrong results on this machine, and the next one takes over.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

namespace fp8serve {

// In the order in which they take over from each other. `cublaslt` multiplies by one scale a tensor,
// `cublaslt_rows` by one a row; `grouped_cutlass` is that of products of experts. Of attention, without
// `attention_wgmma` warps take prompts, too, and without `attention_mma` no tensor core takes any row.
// Without `gated` the product of gate and up is cast by a launch of its own. `overlap` is no kernel: with it
// off, no launch begins before those before it have ended (early.h). Nor is `early_weights`: with it off, no
// product reads stored weights before those before it have ended.
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
  grouped_cutlass,
  attention_mma,
  attention_wgmma,
  overlap,
  early_weights,
  gated
};
inline constexpr std::array<std::string_view, 16> kGemmKernels = {
    "skinny",          "large",   "medium",        "small",         "thin128",         "thin64",
    "thin32",          "mma",     "cublaslt",      "cublaslt_rows", "grouped_cutlass", "attention_mma",
    "attention_wgmma", "overlap", "early_weights", "gated"};

class GemmSwitches {
 public:
  bool on(GemmKernel kernel) const {
    return (off_.load(std::memory_order_relaxed) >> static_cast<int>(kernel) & 1) == 0;
  }

  // Those that are off, joined by "+".
  std::string off() const {
    std::string names;
    for (size_t i = 0; i < kGemmKernels.size(); ++i) {
      if (!on(static_cast<GemmKernel>(i))) names.append(names.empty() ? "" : "+").append(kGemmKernels[i]);
    }
    return names;
  }

  // Switches these off, joined by "+", and all others on; false, and no change, for an unknown name.
  bool turn_off(std::string_view names) {
    uint32_t off = 0;
    while (!names.empty()) {
      const size_t end = std::min(names.find('+'), names.size());
      const auto* found = std::find(kGemmKernels.begin(), kGemmKernels.end(), names.substr(0, end));
      if (found == kGemmKernels.end()) return false;
      off |= 1u << (found - kGemmKernels.begin());
      names.remove_prefix(std::min(end + 1, names.size()));
    }
    off_ = off;
    return true;
  }

 private:
  std::atomic<uint32_t> off_{0};  // a bit for each GemmKernel
};
inline GemmSwitches gemm_switches;

}  // namespace fp8serve
