// Contracts, allocation and element types for the CUDA kernels; the counterpart of cpu/tensors.h.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <initializer_list>

#include "check.h"
#include "cuda/device.h"
#include "fp8.h"

namespace fp8serve {

// --- element types: loaded as FP32, stored rounded to nearest even
// ---------------------------------------------

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

__device__ __forceinline__ float load(float x) { return x; }
__device__ __forceinline__ float load(BF16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
__device__ __forceinline__ float load(F16 x) { return half_to_float(x.bits); }
__device__ __forceinline__ void store(float x, float* out) { *out = x; }
__device__ __forceinline__ void store(float x, BF16* out) { out->bits = float_to_bfloat(x); }
__device__ __forceinline__ void store(float x, F16* out) { out->bits = float_to_half(x); }

// An element type as a value, for kernels that branch on it for every element that they write.
enum class Number { fp32, bf16, fp16 };

inline Number number_of(ScalarType dtype) {
  if (dtype == ScalarType::BFloat16) return Number::bf16;
  return dtype == ScalarType::Half ? Number::fp16 : Number::fp32;
}
__device__ __forceinline__ float load(const void* x, int64_t at, Number type) {
  if (type == Number::bf16) return load(static_cast<const BF16*>(x)[at]);
  if (type == Number::fp16) return load(static_cast<const F16*>(x)[at]);
  return static_cast<const float*>(x)[at];
}
__device__ __forceinline__ void store(float value, void* out, int64_t at, Number type) {
  if (type == Number::bf16) {
    store(value, static_cast<BF16*>(out) + at);
  } else if (type == Number::fp16) {
    store(value, static_cast<F16*>(out) + at);
  } else {
    static_cast<float*>(out)[at] = value;
  }
}

__device__ __forceinline__ float rounded(float value, Number type) {
  if (type == Number::bf16) return __uint_as_float(static_cast<uint32_t>(float_to_bfloat(value)) << 16);
  return type == Number::fp16 ? half_to_float(float_to_half(value)) : value;
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

template <class F>
inline constexpr bool is_e5m2 = F::mantissa == 2;

// --- contracts
// ----------------------------------------------------------------------------------------------

// Contract for tensors that must all lie on one device.
class DeviceContract : public Contract {
 public:
  DeviceContract(const char* op, const Tensor& first) : Contract(op), index_(first.get_device_index()) {}

  void here(const char* arg, const Tensor& t) const {
    if (!lives_here(t) || t.get_device_index() != index_) {
      fail(arg, "is not on the device where the other arguments are");
    }
  }
  void tensor(const char* arg, const Tensor& t, std::initializer_list<ScalarType> dtypes,
              std::initializer_list<Size> sizes) const {
    here(arg, t);
    dtype(arg, t, dtypes);
    shape(arg, t, sizes);
  }

 private:
  int32_t index_;
};

inline constexpr auto kHigh = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
inline constexpr auto kFp8 = {ScalarType::Float8_e4m3fn, ScalarType::Float8_e5m2};
inline constexpr auto kStored = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half,
                                 ScalarType::Float8_e4m3fn, ScalarType::Float8_e5m2};

inline bool is_fp8(ScalarType dtype) {
  return dtype == ScalarType::Float8_e4m3fn || dtype == ScalarType::Float8_e5m2;
}

// --- memory
// -------------------------------------------------------------------------------------------------

// Contiguous and uninitialised, on the device of `like`, from torch's caching allocator.
inline Tensor empty(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType dtype) {
  return torch::stable::new_empty(like, {sizes.begin(), sizes.size()}, dtype);
}

inline Tensor dense(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

template <class T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

inline bool aligned(const void* p, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

inline int64_t ceil_over(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

}  // namespace fp8serve
