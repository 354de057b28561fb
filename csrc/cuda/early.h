// Launches that may begin while the kernels before them in the stream still run (programmatic dependent
// launch): when its inputs become available, such a kernel is already resident, has computed its indices
// and has begun to load its weights.
//
// Before after_earlier_kernels() (device.h) a kernel must not read what earlier kernels write, and must not
// write anything. Every kernel that is launched early calls it on every path. Only code that we compile for
// Hopper and later chips contains the wait: code that the driver compiles from the PTX for Ada does not
// wait, so its kernels are not launched early. This header does not include CUDA's headers, so that a test
// can run it without a GPU.
#pragma once

#include <map>
#include <mutex>
#include <utility>

#include "cuda/gemm_switches.h"

namespace fp8serve {

constexpr int kWaitsFrom = 90;  // first architecture for which kernels are compiled with the wait

// Knows which kernels may be launched early on each device. `Runtime` has device(), the current device, and
// virtual_architecture(kernel), the architecture (10 * major + minor) of the PTX that the running code was
// compiled from.
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
