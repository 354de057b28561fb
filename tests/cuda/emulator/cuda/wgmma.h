// The emulated counterpart of csrc/cuda/wgmma.h.
//
// A product is computed when the thread waits for it, from the contents of registers and shared memory at
// that time; until then its sums are poisoned. So a missing wait, and a write to registers or memory that is
// too early, change the result. As on the hardware, the 64 bits of a descriptor address a matrix.
//
// For ThreadSanitizer (races.h), one fiber of a thread makes its products' accesses to registers, another
// their accesses to shared memory. The first is ordered after the thread's last wgmma_fence(). The second is
// ordered after the thread's last fence_async_proxy(), and synchronizes with the second fibers of other
// threads at the block's barriers. So a write to shared memory is ordered before a product only by a fence
// and a barrier together. The thread is ordered after both fibers when it has waited for the group.
#pragma once

#include <algorithm>
#include <array>

#include "cuda/device.h"
#include "cuda/wgmma_matrix.h"

namespace fp8serve {

namespace emulator {

constexpr uint32_t kDynamicShared = 1024;  // the address where a block's dynamic shared memory begins

inline const char* at_address(uint32_t address) {
  if (address < kDynamicShared || address + 16 > kDynamicShared + kMostShared) {
    refuse("a product reads outside of shared memory");
  }
  return reinterpret_cast<const char*>(dynamic_shared()) + (address - kDynamicShared);
}

// Finds a chunk of 16 bytes of a matrix. With columns of K, `outer` is a row of M or N, and `chunk` counts
// eights of K; else `outer` is a row of K, and `chunk` counts eights of N.
class Matrix {
 public:
  Matrix(uint64_t descriptor, bool columns_of_k)
      : start_(field(descriptor)),
        leading_(field(descriptor >> 16)),
        stride_(field(descriptor >> 32)),
        columns_of_k_(columns_of_k) {
    const bool offset = (descriptor >> 49 & 7) != 0, swizzled = descriptor >> 62 == 1;
    if (offset || !swizzled) refuse("this matrix is not swizzled by 128 bytes");
  }

  const char* at(uint32_t outer, uint32_t chunk) const {
    const uint32_t across = columns_of_k_ ? 16 * chunk : chunk / 8 * leading_ + chunk % 8 * 16;
    const uint32_t address = start_ + outer / 8 * stride_ + outer % 8 * 128 + across;
    return at_address(address ^ (address >> 7 & 7) << 4);  // the chip swizzles by bits of the address
  }

 private:
  static uint32_t field(uint64_t bits) { return static_cast<uint32_t>(bits & 0x3fff) << 4; }
  uint32_t start_, leading_, stride_;
  bool columns_of_k_;
};

inline float bfloat_at(const char* chunk, uint32_t element) {
  uint16_t half;
  std::memcpy(&half, chunk + 2 * element, sizeof(half));
  return __uint_as_float(static_cast<uint32_t>(half) << 16);
}

constexpr uint32_t kPoison = 0x7fbadbad;  // a NaN

inline bool is_poisoned(const Product& product) {
  return std::all_of(product.sums, product.sums + product.count,
                     [](float sum) { return __float_as_uint(sum) == kPoison; });
}

// Saves and poisons the product's sums, unless another product in flight has done so already.
inline void take_sums(Product& product, const std::vector<Products>& others) {
  for (const Products& group : others) {
    for (const Product& other : group.issued) {
      if (other.sums == product.sums) return;
    }
  }
  product.addend.assign(product.sums, product.sums + product.count);
  std::fill_n(product.sums, product.count, __uint_as_float(kPoison));
}

// Returns the left operand's 16 elements of the thread's rows g and g + 8 (g is lane / 4).
inline std::array<std::array<float, 16>, 2> left_rows(const Product& product, size_t group, size_t at) {
  const int self = machine.lane(), warp = machine.block->running / 32 % 4;
  std::array<std::array<float, 16>, 2> rows;
  for (uint32_t r = 0; r < 2; ++r) {
    for (uint32_t k = 0; k < 16; ++k) {
      if (product.left == nullptr) {
        const uint32_t row = static_cast<uint32_t>(16 * warp + self / 4) + 8 * r;
        rows[r][k] = bfloat_at(Matrix(product.a, true).at(row, k / 8), k % 8);
      } else {  // lane t of the quad holds elements 2t and 2t + 1 of both eights, of both rows
        const Thread& owner = lane(self / 4 * 4 + static_cast<int>(k % 8 / 2));
        const uint32_t word = owner.products[group].issued[at].left[r + 2 * (k / 8)];
        rows[r][k] = __uint_as_float(k % 2 == 0 ? word << 16 : word & 0xffff0000u);
      }
    }
  }
  return rows;
}

inline std::vector<float> sums_of(const Product& product, size_t group, size_t at) {
  const auto left = left_rows(product, group, at);
  const Matrix b(product.b, product.columns_of_k);
  const uint32_t t = static_cast<uint32_t>(machine.lane() % 4);
  std::vector<float> sums(static_cast<size_t>(product.count));
  for (uint32_t i = 0; i < sums.size(); ++i) {
    const uint32_t column = i / 4 * 8 + 2 * t + i % 2, row = i % 4 / 2;
    double sum = 0;
    for (uint32_t k = 0; k < 16; ++k) {
      const float right = product.columns_of_k ? bfloat_at(b.at(column, k / 8), k % 8)
                                               : bfloat_at(b.at(k, column / 8), column % 8);
      sum += static_cast<double>(left[row][k]) * right;
    }
    sums[i] = static_cast<float>(sum);
  }
  return sums;
}

// Writes the result to the sums, or passes it to the next product in flight that has the same sums.
inline void finish(Thread& self, size_t group, size_t at, const std::vector<float>& sums) {
  Product& product = self.products[group].issued[at];
  if (!is_poisoned(product)) {
    refuse("the sums of a product were written before it was waited for");
  }
  std::vector<float> result(sums.size());
  for (size_t i = 0; i < sums.size(); ++i) result[i] = (product.adds ? product.addend[i] : 0.0f) + sums[i];
  for (size_t g = group; g < self.products.size(); ++g) {
    for (size_t i = g == group ? at + 1 : 0; i < self.products[g].issued.size(); ++i) {
      if (self.products[g].issued[i].sums != product.sums) continue;
      self.products[g].issued[i].addend = result;
      return;
    }
  }
  std::copy(result.begin(), result.end(), product.sums);
}

// Calls f(address) for each 16 bytes of shared memory that a thread's part of a product reads: the lanes of a
// warp share the warp's 16 rows of a, and all of b.
template <class F>
void for_memory(const Product& product, const F& f) {
  const uint32_t lane = static_cast<uint32_t>(machine.lane());
  const uint32_t warp = static_cast<uint32_t>(machine.block->running / 32 % 4);
  if (product.left == nullptr) f(Matrix(product.a, true).at(16 * warp + lane / 2, lane % 2));
  const Matrix b(product.b, product.columns_of_k);
  const uint32_t columns = static_cast<uint32_t>(2 * product.count);
  for (uint32_t i = lane; i < 2 * columns; i += 32) {
    f(product.columns_of_k ? b.at(i / 2, i % 2) : b.at(i % 16, i / 16));
  }
}

inline void note_accesses(const Product& product, Thread& self) {
  const auto count = static_cast<size_t>(product.count);
  float* const sums = product.sums;
  const uint32_t* const left = product.left;
  as(self.of_registers, [&]() __attribute__((always_inline)) {
    races::writes(sums, count * sizeof(float));
    if (left != nullptr) races::reads(left, 4 * sizeof(uint32_t));
  });
  void* const memory = self.of_memory;
  for_memory(product, [memory](const char* chunk) {
    as(memory, [&]() __attribute__((always_inline)) { races::reads(chunk, 16); });
  });
}

inline void need_fibers(Thread& self) {
  if (self.of_memory == nullptr) self.of_memory = races::new_fiber();
  if (self.of_registers == nullptr) self.of_registers = races::new_fiber();
}

inline void issue(Product product) {
  const races::Unwatched bookkeeping;
  Thread& self = machine.self();
  if (!self.fenced) refuse("a warpgroup's first product without wgmma_fence()");
  if (machine.count % 128 != 0) refuse("four warps make a warpgroup");
  need_fibers(self);
  note_accesses(product, self);
  take_sums(product, self.products);
  self.products.back().issued.push_back(std::move(product));
}

// Finishes the oldest group. All lanes of the warp call this together.
inline void finish_group() {
  Thread& self = machine.self();
  wait(State::at_warp_barrier);  // all lanes are here, and none has written what others still read
  std::vector<std::vector<float>> sums;
  for (size_t i = 0; i < self.products[0].issued.size(); ++i) {
    sums.push_back(sums_of(self.products[0].issued[i], 0, i));
  }
  wait(State::at_warp_barrier);
  for (size_t i = 0; i < sums.size(); ++i) finish(self, 0, i, sums[i]);
  races::happens_after(self.products[0].done.get());
  self.products.erase(self.products.begin());
}

}  // namespace emulator

inline uint32_t shared_address(const void* shared) {
  const auto offset = static_cast<const unsigned char*>(shared) - dynamic_shared();
  return emulator::kDynamicShared + static_cast<uint32_t>(offset);
}

inline void fence_async_proxy(const Site& site = Site::current()) {
  emulator::Thread& self = emulator::machine.self();
  emulator::races::stop_watching();
  emulator::need_fibers(self);
  emulator::races::watch();
  if (!emulator::is_executed(site)) return;
  char* const point = &self.proxy_fence;
  emulator::races::happens_before(point);
  emulator::as(self.of_memory,
               [&]() __attribute__((always_inline)) { emulator::races::happens_after(point); });
}

inline void wgmma_fence(const Site& site = Site::current()) {
  if (!emulator::is_executed(site)) return;
  emulator::Thread& self = emulator::machine.self();
  emulator::races::stop_watching();
  emulator::need_fibers(self);
  self.fenced = true;
  emulator::races::watch();
  char* const point = &self.fence;
  emulator::races::happens_before(point);
  emulator::as(self.of_registers,
               [&]() __attribute__((always_inline)) { emulator::races::happens_after(point); });
}

inline void wgmma_commit(const Site& site = Site::current()) {
  if (!emulator::is_executed(site)) return;
  const emulator::races::Unwatched bookkeeping;
  emulator::Thread& self = emulator::machine.self();
  emulator::need_fibers(self);
  char* const point = self.products.back().done.get();
  for (void* fiber : {self.of_registers, self.of_memory}) {
    emulator::as(fiber, [&]() __attribute__((always_inline)) { emulator::races::happens_before(point); });
  }
  self.products.emplace_back();
}

template <int kPending>
void wgmma_wait(const Site& site = Site::current()) {
  if (!emulator::is_executed(site)) return;
  const emulator::races::Unwatched bookkeeping;
  while (emulator::machine.self().products.size() > kPending + 1) emulator::finish_group();
}

template <class T, int kCount>
void hold(T (&)[kCount][4]) {}

template <bool kAdd>
void wgmma(float (&c)[8][4], uint64_t a, uint64_t b) {
  emulator::issue({&c[0][0], nullptr, a, b, 32, kAdd, true, {}});
}
template <int kEights>
void wgmma(float (&c)[kEights][4], const uint32_t (&a)[4], uint64_t b) {
  emulator::issue({&c[0][0], a, 0, b, 4 * kEights, true, false, {}});
}

}  // namespace fp8serve
