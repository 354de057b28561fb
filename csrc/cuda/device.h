// What kernels and their launches need from CUDA: the few PTX instructions without a C++ form, launches
// with their error check, and the device an op runs on. tests/cuda/emulator has the same header for a
// machine without a GPU, so kernels use nothing but this header and the part of CUDA that is C++.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/early.h"
#include "cuda/shared_memory.h"

// Where STABLE_TORCH_LIBRARY_IMPL registers: library and dispatch key.
#define FP8SERVE_OPS fp8serve
#define FP8SERVE_DEVICE_KEY CUDA

namespace fp8serve {

using Stream = cudaStream_t;
using torch::stable::Tensor;

inline bool lives_here(const Tensor& t) { return t.is_cuda(); }

inline void check_cuda(cudaError_t code) {
  if (code != cudaSuccess) {
    throw std::runtime_error(std::string("fp8serve: a CUDA call failed: ") + cudaGetErrorString(code));
  }
}

// Makes a tensor's device the current one as long as this object lives. stream() is torch's current stream
// on it.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& t) : index_(t.get_device_index()), guard_(index_) {
    void* stream = nullptr;
    if (aoti_torch_get_current_cuda_stream(index_, &stream) != 0) {
      throw std::runtime_error("fp8serve: torch did not tell its current CUDA stream");
    }
    stream_ = static_cast<Stream>(stream);
  }
  Stream stream() const { return stream_; }
  int index() const { return index_; }
  bool is_capturing() const {  // also true if CUDA cannot say
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const bool is_known = cudaStreamIsCapturing(stream_, &status) == cudaSuccess;
    if (!is_known) cudaGetLastError();
    return !is_known || status != cudaStreamCaptureStatusNone;
  }
  int multiprocessors() const { return attribute(cudaDevAttrMultiProcessorCount); }
  int shared_bytes() const {  // that a block may have
    return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  }
  int capability() const {  // 89, 90, 100, 120
    return 10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor);
  }

 private:
  int attribute(cudaDeviceAttr which) const {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, which, index_));
    return value;
  }
  int32_t index_;
  torch::stable::accelerator::DeviceGuard guard_;
  Stream stream_ = nullptr;
};

struct CudaRuntime {
  static int device() {
    int index = 0;
    check_cuda(cudaGetDevice(&index));
    return index;
  }
  static int static_bytes(const void* kernel) { return static_cast<int>(attributes(kernel).sharedSizeBytes); }
  static int virtual_architecture(const void* kernel) { return attributes(kernel).ptxVersion; }
  static void allow(const void* kernel, int dynamic_bytes) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic_bytes));
  }

 private:
  static cudaFuncAttributes attributes(const void* kernel) {
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, kernel));
    return attributes;
  }
};
inline SharedMemory<CudaRuntime> shared_memory;
inline EarlyLaunches<CudaRuntime> early_launches;

template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, int threads, int shared_bytes, Stream stream, const A&... args) {
  shared_memory.need(reinterpret_cast<const void*>(kernel), shared_bytes);
  kernel<<<grid, threads, shared_bytes, stream>>>(static_cast<P>(args)...);
  check_cuda(cudaGetLastError());
}

// Launches a kernel that calls after_earlier_kernels(). On chips that support it, the kernel may begin
// while the kernels before it are still running.
template <class... P, class... A>
void launch_early(void (*kernel)(P...), dim3 grid, int threads, int shared_bytes, Stream stream,
                  const A&... args) {
  const auto* address = reinterpret_cast<const void*>(kernel);
  if (!early_launches.possible(address)) return launch(kernel, grid, threads, shared_bytes, stream, args...);
  shared_memory.need(address, shared_bytes);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...));
}

inline void set_zero(void* memory, size_t bytes, Stream stream) {
  check_cuda(cudaMemsetAsync(memory, 0, bytes, stream));
}

// --- instructions
// ---------------------------------------------------------------------------------------------

#ifdef __CUDACC__

// Waits until all kernels that were launched before this one have ended and their writes are visible, and
// allows the next kernel to begin. Before this call a kernel must not write, and must not read what an
// earlier kernel may write. It may prefetch anything (`prefetch_to_l2`).
__device__ __forceinline__ void after_earlier_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Prefetches the 128-byte line at `there` into the L2 cache. All kernels share that cache, so another
// kernel may still write to the line before it is read.
__device__ __forceinline__ void prefetch_to_l2(const void* there) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("prefetch.global.L2 [%0];" ::"l"(there));
#else
  (void)there;  // no kernel begins early on these chips, so the read follows at once
#endif
}

// Returns the block's dynamic shared memory.
__device__ __forceinline__ unsigned char* dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory;
}

// Converts two FP32 numbers to two E4M3 or E5M2 values, low first: to nearest even, saturating; NaN becomes
// 0x7f.
template <bool kE5M2>
__device__ __forceinline__ uint16_t encode_pair(float low, float high) {
  uint16_t pair;
  if constexpr (kE5M2) {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

// Converts two FP8 values to two FP16 numbers, packed in 32 bits: exact.
template <bool kE5M2>
__device__ __forceinline__ uint32_t decode_pair(uint16_t pair) {
  uint32_t halves;
  if constexpr (kE5M2) {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(pair));
  } else {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  }
  return halves;
}

__device__ __forceinline__ float half_to_float(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ __forceinline__ uint16_t float_to_half(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
__device__ __forceinline__ uint16_t float_to_bfloat(float value) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Returns whether one of the two is NaN: one instruction for both.
__device__ __forceinline__ bool either_nan(float a, float b) {
  int answer;
  asm("{ .reg .pred p; setp.nan.f32 p, %1, %2; selp.b32 %0, 1, 0, p; }" : "=r"(answer) : "f"(a), "f"(b));
  return answer != 0;
}

// Loads 16 bytes that no other thread will read, without allocating a line in the L1 cache.
__device__ __forceinline__ uint4 load_once(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// Copies 16 bytes from global to shared memory, asynchronously; zeros where `valid` is false.
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool valid) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Loads four matrices of 8 rows of 16 bytes; lane i passes the address of row i%8 of matrix i/8.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* shared_row) {
  const uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(shared_row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

// c[16 x 8] += a[16 x 32] b[8 x 32]^T in FP8 with FP32 sums.
#define FP8SERVE_MMA(A, B)                                                            \
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32." A "." B                       \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
template <bool kAE5M2, bool kBE5M2>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (kAE5M2 && kBE5M2) FP8SERVE_MMA("e5m2", "e5m2");
  if constexpr (kAE5M2 && !kBE5M2) FP8SERVE_MMA("e5m2", "e4m3");
  if constexpr (!kAE5M2 && kBE5M2) FP8SERVE_MMA("e4m3", "e5m2");
  if constexpr (!kAE5M2 && !kBE5M2) FP8SERVE_MMA("e4m3", "e4m3");
}
#undef FP8SERVE_MMA

#endif  // __CUDACC__

}  // namespace fp8serve
