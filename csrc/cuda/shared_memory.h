// Shared memory beyond 48 KiB of a block, which a kernel has to be allowed: what it declares itself counts,
// too. Apart from device.h and without CUDA's headers, so that a test runs it without a GPU.
#pragma once

#include <map>
#include <mutex>
#include <utility>

namespace fp8serve {

// What every kernel was allowed so far, on every device. `Runtime`: device(), static_bytes(kernel) and
// allow(kernel, dynamic bytes), which a test counts.
template <class Runtime>
class SharedMemory {
 public:
  static constexpr int kFree = 48 * 1024;  // a block's, without asking

  // To be called before a launch with that much dynamic shared memory.
  void need(const void* kernel, int dynamic_bytes) {
    if (dynamic_bytes == 0) return;
    const std::lock_guard guard(mutex_);
    const auto [entry, is_new] = allowed_.try_emplace({Runtime::device(), kernel}, 0);
    if (is_new) entry->second = kFree - Runtime::static_bytes(kernel);
    if (dynamic_bytes <= entry->second) return;
    Runtime::allow(kernel, dynamic_bytes);
    entry->second = dynamic_bytes;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, const void*>, int> allowed_;  // dynamic bytes
};

}  // namespace fp8serve
