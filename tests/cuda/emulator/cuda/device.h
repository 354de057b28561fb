// A GPU emulated in C++: replaces csrc/cuda/device.h, so that the unchanged kernels run on a machine without
// a GPU.
//
// A block's threads take turns on one processor (threads.h). Asynchronous copies land when they are waited
// for and not before, warp instructions have the register layouts of the PTX manual, and shared memory is
// poisoned before each block, so that a missing wait, a wrong lane or an unwritten word changes the result.
// Compiled with ThreadSanitizer (races.h), the emulator also finds data races between barriers, and between
// blocks of a cooperative launch or a cluster, which run concurrently (grid.h). It says
// nothing about a kernel's speed, and is slow itself: tens of milliseconds for a tile of a GEMM.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "cuda/gemm_switches.h"
#include "fp8.h"
#include "grid.h"

#define FP8SERVE_OPS fp8serve_emulated
#define FP8SERVE_DEVICE_KEY CPU

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static  // of the one block that is resident; tests/cuda/emulated.py finds it by its symbol
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

namespace fp8serve {

using Stream = void*;
using torch::stable::Tensor;

inline bool lives_here(const Tensor& t) { return t.is_cpu(); }

class OnDevice {
 public:
  explicit OnDevice(const Tensor&) {}
  Stream stream() const { return nullptr; }
  int index() const { return 0; }
  bool is_capturing() const { return emulator::settings.capturing; }
  int multiprocessors() const { return emulator::settings.chip.multiprocessors; }
  int capability() const { return emulator::settings.chip.capability; }
  int shared_bytes() const { return emulator::settings.chip.shared_bytes; }
};

// --- launches
// -----------------------------------------------------------------------------------------------------

#define threadIdx (::fp8serve::emulator::machine.block->thread_index)
#define blockIdx (::fp8serve::emulator::machine.block->index)
#define blockDim (::fp8serve::emulator::machine.block_size)
#define gridDim (::fp8serve::emulator::machine.grid_size)

struct LaunchKind {
  bool early = false, cooperative = false;
  unsigned cluster = 1;
};

template <class... P, class... A>
void run_kernel(const LaunchKind& kind, void (*kernel)(P...), dim3 grid, int threads, int shared_bytes,
                const A&... args) {
  using namespace emulator;
  const unsigned blocks = blocks_of(grid);
  machine.early = kind.early;
  machine.cluster = kind.cluster;
  machine.count = threads;
  machine.shared_bytes = shared_bytes;
  machine.block_size = dim3(static_cast<unsigned>(threads));
  machine.grid_size = grid;
  machine.body = [&] { kernel(static_cast<P>(args)...); };
  if (threads > 1024 || shared_bytes > settings.chip.shared_bytes || most_resident() == 0 ||
      (kind.cooperative && blocks > most_resident())) {
    throw std::runtime_error("emulator: this chip could not launch this");
  }
  if (blocks == 0 || grid.y > 65535 || grid.z > 65535 || grid.x % kind.cluster != 0) {
    throw std::runtime_error("emulator: this is no grid");
  }
  settings.launches.push_back({reinterpret_cast<const void*>(kernel), shared_bytes, kind.early, blocks});
  if (kind.early) run_earlier_kernel();
  run_grid(kind.cooperative || kind.cluster > 1);
}

template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, int threads, int shared_bytes, Stream, const A&... args) {
  run_kernel({}, kernel, grid, threads, shared_bytes, args...);
}

template <class... P, class... A>
void launch_early(void (*kernel)(P...), dim3 grid, int threads, int shared_bytes, Stream, const A&... args) {
  const bool early = emulator::settings.chip.capability >= 90 && gemm_switches.on(GemmKernel::overlap);
  run_kernel({.early = early}, kernel, grid, threads, shared_bytes, args...);
}

inline void set_zero(void* memory, size_t bytes, Stream) {
  emulator::settings.launches.push_back({nullptr, 0, false, 0});
  std::memset(memory, 0, bytes);
}

// --- instructions
// -------------------------------------------------------------------------------------------------

using Site = std::source_location;

inline void __syncthreads(const Site& site = Site::current()) {
  if (emulator::is_executed(site)) emulator::wait_for_block();
}
inline void __syncwarp(const Site& site = Site::current()) {
  if (emulator::is_executed(site)) emulator::wait_for_warp();
}
inline void after_earlier_kernels(const Site& site = Site::current()) {
  emulator::wait_for_earlier_kernels(emulator::is_executed(site));
}
inline void prefetch_to_l2(const void*) {}
template <class T>
T __shfl_xor_sync(uint32_t, T value, int mask) {
  const int self = emulator::machine.lane();
  return emulator::exchange(value, [&](auto of) { return of(self ^ mask); });
}
template <class T>
T __shfl_up_sync(uint32_t, T value, int step) {
  const int self = emulator::machine.lane();
  return emulator::exchange(value, [&](auto of) { return of(self < step ? self : self - step); });
}
template <class T>
T __shfl_sync(uint32_t, T value, int from) {
  return emulator::exchange(value, [&](auto of) { return of(from % 32); });
}
inline uint32_t __ballot_sync(uint32_t, bool vote) {
  return emulator::exchange(vote, [](auto of) {
    uint32_t votes = 0;
    for (int i = 0; i < 32; ++i) votes |= static_cast<uint32_t>(of(i)) << i;
    return votes;
  });
}
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  uint32_t chosen = 0;
  for (int i = 0; i < 4; ++i) {
    chosen |= static_cast<uint32_t>(bytes >> (8 * (selector >> 4 * i & 7)) & 0xff) << 8 * i;
  }
  return chosen;
}
inline int __popc(uint32_t bits) { return std::popcount(bits); }
inline int atomicMax(int* at, int value) {
  emulator::note_atomic(at);
  std::atomic_ref<int> memory(*at);
  const int before = memory.load(std::memory_order_relaxed);
  memory.store(std::max(before, value), std::memory_order_relaxed);
  return before;
}

inline unsigned atomicInc(unsigned* at, unsigned most) {
  emulator::note_atomic(at);
  std::atomic_ref<unsigned> memory(*at);
  const unsigned before = memory.load(std::memory_order_relaxed);
  memory.store(before >= most ? 0 : before + 1, std::memory_order_relaxed);
  return before;
}
inline int atomicExch(int* at, int value) {
  emulator::note_atomic(at);
  return std::atomic_ref<int>(*at).exchange(value, std::memory_order_relaxed);
}
inline void __threadfence(const Site& site = Site::current()) {
  if (emulator::machine.concurrent && emulator::is_executed(site)) emulator::fence_device();
}
inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
  emulator::note_atomic(at);
  return std::atomic_ref<unsigned long long>(*at).fetch_add(value, std::memory_order_relaxed);
}
inline unsigned atomicAdd(unsigned* at, unsigned value) {
  emulator::note_atomic(at);
  return std::atomic_ref<unsigned>(*at).fetch_add(value, std::memory_order_relaxed);
}

inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
// A product that the compiler must not contract with an addition to an fma. With FP8SERVE_CARELESS it may, as
// if the kernel had written a * b.
inline float __fmul_rn(float a, float b) {
  float product = a * b;
#if defined(__FMA__) && !defined(FP8SERVE_CARELESS)
  asm("" : "+x"(product));
#endif
  return product;
}
inline float __fadd_rn(float a, float b) { return a + b; }
template <class T>
T min(T a, T b) {
  return a < b ? a : b;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}
// On a GPU, the maximum of a NaN and a number is the number, even for a signalling NaN, which C++ would
// propagate.
inline float fmaxf(float a, float b) { return std::isnan(a) ? b : std::isnan(b) || b < a ? a : b; }
inline float fminf(float a, float b) { return -fmaxf(-a, -b); }
using std::isfinite;
using std::isnan;

inline unsigned char* dynamic_shared() { return emulator::machine.block->dynamic_shared(); }

template <bool kE5M2>
uint16_t encode_pair(float low, float high) {
  const auto one = [](float x) {
    if (std::isnan(x)) return 0x7f;
    return (kE5M2 ? encode<E5M2>(x) : encode<E4M3>(x)) & 0xff;
  };
  return static_cast<uint16_t>(one(low) | one(high) << 8);
}

inline uint16_t float_to_half(float value) {
  const auto half = static_cast<_Float16>(value);
  return std::bit_cast<uint16_t>(half);
}
inline float half_to_float(uint16_t bits) { return static_cast<float>(std::bit_cast<_Float16>(bits)); }
inline uint16_t float_to_bfloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>(std::isnan(value) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <bool kE5M2>
float decode_one(uint8_t code) {
  return kE5M2 ? kDecode<E5M2>.value[code] : kDecode<E4M3>.value[code];
}
template <bool kE5M2>
uint32_t decode_pair(uint16_t pair) {
  const auto half = [](int code) { return float_to_half(decode_one<kE5M2>(static_cast<uint8_t>(code))); };
  return half(pair & 0xff) | static_cast<uint32_t>(half(pair >> 8)) << 16;
}

inline bool either_nan(float a, float b) { return std::isnan(a) || std::isnan(b); }
inline uint4 load_once(const uint4* from) { return *from; }

inline void copy_async(void* shared, const void* global, bool valid) {
  if (reinterpret_cast<uintptr_t>(shared) % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0) {
    throw std::runtime_error("emulator: an asynchronous copy of 16 bytes is not aligned");
  }
  emulator::races::writes(shared, 16);
  if (valid) emulator::races::reads(global, 16);
  const emulator::races::Unwatched bookkeeping;
  emulator::machine.self().copies.back().push_back({shared, global, valid});
}
inline void copy_commit() {
  const emulator::races::Unwatched bookkeeping;
  emulator::machine.self().copies.emplace_back();
}
template <int kPending>
void copy_wait(const Site& site = Site::current()) {
  if (!emulator::is_executed(site)) return;
  auto& groups = emulator::machine.self().copies;
  while (groups.size() > kPending + 1) {
    for (const auto& copy : groups.front()) {
      emulator::races::writes(copy.to, 16);
      const emulator::races::Unwatched bookkeeping;
      copy.valid ? std::memcpy(copy.to, copy.from, 16) : std::memset(copy.to, 0, 16);
    }
    const emulator::races::Unwatched bookkeeping;
    groups.erase(groups.begin());
  }
}

inline void load_matrices(uint32_t (&r)[4], const void* shared_row) {
  emulator::races::reads(shared_row, 16);
  const int self = emulator::machine.lane();
  const auto words = emulator::exchange(shared_row, [&](auto of) {
    uint4 out;
    uint32_t* word = &out.x;
    for (int m = 0; m < 4; ++m) {
      const void* row = of(8 * m + self / 4);
      std::memcpy(word + m, static_cast<const char*>(row) + self % 4 * 4, 4);
    }
    return out;
  });
  std::memcpy(r, &words, sizeof(r));
}

// The warp's product m16n8k(8 E) of words that hold E elements each. Lane 4g + t holds
//
//   of a: rows g and g + 8, E columns from E t on, and E columns from 4 E + E t on
//   of b: column g, the same rows as a's columns
//   of c: rows g and g + 8, columns 2t and 2t + 1
//
// of_a(word, i) and of_b(word, i) return the i-th element of a word.
template <int E, class A, class B>
void multiply_words(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const A& of_a,
                    const B& of_b) {
  struct Operands {
    float a[4][E], b[2][E];
  };
  const int self = emulator::machine.lane();
  Operands mine;
  for (int i = 0; i < E; ++i) {
    for (int word = 0; word < 4; ++word) mine.a[word][i] = of_a(a[word], i);
    for (int word = 0; word < 2; ++word) mine.b[word][i] = of_b(b[word], i);
  }
  const float4 sums = emulator::exchange(mine, [&](const auto& of) {
    double out[4] = {};
    for (int part = 0; part < 8; ++part) {  // of K
      const int half = part / 4, lane = part % 4;
      const Operands &rows = of(self / 4 * 4 + lane), &left = of(self % 4 * 8 + lane);
      const Operands& right = of(self % 4 * 8 + 4 + lane);
      for (int i = 0; i < E; ++i) {
        const double upper = rows.a[2 * half][i], lower = rows.a[2 * half + 1][i];
        out[0] += upper * left.b[half][i], out[1] += upper * right.b[half][i];
        out[2] += lower * left.b[half][i], out[3] += lower * right.b[half][i];
      }
    }
    return float4{static_cast<float>(out[0]), static_cast<float>(out[1]), static_cast<float>(out[2]),
                  static_cast<float>(out[3])};
  });
  for (int e = 0; e < 4; ++e) c[e] += (&sums.x)[e];
}

template <bool kAE5M2, bool kBE5M2>
void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  multiply_words<4>(
      c, a, b, [](uint32_t word, int i) { return decode_one<kAE5M2>(static_cast<uint8_t>(word >> (8 * i))); },
      [](uint32_t word, int i) { return decode_one<kBE5M2>(static_cast<uint8_t>(word >> (8 * i))); });
}

}  // namespace fp8serve
