// A GPU made of C++: stands in for csrc/cuda/device.h so that the kernels run, unchanged, where there is no
// GPU.
//
// A block's threads are coroutines on one processor: each runs until it meets a barrier or a warp-wide
// instruction and goes on when the others have come. Blocks run one after the other. Asynchronous copies land
// when they are waited for and not before, warp instructions have the register layouts of the PTX manual, and
// shared memory is poisoned before each block, so that a missing wait, a wrong lane or an unwritten word
// shows. It cannot show data races between barriers, nor anything about speed. It is slow: tens of
// milliseconds for a tile of a GEMM.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "fp8.h"

#define FP8SERVE_OPS fp8serve_emulated
#define FP8SERVE_DEVICE_KEY CPU

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}  // NOLINT: as in CUDA
};
struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
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
  int multiprocessors() const { return 4; }
  int capability() const { return 89; }
};

// --- threads
// ------------------------------------------------------------------------------------------------------

namespace emulator {

enum class State { ready, at_block_barrier, at_warp_barrier, done };

struct Copy {
  void* to;
  const void* from;
  bool valid;
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack = std::make_unique<char[]>(kStack);
  State state = State::done;
  std::vector<std::vector<Copy>> copies;  // by group; the last one is open
  unsigned char slot[64];                 // what this lane gives to its warp
  static constexpr size_t kStack = 256 * 1024;
};

struct Machine {
  std::vector<Thread> threads = std::vector<Thread>(1024);
  std::vector<unsigned char> shared = std::vector<unsigned char>(232 * 1024 + 1024);
  ucontext_t scheduler;
  int running = 0, count = 0;
  std::function<void()> body;
  dim3 thread_index, block_index, block_size, grid_size;
  Thread& self() { return threads[static_cast<size_t>(running)]; }
};

inline Machine machine;

inline void enter() {
  machine.body();
  machine.self().state = State::done;
  swapcontext(&machine.self().context, &machine.scheduler);
}

inline void wait(State barrier) {
  const int self = machine.running;
  machine.self().state = barrier;
  swapcontext(&machine.threads[static_cast<size_t>(self)].context, &machine.scheduler);
}

inline void resume(int i) {
  machine.running = i;
  machine.thread_index = dim3(static_cast<unsigned>(i), 0, 0);
  swapcontext(&machine.scheduler, &machine.self().context);
}

// Lets threads [begin, end) pass if all that still run wait at `barrier`.
inline bool release(int begin, int end, State barrier) {
  int waiting = 0, live = 0;
  for (int i = begin; i < end; ++i) {
    const State state = machine.threads[static_cast<size_t>(i)].state;
    waiting += state == barrier;
    live += state != State::done;
  }
  const bool whole = barrier == State::at_block_barrier || live == end - begin;
  if (waiting == 0 || waiting != live || !whole) return false;
  for (int i = begin; i < end; ++i) {
    Thread& thread = machine.threads[static_cast<size_t>(i)];
    if (thread.state == barrier) thread.state = State::ready;
  }
  return true;
}

inline void start_thread(int i) {
  Thread& thread = machine.threads[static_cast<size_t>(i)];
  thread.state = State::ready;
  thread.copies.assign(1, {});
  getcontext(&thread.context);
  thread.context.uc_stack.ss_sp = thread.stack.get();
  thread.context.uc_stack.ss_size = Thread::kStack;
  thread.context.uc_link = nullptr;
  makecontext(&thread.context, enter, 0);
}

inline void run_block() {
  std::memset(machine.shared.data(), 0xff, machine.shared.size());  // NaN, in FP8 and in FP32
  for (int i = 0; i < machine.count; ++i) start_thread(i);
  for (;;) {
    bool ran = false, live = false;
    for (int i = 0; i < machine.count; ++i) {
      if (machine.threads[static_cast<size_t>(i)].state == State::ready) resume(i), ran = true;
      live |= machine.threads[static_cast<size_t>(i)].state != State::done;
    }
    if (!live) return;
    bool released = release(0, machine.count, State::at_block_barrier);
    for (int w = 0; w < machine.count; w += 32) {
      released |= release(w, std::min(w + 32, machine.count), State::at_warp_barrier);
    }
    if (!ran && !released)
      throw std::runtime_error("emulator: threads of a block wait for each other for ever");
  }
}

inline Thread& lane(int i) { return machine.threads[static_cast<size_t>(machine.running / 32 * 32 + i)]; }

// Every lane gives a value; f reads those of the others.
template <class T, class F>
auto exchange(const T& mine, const F& f) {
  static_assert(sizeof(T) <= sizeof(Thread::slot));
  std::memcpy(machine.self().slot, &mine, sizeof(T));
  wait(State::at_warp_barrier);
  const auto result = f([](int i) {
    T value;
    std::memcpy(&value, lane(i).slot, sizeof(T));
    return value;
  });
  wait(State::at_warp_barrier);
  return result;
}

}  // namespace emulator

#define threadIdx (::fp8serve::emulator::machine.thread_index)
#define blockIdx (::fp8serve::emulator::machine.block_index)
#define blockDim (::fp8serve::emulator::machine.block_size)
#define gridDim (::fp8serve::emulator::machine.grid_size)

template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, int threads, int shared_bytes, Stream, const A&... args) {
  using namespace emulator;
  if (threads > 1024 || shared_bytes > 99 * 1024)
    throw std::runtime_error("emulator: Ada could not launch this");
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535) {
    throw std::runtime_error("emulator: this is no grid");
  }
  machine.count = threads;
  machine.block_size = dim3(static_cast<unsigned>(threads));
  machine.grid_size = grid;
  machine.body = [&] { kernel(static_cast<P>(args)...); };
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        machine.block_index = dim3(x, y, z);
        run_block();
      }
    }
  }
}

inline void set_zero(void* memory, size_t bytes, Stream) { std::memset(memory, 0, bytes); }

// --- instructions
// -------------------------------------------------------------------------------------------------

inline void __syncthreads() { emulator::wait(emulator::State::at_block_barrier); }
inline void __syncwarp() { emulator::wait(emulator::State::at_warp_barrier); }
template <class T>
T __shfl_xor_sync(uint32_t, T value, int mask) {
  const int self = emulator::machine.running % 32;
  return emulator::exchange(value, [&](auto of) { return of(self ^ mask); });
}
inline int atomicMax(int* at, int value) {
  const int before = *at;
  *at = std::max(before, value);
  return before;
}

inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
  const unsigned long long before = *at;
  *at += value;
  return before;
}

inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
template <class T>
T min(T a, T b) {
  return a < b ? a : b;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}
// As the GPU's: any NaN yields to a number, signalling ones (which C++ would propagate) included.
inline float fmaxf(float a, float b) { return std::isnan(a) ? b : std::isnan(b) || b < a ? a : b; }
inline float fminf(float a, float b) { return -fmaxf(-a, -b); }
using std::isfinite;
using std::isnan;

inline unsigned char* dynamic_shared() {
  const auto at = reinterpret_cast<uintptr_t>(emulator::machine.shared.data());
  return reinterpret_cast<unsigned char*>((at + 1023) / 1024 * 1024);
}

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
  emulator::machine.self().copies.back().push_back({shared, global, valid});
}
inline void copy_commit() { emulator::machine.self().copies.emplace_back(); }
template <int kPending>
void copy_wait() {
  auto& groups = emulator::machine.self().copies;
  while (groups.size() > kPending + 1) {
    for (const auto& copy : groups.front()) {
      copy.valid ? std::memcpy(copy.to, copy.from, 16) : std::memset(copy.to, 0, 16);
    }
    groups.erase(groups.begin());
  }
}

inline void load_matrices(uint32_t (&r)[4], const void* shared_row) {
  const int self = emulator::machine.running % 32;
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

// The warp's product m16n8k(8 E) of words that hold E elements each. Lane 4g + t holds a: rows g, g + 8,
// columns E t.. and 4 E + E t..; b: column g; c: rows g, g + 8, columns 2t.. `of_a(word, i)`, `of_b(word,
// i)`: the i-th element of a word.
template <int E, class A, class B>
void multiply_words(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const A& of_a,
                    const B& of_b) {
  struct Operands {
    uint32_t a[4], b[2];
  };
  const int self = emulator::machine.running % 32;
  Operands mine{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  const float4 sums = emulator::exchange(mine, [&](auto of) {
    float4 out;
    for (int e = 0; e < 4; ++e) {
      const int row = self / 4 + e / 2 * 8, column = self % 4 * 2 + e % 2;
      double sum = 0;
      for (int k = 0; k < 8 * E; ++k) {
        const int half = k / (4 * E), lane = k % (4 * E) / E;
        const uint32_t from_a = of(row % 8 * 4 + lane).a[row / 8 + 2 * half];
        const uint32_t from_b = of(column * 4 + lane).b[half];
        sum += static_cast<double>(of_a(from_a, k % E)) * of_b(from_b, k % E);
      }
      (&out.x)[e] = static_cast<float>(sum);
    }
    return out;
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
