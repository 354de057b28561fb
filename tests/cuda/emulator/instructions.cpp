// Single instructions of the emulated GPU as C functions, for ctypes: one warp executes one of them.
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/mma_attention.h"
#include "cuda/wgmma.h"

using namespace fp8serve;

namespace {

struct Product {
  const uint32_t (*a)[4];
  const uint32_t (*b)[2];
  float (*c)[4];
};

using Multiply = void (*)(float (&)[4], const uint32_t (&)[4], const uint32_t (&)[2]);

template <Multiply kMultiply>
void multiply(Product product) {
  kMultiply(product.c[threadIdx.x], product.a[threadIdx.x], product.b[threadIdx.x]);
}

struct Load {
  const unsigned char (*rows)[16];
  uint32_t (*out)[4];
};

template <bool kTransposed>
void load(Load work) {
  load_matrices_at<kTransposed>(work.out[threadIdx.x], place_of(work.rows[threadIdx.x]));
}

struct WarpgroupProduct {
  const unsigned char* memory;  // the contents of shared memory
  size_t bytes;
  const uint32_t (*left)[4];  // [128][4]; null if the left operand is in shared memory
  uint64_t a, b;
  float* c;  // [128][4 * kEights]
};

template <int kEights>
void multiply_by_warpgroup(WarpgroupProduct product) {
  const size_t self = threadIdx.x;
  for (size_t i = self; i < product.bytes; i += 128) dynamic_shared()[i] = product.memory[i];
  float c[kEights][4] = {};
  uint32_t left[4] = {};
  if (product.left != nullptr) std::copy_n(product.left[self], 4, left);
  fence_async_proxy();
  __syncthreads();
  wgmma_fence();
  if (product.left != nullptr) wgmma(c, left, product.b);
  if constexpr (kEights == 8) {
    if (product.left == nullptr) wgmma<true>(c, product.a, product.b);
  }
  wgmma_commit();
  wgmma_wait<0>();
  std::copy_n(&c[0][0], 4 * kEights, product.c + self * 4 * kEights);
}

void impatient() {}

auto kernel_of(const std::string& name) {
  if (name == "e4m3-e4m3") return multiply<mma<false, false>>;
  if (name == "e4m3-e5m2") return multiply<mma<false, true>>;
  if (name == "e5m2-e4m3") return multiply<mma<true, false>>;
  if (name == "e5m2-e5m2") return multiply<mma<true, true>>;
  if (name == "bf16") return multiply<mma_bf16>;
  throw std::runtime_error("emulator: no such instruction: " + name);
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// c += a b by the instruction `name`. The registers by lane: a [32][4], b [32][2], c [32][4].
EXPORTED void emulator_mma(const char* name, const uint32_t (*a)[4], const uint32_t (*b)[2], float (*c)[4]) {
  launch(kernel_of(name), dim3(1), 32, 0, nullptr, Product{a, b, c});
}

// ldmatrix of 32 rows of 16 bytes, lane i giving the address of row i, into [32][4].
EXPORTED void emulator_ldmatrix(bool transposed, const unsigned char (*rows)[16], uint32_t (*out)[4]) {
  launch(transposed ? load<true> : load<false>, dim3(1), 32, 0, nullptr, Load{rows, out});
}

// c = a warpgroup's product with 64 or 128 columns, by thread. `memory`: the contents of shared memory, which
// begins at address 1024. `a`, `b`: descriptors of matrices there. `left`: registers [128][4] by thread, or
// null if `a` is the left operand.
EXPORTED void emulator_wgmma(int columns, const unsigned char* memory, size_t bytes,
                             const uint32_t (*left)[4], uint64_t a, uint64_t b, float* c) {
  const auto kernel = columns == 64 ? multiply_by_warpgroup<8> : multiply_by_warpgroup<16>;
  launch(kernel, dim3(1), 128, static_cast<int>(bytes), nullptr,
         WarpgroupProduct{memory, bytes, left, a, b, c});
}

// Returns the error when a kernel is launched early and never waits for earlier kernels; "" if there is none.
EXPORTED const char* emulator_launch_impatient() {
  static std::string said;
  said.clear();
  try {
    launch_early(impatient, dim3(1), 32, 0, nullptr);
  } catch (const std::exception& refused) {
    said = refused.what();
  }
  return said.c_str();
}
