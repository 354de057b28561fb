// A thread's scratch memory. It grows on demand and is kept, so that only first calls have page faults.
//
// Large buffers, of which there are few, are rounded up to huge pages. The second-level cache places lines by
// physical address; small pages crowd some of its sets and leave others empty, so that a panel of half the
// cache's size would not stay in it.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

namespace fp8serve {

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { release(); }

  // Memory for `count` values, 64-byte aligned, with undefined content; memory from an earlier call is no
  // longer valid.
  template <class T>
  T* get(int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T) + 64;
    if (bytes > size_) grow(bytes);
    return static_cast<T*>(memory_);
  }

 private:
  static constexpr size_t kHugePage = 2 << 20, kLarge = 1 << 20;
  static constexpr std::align_val_t kLine{64};

  void grow(size_t bytes) {
    release();
    if (bytes < kLarge) {
      memory_ = ::operator new(bytes, kLine);
      size_ = bytes;
    } else {
      map((bytes + kHugePage - 1) / kHugePage * kHugePage);
    }
    std::memset(memory_, 0, size_);
  }

  // A huge page begins at a multiple of its size.
  void map(size_t bytes) {
    mapped_ = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped_ == MAP_FAILED) {
      mapped_ = nullptr;
      throw std::bad_alloc();
    }
    const auto begin = reinterpret_cast<uintptr_t>(mapped_);
    memory_ = static_cast<std::byte*>(mapped_) + (kHugePage - begin % kHugePage) % kHugePage;
    size_ = bytes;
#ifdef MADV_HUGEPAGE
    madvise(memory_, size_, MADV_HUGEPAGE);  // only advice: small pages give the same results, but slower
#endif
  }

  void release() {
    if (mapped_ != nullptr) munmap(mapped_, size_ + kHugePage);
    if (mapped_ == nullptr && memory_ != nullptr) ::operator delete(memory_, kLine);
    memory_ = mapped_ = nullptr;
    size_ = 0;
  }

  void* memory_ = nullptr;
  void* mapped_ = nullptr;  // the mapping that contains `memory_`, if it is large
  size_t size_ = 0;
};

}  // namespace fp8serve
