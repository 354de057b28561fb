// Allows kernels more than 48 KiB of shared memory per block, static and dynamic together, which CUDA
// requires before the launch. In a header of its own without CUDA's headers, so that a test can run it
// without a GPU.
#pragma once

#include <map>
#include <mutex>
#include <utility>

namespace fp8serve {

// Remembers how much every kernel is allowed on every device. `Runtime` has the functions device(),
// static_bytes(kernel) and allow(kernel, dynamic bytes); a test passes one that counts the calls.
template <class Runtime>
class SharedMemory {
 public:
  static constexpr int kFree = 48 * 1024;  // of a block, allowed to every kernel

  // The caller calls this before a launch with so much dynamic shared memory.
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
