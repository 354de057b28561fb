// Launches that may begin while the kernels before them in the stream still run (programmatic dependent
// launch): a kernel is there, with its indices computed and its weights on the way, when the values arrive.
//
// What earlier kernels have written is not to be read before after_earlier_kernels() (device.h), nor is
// anything to be written: every kernel that is launched early calls it, on every way through. Hence the code
// that runs must be ours for a chip from Hopper on. Code that the driver made of the one for Ada does not
// wait. Apart from device.h and without CUDA's headers, so that a test runs it without a GPU.
#pragma once

#include <map>
#include <mutex>
#include <utility>

#include "cuda/gemm_switches.h"

namespace fp8serve {

constexpr int kWaitsFrom = 90;  // architecture from which on kernels are compiled with the wait

// Which kernels may be launched early, on every device. `Runtime`: device() and virtual_architecture(kernel),
// for which the code that runs was compiled first (10 * major + minor).
template <class Runtime>
class EarlyLaunches {
 public:
  bool possible(const void* kernel) {
    if (!gemm_switches.on(GemmKernel::overlap)) return false;
    const std::lock_guard guard(mutex_);
    const auto [entry, is_new] = waits_.try_emplace({Runtime::device(), kernel}, false);
    if (is_new) entry->second = Runtime::virtual_architecture(kernel) >= kWaitsFrom;
    return entry->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, const void*>, bool> waits_;
};

}  // namespace fp8serve
