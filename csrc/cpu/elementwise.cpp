// rms_norm_quantize and silu_mul_quantize: the operations between two GEMMs of a decoder layer, in one read
// and one write instead of the four to eight of separate ops.
//
// They round where the separate ops round (an intermediate of a BF16 model is BF16), so that a layer gives
// the same tokens fused or not. The loops are in elementwise.h.
#include "cpu/elementwise.h"

#include <torch/csrc/stable/library.h>

#include "check.h"
#include "cpu/cast_rows.h"
#include "cpu/features.h"
#include "cpu/parts.h"
#include "cpu/rows.h"
#include "cpu/scratch.h"
#include "cpu/tensors.h"
#include "fp8.h"

namespace fp8serve {
namespace {

constexpr auto kHigh = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};

template <class F>
struct NormRow {
  template <class T>
  static FP8_INLINE void run(const T* x, const T* weight, T* y, uint8_t* q, int64_t n, float eps, float scale,
                             float* amax) {
    norm_row(x, weight, y, n, eps);
    *amax = amax_row(y, n);
    cast_row<F>(y, q, n, scale);
  }
};

template <class F>
struct SiluMulRow {
  template <class T>
  static FP8_INLINE void run(const T* gate, const T* up, T* y, uint8_t* q, int64_t n, float scale,
                             float* amax) {
    silu_mul_row(gate, up, y, n);
    *amax = amax_row(y, n);
    cast_row<F>(y, q, n, scale);
  }
};

void check_fp8(const Contract& check, ScalarType dtype) {
  check.require(dtype == ScalarType::Float8_e4m3fn || dtype == ScalarType::Float8_e5m2, "dtype", "is ",
                torch::headeronly::toString(dtype), ", must be Float8_e4m3fn or Float8_e5m2");
}

// Calls f(Type<Format>, Type<Element>).
template <class F>
void with_types(ScalarType format, ScalarType element, const F& f) {
  with_format(format, [&](auto fmt) { with_element(element, [&](auto elem) { f(fmt, elem); }); });
}

}  // namespace

Pair rms_norm_quantize(const Tensor& x, const Tensor& weight_in, double eps, const Tensor& scale,
                       ScalarType dtype) {
  const Contract check("rms_norm_quantize");
  check.rank("x", x, 2);
  const Size t{"T", x.size(0)}, hidden{"hidden", x.size(1)};
  check.tensor("x", x, kHigh, {t, hidden});
  check.tensor("weight", weight_in, {x.scalar_type()}, {hidden});
  check.tensor("scale", scale, {ScalarType::Float}, {});
  check_fp8(check, dtype);
  const Tensor weight = dense(weight_in), q = empty({t.value(), hidden.value()}, dtype);
  const Rows rows = rows_of(x);
  SharedAmax amax;
  with_types(dtype, x.scalar_type(), [&](auto format, auto element) {
    using F = typename decltype(format)::type;
    using T = typename decltype(element)::type;
    parallel_rows(rows.count, rows.width, [&](int64_t r) {
      thread_local Scratch scratch;
      float largest = 0.0f;
      dispatch<NormRow<F>>(data<const T>(rows.tensor) + r * rows.stride, data<const T>(weight),
                           scratch.get<T>(rows.width), data<uint8_t>(q) + r * rows.width, rows.width,
                           static_cast<float>(eps), *data<float>(scale), &largest);
      amax.raise(largest);
    });
  });
  return {q, scalar(amax.value())};
}

Pair silu_mul_quantize(const Tensor& gate, const Tensor& up, const Tensor& scale, ScalarType dtype) {
  const Contract check("silu_mul_quantize");
  check.rank("gate", gate, 2);
  const Size t{"T", gate.size(0)}, width{"intermediate", gate.size(1)};
  check.tensor("gate", gate, kHigh, {t, width});
  check.tensor("up", up, {gate.scalar_type()}, {t, width});
  check.tensor("scale", scale, {ScalarType::Float}, {});
  check_fp8(check, dtype);
  const Rows g = rows_of(gate), u = rows_of(up);
  const Tensor q = empty({t.value(), width.value()}, dtype);
  SharedAmax amax;
  with_types(dtype, gate.scalar_type(), [&](auto format, auto element) {
    using F = typename decltype(format)::type;
    using T = typename decltype(element)::type;
    parallel_rows(g.count, g.width, [&](int64_t r) {
      thread_local Scratch scratch;
      float largest = 0.0f;
      dispatch<SiluMulRow<F>>(data<const T>(g.tensor) + r * g.stride, data<const T>(u.tensor) + r * u.stride,
                              scratch.get<T>(g.width), data<uint8_t>(q) + r * g.width, g.width,
                              *data<float>(scale), &largest);
      amax.raise(largest);
    });
  });
  return {q, scalar(amax.value())};
}

}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("rms_norm_quantize", TORCH_BOX(&fp8serve::rms_norm_quantize));
  fp8serve::report<fp8serve::kCasting<fp8serve::Numerics::last_bit>>("rms_norm_quantize");
  m.impl("silu_mul_quantize", TORCH_BOX(&fp8serve::silu_mul_quantize));
  fp8serve::report<fp8serve::kCasting<fp8serve::Numerics::last_bit>>("silu_mul_quantize");
}
