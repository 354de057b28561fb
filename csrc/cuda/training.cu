// The casts of training under delayed scaling, fused with the operation before the cast, so that its input is
// read once: rms_norm_quantize_delayed, silu_mul_quantize_delayed and, in the backward pass,
// silu_mul_backward_quantize_delayed. Each gives the results of its parts (fp8/ops/fused_casts.py): the
// values are rounded to the dtype of activations before they are cast, and the amax raises the history's
// staging slot.
//
// A GEMM of the backward pass sums over the rows, so every cast also writes the transposed data. Elementwise
// operations transpose a square in shared memory. A norm needs whole rows, so a second kernel transposes its
// data, which reads and writes one byte per element.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cuda/casts.h"
#include "cuda/layout.h"
#include "cuda/square.h"

namespace fp8serve {
namespace {

using Cast = std::tuple<Tensor, Tensor, Tensor>;  // q, its transpose or an empty tensor, scale_inv
using Casts = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;  // of gate, of up

constexpr int kThreads = kSquareThreads;

// The output of a cast, of which every block writes one square.
struct Target {
  uint8_t *q, *q_t;  // [rows, cols], [cols, rows]; q_t is null if the transposed data are not needed
  const float* scale;
  CastCounters counters;
};

// The square of a matrix [rows, cols] on which a block works.
struct SquareRange {
  int64_t r0, c0, rows, cols;

  __device__ __forceinline__ SquareRange(int64_t rows, int64_t cols)
      : r0(static_cast<int64_t>(blockIdx.y) * kSquare),
        c0(static_cast<int64_t>(blockIdx.x) * kSquare),
        rows(rows),
        cols(cols) {}

  // Calls f(line of the square, column of the square, row, first element in the row) for this thread's
  // chunks. Past the last row the first element is `cols`, the end of the row, so that a load returns zeros.
  template <class F>
  __device__ __forceinline__ void for_lines(const F& f) const {
    constexpr int kLanes = kSquare / kChunk, kRows = kThreads / kLanes;
    const int column = static_cast<int>(threadIdx.x) % kLanes * kChunk;
#pragma unroll
    for (int line = static_cast<int>(threadIdx.x) / kLanes; line < kSquare; line += kRows) {
      const int64_t row = r0 + line;
      f(line, column, row, row < rows ? c0 + column : cols);
    }
  }
};

template <class F, bool kAligned>
__device__ __forceinline__ void write(const Target& to, Square& square, const Chunk& values, float scale,
                                      int line, int column, int64_t row, int64_t at, int64_t cols) {
  const uint2 bytes = encode_chunk<F>(values, scale);
  square.at<uint2>(line, column) = bytes;
  store_chunk<kAligned>(bytes, to.q + row * cols, at, cols);
}

// Reports the amax and stores the transposed square. All threads of a block call this after they have written
// the square.
__device__ __forceinline__ void finish(const Target& to, Square& square, float seen, float* memory,
                                       const SquareRange& range) {
  seen = block_max(seen, memory);  // its barrier also ends the writes to the square
  if (threadIdx.x == 0) report_amax(to.counters, seen);
  if (to.q_t != nullptr) square.store_turned(to.q_t, range.r0, range.c0, range.rows, range.cols);
}

template <class F, class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    gated_cast(Matrix<T> gate, Matrix<T> up, int64_t rows, int64_t cols, const __grid_constant__ Target to) {
  __shared__ __align__(16) Square square;
  __shared__ float memory[32];
  const SquareRange range(rows, cols);
  const float scale = *to.scale;
  float seen = 0.0f;
  range.for_lines([&](int line, int column, int64_t row, int64_t at) {
    const Chunk y = gated<T>(load_chunk<kAligned>(gate.at + row * gate.stride, at, cols),
                             load_chunk<kAligned>(up.at + row * up.stride, at, cols));
    seen = amax_of(y, seen);
    write<F, kAligned>(to, square, y, scale, line, column, row, at, cols);
  });
  finish(to, square, seen, memory, range);
}

template <class T>
struct GatedInputs {
  Matrix<T> grad, gate, up;
  int64_t rows, cols;
};

template <class F, class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    gated_gradient_casts(const __grid_constant__ GatedInputs<T> in, const __grid_constant__ Target to_gate,
                         const __grid_constant__ Target to_up) {
  __shared__ __align__(16) Square squares[2];
  __shared__ float memory[2][32];
  const SquareRange range(in.rows, in.cols);
  const float gate_scale = *to_gate.scale, up_scale = *to_up.scale;
  float gate_seen = 0.0f, up_seen = 0.0f;
  range.for_lines([&](int line, int column, int64_t row, int64_t at) {
    GatedGradients d =
        gated_gradients<T>(load_chunk<kAligned>(in.grad.at + row * in.grad.stride, at, in.cols),
                           load_chunk<kAligned>(in.gate.at + row * in.gate.stride, at, in.cols),
                           load_chunk<kAligned>(in.up.at + row * in.up.stride, at, in.cols));
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      d.gate.value[i] = rounded<T>(d.gate.value[i]);
      d.up.value[i] = rounded<T>(d.up.value[i]);
    }
    gate_seen = amax_of(d.gate, gate_seen);
    up_seen = amax_of(d.up, up_seen);
    write<F, kAligned>(to_gate, squares[0], d.gate, gate_scale, line, column, row, at, in.cols);
    write<F, kAligned>(to_up, squares[1], d.up, up_scale, line, column, row, at, in.cols);
  });
  finish(to_gate, squares[0], gate_seen, memory[0], range);
  finish(to_up, squares[1], up_seen, memory[1], range);
}

// --- ops
// ------------------------------------------------------------------------------------------------------------

void check_cast(const DeviceContract& check, const char* name, const Tensor& scale,
                const std::optional<Tensor>& history, ScalarType dtype) {
  check.tensor(name, scale, {ScalarType::Float}, {});
  check_history(check, "history", history);
  check.require(is_fp8(dtype), "dtype", "is ", torch::headeronly::toString(dtype),
                ", must be Float8_e4m3fn or Float8_e5m2");
}

dim3 squares_of(const Rows& rows) {
  return {static_cast<unsigned>(ceil_over(rows.width, kSquare)),
          static_cast<unsigned>(ceil_over(rows.count, kSquare))};
}

// The tensors that one cast writes. The amax is set to zero, and all blocks raise it.
struct Result {
  Tensor q, q_t, amax;

  Result(const Tensor& like, ScalarType dtype, bool turned, const OnDevice& device)
      : q(empty(like, {like.size(0), like.size(1)}, dtype)),
        q_t(turned ? empty(like, {like.size(1), like.size(0)}, dtype) : empty(like, {0, 0}, dtype)),
        amax(empty(like, {}, ScalarType::Float)) {
    set_zero(amax.data_ptr(), sizeof(float), device.stream());
  }
  Target target(const Tensor& scale) const {
    return {.q = data<uint8_t>(q),
            .q_t = q_t.numel() == 0 ? nullptr : data<uint8_t>(q_t),
            .scale = data<const float>(scale),
            .counters = {.amax = data<float>(amax)}};
  }
};

Cast rms_norm_quantize_delayed(const Tensor& x, const Tensor& weight, double eps, const Tensor& scale,
                               const std::optional<Tensor>& history, ScalarType dtype, bool turned) {
  const DeviceContract check("rms_norm_quantize_delayed", x);
  check.rank("x", x, 2);
  const Size t{"T", x.size(0)}, hidden{"hidden", x.size(1)};
  check.tensor("x", x, kHigh, {t, hidden});
  check.tensor("weight", weight, {x.scalar_type()}, {hidden});
  check_cast(check, "scale", scale, history, dtype);
  const OnDevice device(x);
  const Tensor q = empty(x, {x.size(0), x.size(1)}, dtype), amax = empty(x, {}, ScalarType::Float);
  if (x.numel() == 0) {
    set_zero(amax.data_ptr(), sizeof(float), device.stream());
  } else {
    cast_norm(x, weight, eps, scale, q, {data<float>(amax), true}, device);
  }
  const Tensor q_t = turned ? transposed(q, device) : empty(x, {0, 0}, dtype);
  return {q, q_t, recorded(amax, scale, history, false, device)};
}

Cast silu_mul_quantize_delayed(const Tensor& gate, const Tensor& up, const Tensor& scale,
                               const std::optional<Tensor>& history, ScalarType dtype, bool turned) {
  const DeviceContract check("silu_mul_quantize_delayed", gate);
  check.rank("gate", gate, 2);
  const Size t{"T", gate.size(0)}, width{"intermediate", gate.size(1)};
  check.tensor("gate", gate, kHigh, {t, width});
  check.tensor("up", up, {gate.scalar_type()}, {t, width});
  check_cast(check, "scale", scale, history, dtype);
  const OnDevice device(gate);
  const Result result(gate, dtype, turned, device);
  const Rows g = rows_of(gate), u = rows_of(up);
  if (gate.numel() > 0) {
    with_types(dtype, gate.scalar_type(), fast_rows(g) && fast_rows(u), [&](auto fmt, auto elem, auto whole) {
      using T = typename decltype(elem)::type;
      launch(gated_cast<typename decltype(fmt)::type, T, whole.value>, squares_of(g), kThreads, 0,
             device.stream(), matrix<T>(g), matrix<T>(u), g.count, g.width, result.target(scale));
    });
  }
  return {result.q, result.q_t, recorded(result.amax, scale, history, false, device)};
}

Casts silu_mul_backward_quantize_delayed(const Tensor& grad, const Tensor& gate, const Tensor& up,
                                         const Tensor& gate_scale, const std::optional<Tensor>& gate_history,
                                         const Tensor& up_scale, const std::optional<Tensor>& up_history,
                                         ScalarType dtype, bool turned) {
  const DeviceContract check("silu_mul_backward_quantize_delayed", gate);
  check.rank("gate", gate, 2);
  const Size t{"T", gate.size(0)}, width{"intermediate", gate.size(1)};
  check.tensor("gate", gate, kHigh, {t, width});
  check.tensor("up", up, {gate.scalar_type()}, {t, width});
  check.tensor("grad", grad, {gate.scalar_type()}, {t, width});
  check_cast(check, "gate_scale", gate_scale, gate_history, dtype);
  check_cast(check, "up_scale", up_scale, up_history, dtype);
  const OnDevice device(gate);
  const Result to_gate(gate, dtype, turned, device), to_up(gate, dtype, turned, device);
  const Rows dy = rows_of(grad), g = rows_of(gate), u = rows_of(up);
  if (gate.numel() > 0) {
    with_types(dtype, gate.scalar_type(), fast_rows(dy) && fast_rows(g) && fast_rows(u),
               [&](auto fmt, auto elem, auto whole) {
                 using T = typename decltype(elem)::type;
                 const GatedInputs<T> in{matrix<T>(dy), matrix<T>(g), matrix<T>(u), g.count, g.width};
                 launch(gated_gradient_casts<typename decltype(fmt)::type, T, whole.value>, squares_of(g),
                        kThreads, 0, device.stream(), in, to_gate.target(gate_scale), to_up.target(up_scale));
               });
  }
  return {to_gate.q, to_gate.q_t, recorded(to_gate.amax, gate_scale, gate_history, true, device),
          to_up.q,   to_up.q_t,   recorded(to_up.amax, up_scale, up_history, true, device)};
}

}  // namespace
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(FP8SERVE_OPS, FP8SERVE_DEVICE_KEY, m) {
  m.impl("rms_norm_quantize_delayed", TORCH_BOX(&fp8serve::rms_norm_quantize_delayed));
  m.impl("silu_mul_quantize_delayed", TORCH_BOX(&fp8serve::silu_mul_quantize_delayed));
  m.impl("silu_mul_backward_quantize_delayed", TORCH_BOX(&fp8serve::silu_mul_backward_quantize_delayed));
}
