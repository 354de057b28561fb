// Allocation, element types and threads: the parts of torch that every kernel file needs, through the C
// shim.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "check.h"
#include "cpu/threads.h"
#include "fp8.h"

namespace fp8serve {

// --- element types: loaded as FP32, stored rounded to nearest even

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

FP8_INLINE float load(float x) { return x; }
FP8_INLINE float load(BF16 x) { return std::bit_cast<float>(static_cast<int32_t>(x.bits) << 16); }
FP8_INLINE float load(F16 x) {
  const int32_t sign = (x.bits & 0x8000) << 16;
  const int32_t mag = (x.bits & 0x7fff) << 13;
  const int32_t finite = std::bit_cast<int32_t>(std::bit_cast<float>(mag) * 0x1p112f);
  return std::bit_cast<float>(sign | (mag >= 0x0f800000 ? mag | kInfinity : finite));
}

FP8_INLINE void store(float x, float* out) { *out = x; }
FP8_INLINE void store(float x, BF16* out) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  out->bits =
      static_cast<uint16_t>((bits & kMagnitude) > static_cast<uint32_t>(kInfinity) ? 0x7fc0 : rounded);
}
FP8_INLINE void store(float x, F16* out) {
  const int32_t bits = std::bit_cast<int32_t>(x);
  const int32_t mag = bits & kMagnitude;
  const int32_t normal = (mag + 0xfff + ((mag >> 13) & 1) - (112 << 23)) >> 13;
  const int32_t magic = 126 << 23;  // 0.5: its unit in the last place is FP16's smallest subnormal
  const int32_t subnormal = std::bit_cast<int32_t>(std::bit_cast<float>(mag) + 0.5f) - magic;
  const int32_t finite = mag < (113 << 23) ? subnormal : (normal < 0x7c00 ? normal : 0x7c00);
  const int32_t code = mag > kInfinity ? 0x7e00 : finite;
  out->bits = static_cast<uint16_t>(((bits >> 16) & 0x8000) | code);
}

template <class T>
struct Type {
  using type = T;
};

// Calls `f(Type<T>{})` for the element type of a high-precision tensor (checked by the contract before).
template <class F>
void with_element(ScalarType dtype, const F& f) {
  if (dtype == ScalarType::BFloat16) return f(Type<BF16>{});
  if (dtype == ScalarType::Half) return f(Type<F16>{});
  f(Type<float>{});
}
template <class F>
void with_format(ScalarType dtype, const F& f) {
  if (dtype == ScalarType::Float8_e5m2) return f(Type<E5M2>{});
  f(Type<E4M3>{});
}

// --- tensors

inline Tensor empty(const int64_t* sizes, size_t dims, ScalarType dtype) {
  std::vector<int64_t> strides(dims);
  int64_t stride = 1;
  for (size_t d = dims; d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(static_cast<int64_t>(dims), sizes, strides.data(),
                               torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
                               aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

inline Tensor empty(std::initializer_list<int64_t> sizes, ScalarType dtype) {
  return empty(sizes.begin(), sizes.size(), dtype);
}

inline Tensor dense(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

inline Tensor scalar(float value) {
  Tensor out = empty({}, ScalarType::Float);
  *static_cast<float*>(out.data_ptr()) = value;
  return out;
}

template <class T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

// --- threads

// Calls f(task) for every task, on as many threads as torch has; a thread takes the next task when it is done
// with one, so that uneven work and busy cores balance. Results must not depend on which thread runs a task.
template <class F>
void parallel_tasks(int64_t tasks, const F& f) {
  const int64_t threads = tasks > 1 ? torch::stable::get_num_threads() : 1;
  run_tasks(
      tasks, threads, [](const void* context, int64_t task) { (*static_cast<const F*>(context))(task); }, &f);
}

}  // namespace fp8serve
