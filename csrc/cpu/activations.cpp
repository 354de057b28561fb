// rms_norm and silu_mul without a cast, and their gradients, which training runs between its GEMMs. Composed
// of torch's ops, each took 6 to 10 passes over the activations, forward and backward.
//
// Forward they round as the separate ops of a BF16 model would; backward they compute in FP32 from one read
// and round once. The gradient of a norm's weight is summed over rows in FP32: in fixed chunks of rows, then
// over the chunks in order, so that it does not depend on the number of threads.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "check.h"
#include "cpu/elementwise.h"
#include "cpu/features.h"
#include "cpu/parts.h"
#include "cpu/rows.h"
#include "cpu/tensors.h"
#include "fp8.h"

namespace fp8serve {
namespace {

constexpr auto kHigh = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
constexpr int64_t kChunks = 32;  // partial sums of a weight's gradient

struct NormRow {
  template <class T>
  static FP8_INLINE void run(const T* x, const T* weight, T* y, int64_t n, float eps) {
    norm_row(x, weight, y, n, eps);
  }
};

struct SiluMulRow {
  template <class T>
  static FP8_INLINE void run(const T* gate, const T* up, T* y, int64_t n) {
    silu_mul_row(gate, up, y, n);
  }
};

// With h = x * factor and g = grad * weight: dx = factor * (g - h * mean(g * h)), dw += grad * h.
struct NormRowBackward {
  template <class T>
  static FP8_INLINE void run(const T* grad, const T* x, const T* weight, T* dx, float* dw, int64_t n,
                             float eps) {
    const float factor = norm_factor(x, n, eps);
    float lanes[16] = {};
    const int64_t whole = n / 16 * 16;
    for (int64_t i = 0; i < whole; i += 16) {
      for (int j = 0; j < 16; ++j) lanes[j] += load(grad[i + j]) * load(weight[i + j]) * load(x[i + j]);
    }
    for (int64_t i = whole; i < n; ++i) lanes[i - whole] += load(grad[i]) * load(weight[i]) * load(x[i]);
    const float mean = lane_sum(lanes) * factor / static_cast<float>(n);
    for (int64_t i = 0; i < n; ++i) {
      const float normed = load(x[i]) * factor;
      store(factor * (load(grad[i]) * load(weight[i]) - normed * mean), dx + i);
    }
    for (int64_t i = 0; i < n; ++i) dw[i] += load(grad[i]) * rounded<T>(load(x[i]) * factor);
  }
};

struct SiluMulRowBackward {
  template <class T>
  static FP8_INLINE void run(const T* grad, const T* gate, const T* up, T* d_gate, T* d_up, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const float x = load(gate[i]), dy = load(grad[i]);
      const float sigmoid = 1.0f / (1.0f + exp_of(-x));
      store(dy * rounded<T>(x * sigmoid), d_up + i);
      store(dy * load(up[i]) * (sigmoid * (1.0f + x * (1.0f - sigmoid))), d_gate + i);
    }
  }
};

struct AddRow {
  static FP8_INLINE void run(const float* x, float* sum, int64_t n) {
    for (int64_t i = 0; i < n; ++i) sum[i] += x[i];
  }
};

struct RoundRow {
  template <class T>
  static FP8_INLINE void run(const float* x, T* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) store(x[i], out + i);
  }
};

// Checks that x is [T, width] of a high-precision type and that y has the same shape and type.
void check_rows(const Contract& check, const Tensor& x, const char* first, const char* second,
                const Tensor& y) {
  check.rank(first, x, 2);
  const Size t{"T", x.size(0)}, width{"width", x.size(1)};
  check.tensor(first, x, kHigh, {t, width});
  check.tensor(second, y, {x.scalar_type()}, {t, width});
}

void check_norm(const Contract& check, const Tensor& x, const Tensor& weight) {
  check.rank("x", x, 2);
  const Size t{"T", x.size(0)}, hidden{"hidden", x.size(1)};
  check.tensor("x", x, kHigh, {t, hidden});
  check.tensor("weight", weight, {x.scalar_type()}, {hidden});
}

}  // namespace

Tensor rms_norm(const Tensor& x, const Tensor& weight_in, double eps) {
  check_norm(Contract("rms_norm"), x, weight_in);
  const Tensor weight = dense(weight_in), y = empty({x.size(0), x.size(1)}, x.scalar_type());
  const Rows rows = rows_of(x);
  with_element(x.scalar_type(), [&](auto element) {
    using T = typename decltype(element)::type;
    parallel_rows(rows.count, rows.width, [&](int64_t r) {
      dispatch<NormRow>(data<const T>(rows.tensor) + r * rows.stride, data<const T>(weight),
                        data<T>(y) + r * rows.width, rows.width, static_cast<float>(eps));
    });
  });
  return y;
}

namespace {

// Returns the sum of the rows of `partial` [chunks, width], added in order and rounded to `dtype`. Overwrites
// the first row.
Tensor sum_chunks(const Tensor& partial, int64_t chunks, int64_t width, ScalarType dtype) {
  const Tensor out = empty({width}, dtype);
  float* sum = data<float>(partial);
  for (int64_t c = 1; c < chunks; ++c) dispatch<AddRow>(sum + c * width, sum, width);
  with_element(dtype, [&](auto element) {
    dispatch<RoundRow>(sum, data<typename decltype(element)::type>(out), width);
  });
  return out;
}

Pair rms_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& weight_in, double eps) {
  const Contract check("rms_norm_backward");
  check_norm(check, x, weight_in);
  check_rows(check, x, "x", "grad", grad);
  const Rows g = rows_of(grad), in = rows_of(x);
  const Tensor weight = dense(weight_in), dx = empty({in.count, in.width}, x.scalar_type());
  const int64_t per_chunk = std::max<int64_t>(8, (in.count + kChunks - 1) / kChunks);
  const int64_t chunks = std::max<int64_t>(1, (in.count + per_chunk - 1) / per_chunk);
  const Tensor partial = empty({chunks, in.width}, ScalarType::Float);
  std::fill_n(data<float>(partial), chunks * in.width, 0.0f);
  with_element(x.scalar_type(), [&](auto element) {
    using T = typename decltype(element)::type;
    parallel_tasks(chunks, [&](int64_t chunk) {
      for (int64_t r = chunk * per_chunk; r < std::min(in.count, (chunk + 1) * per_chunk); ++r) {
        dispatch<NormRowBackward>(data<const T>(g.tensor) + r * g.stride,
                                  data<const T>(in.tensor) + r * in.stride, data<const T>(weight),
                                  data<T>(dx) + r * in.width, data<float>(partial) + chunk * in.width,
                                  in.width, static_cast<float>(eps));
      }
    });
  });
  return {dx, sum_chunks(partial, chunks, in.width, x.scalar_type())};
}

}  // namespace

Tensor silu_mul(const Tensor& gate, const Tensor& up) {
  check_rows(Contract("silu_mul"), gate, "gate", "up", up);
  const Rows g = rows_of(gate), u = rows_of(up);
  const Tensor y = empty({g.count, g.width}, gate.scalar_type());
  with_element(gate.scalar_type(), [&](auto element) {
    using T = typename decltype(element)::type;
    parallel_rows(g.count, g.width, [&](int64_t r) {
      dispatch<SiluMulRow>(data<const T>(g.tensor) + r * g.stride, data<const T>(u.tensor) + r * u.stride,
                           data<T>(y) + r * g.width, g.width);
    });
  });
  return y;
}

namespace {

Pair silu_mul_backward(const Tensor& grad, const Tensor& gate, const Tensor& up) {
  const Contract check("silu_mul_backward");
  check_rows(check, gate, "gate", "up", up);
  check_rows(check, gate, "gate", "grad", grad);
  const Rows dy = rows_of(grad), g = rows_of(gate), u = rows_of(up);
  const Tensor d_gate = empty({g.count, g.width}, gate.scalar_type());
  const Tensor d_up = empty({g.count, g.width}, gate.scalar_type());
  with_element(gate.scalar_type(), [&](auto element) {
    using T = typename decltype(element)::type;
    parallel_rows(g.count, g.width, [&](int64_t r) {
      dispatch<SiluMulRowBackward>(data<const T>(dy.tensor) + r * dy.stride,
                                   data<const T>(g.tensor) + r * g.stride,
                                   data<const T>(u.tensor) + r * u.stride, data<T>(d_gate) + r * g.width,
                                   data<T>(d_up) + r * g.width, g.width);
    });
  });
  return {d_gate, d_up};
}

}  // namespace
}  // namespace fp8serve

// `report` records the variants of an op, of which `backends()` and doctor show the one that runs
// (features.h).
STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&fp8serve::rms_norm));
  fp8serve::report<fp8serve::kVector<fp8serve::Numerics::last_bit>>("rms_norm");
  m.impl("rms_norm_backward", TORCH_BOX(&fp8serve::rms_norm_backward));
  fp8serve::report<fp8serve::kVector<fp8serve::Numerics::last_bit>>("rms_norm_backward");
  m.impl("silu_mul", TORCH_BOX(&fp8serve::silu_mul));
  fp8serve::report<fp8serve::kVector<fp8serve::Numerics::last_bit>>("silu_mul");
  m.impl("silu_mul_backward", TORCH_BOX(&fp8serve::silu_mul_backward));
  fp8serve::report<fp8serve::kVector<fp8serve::Numerics::last_bit>>("silu_mul_backward");
}
