// The ops between two GEMMs of a decoder layer, each with one read and one write of its data:
// rms_norm_quantize, layer_norm_quantize, silu_mul_quantize, and quantize_transpose for GEMMs that contract
// the other dimension.
//
// They round where the separate ops round (an intermediate of a BF16 model is BF16), so a layer gives the
// same numbers fused or not. The mean of squares and the exponential may differ in their last bit
// (fp8/ops/elementwise.py).
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cuda/casts.h"
#include "cuda/square.h"

namespace fp8serve {
namespace {

using Pair = std::tuple<Tensor, Tensor>;

constexpr int kThreads = kRowThreads;

// --- norm
// -----------------------------------------------------------------------------------------------------------

// One block per row. The block reads the row twice, the second time from the L1 cache.
template <class F, class T, bool kAligned>
__global__ void __launch_bounds__(kRowThreads)
    norm_row(const T* x, int64_t stride, const T* weight, uint8_t* q, int64_t n, float eps,
             const float* scale_in, const __grid_constant__ CastCounters out) {
  after_earlier_kernels();
  __shared__ float memory[2][32];
  const T* from = x + blockIdx.x * stride;
  const int64_t first = static_cast<int64_t>(threadIdx.x) * kChunk;
  const Chunk first_weight = load_chunk<kAligned>(weight, first, n);  // loaded while the row is summed up
  const bool counted = blockIdx.x < out.counted_rows(gridDim.x);
  const float scale = *scale_in, factor = row_factor<kAligned>(from, n, eps, memory[0]);
  const auto value = [&](int64_t at) {
    const Chunk w = at == first ? first_weight : load_chunk<kAligned>(weight, at, n);
    return normed<T>(load_chunk<kAligned>(from, at, n), w, factor);
  };
  float seen = 0.0f;
  for_chunks(n, [&](int64_t at) {
    const Chunk y = value(at);
    if (counted) seen = amax_of(y, seen);
    store_chunk<kAligned>(encode_chunk<F>(y, scale), q + blockIdx.x * n, at, n);
  });
  report_cast<F>(out, seen, scale, memory[1], [&] {
    unsigned num_saturated = 0;
    for_chunks(n, [&](int64_t at) { num_saturated += cut_off<F>(value(at), scale); });
    return num_saturated;
  });
}

// LayerNorm, as torch computes it: the mean, then the mean square of the deviations, in FP32, rounded once.
template <class F, class T, bool kAligned>
__global__ void __launch_bounds__(kRowThreads)
    layer_norm_row(const T* x, int64_t stride, const T* weight, const T* bias, uint8_t* q, int64_t n,
                   float eps, const float* scale_in, const __grid_constant__ CastCounters out) {
  after_earlier_kernels();
  __shared__ float memory[3][32];
  const T* from = x + blockIdx.x * stride;
  float sum = 0.0f, squares = 0.0f, seen = 0.0f;
  for_chunks(n, [&](int64_t at) {
    const Chunk chunk = load_chunk<kAligned>(from, at, n);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sum += chunk.value[i];
  });
  const float mean = block_sum(sum, memory[0]) / static_cast<float>(n);
  for_chunks(n, [&](int64_t at) {
    const Chunk chunk = load_chunk<kAligned>(from, at, n);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float off = at + i < n ? chunk.value[i] - mean : 0.0f;
      squares = fmaf(off, off, squares);
    }
  });
  const float factor = norm_factor(block_sum(squares, memory[1]), n, eps), scale = *scale_in;
  for_chunks(n, [&](int64_t at) {
    Chunk y = load_chunk<kAligned>(from, at, n);
    const Chunk w = load_chunk<kAligned>(weight, at, n);
    const Chunk b = bias == nullptr ? Chunk{} : load_chunk<kAligned>(bias, at, n);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float value = fmaf((y.value[i] - mean) * factor, w.value[i], b.value[i]);
      y.value[i] = at + i < n ? rounded<T>(value) : 0.0f;
    }
    seen = amax_of(y, seen);
    store_chunk<kAligned>(encode_chunk<F>(y, scale), q + blockIdx.x * n, at, n);
  });
  seen = block_max(seen, memory[2]);
  if (threadIdx.x == 0) report_amax(out, seen);
}

// --- gated activation
// ---------------------------------------------------------------------------------------------------

template <class F, class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    silu_mul(const T* gate, int64_t gate_stride, const T* up, int64_t up_stride, uint8_t* q, int64_t rows,
             int64_t n, const float* scale_in, const __grid_constant__ CastCounters out) {
  after_earlier_kernels();
  __shared__ float memory[32];
  const float scale = *scale_in;
  const int64_t counted = out.counted_rows(rows);
  const auto value = [&](int64_t row, int64_t at) {
    return gated<T>(load_chunk<kAligned>(gate + row * gate_stride, at, n),
                    load_chunk<kAligned>(up + row * up_stride, at, n));
  };
  float seen = 0.0f;
  for_all_chunks(rows, n, [&](int64_t row, int64_t at) {
    const Chunk y = value(row, at);
    if (row < counted) seen = amax_of(y, seen);
    store_chunk<kAligned>(encode_chunk<F>(y, scale), q + row * n, at, n);
  });
  report_cast<F>(out, seen, scale, memory, [&] {
    unsigned num_saturated = 0;
    for_all_chunks(rows, n, [&](int64_t row, int64_t at) {
      if (row < counted) num_saturated += cut_off<F>(value(row, at), scale);
    });
    return num_saturated;
  });
}

// --- cast and transpose
// -------------------------------------------------------------------------------------------------

// A block casts 128 x 128 elements and writes them twice: as they are, and transposed through shared
// memory.
template <class F, class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    cast_transpose(const T* x, uint8_t* q, uint8_t* q_t, int64_t rows, int64_t cols, const float* scale_in,
                   const __grid_constant__ CastCounters out) {
  __shared__ __align__(16) Square square;
  __shared__ float memory[32];
  static_assert(kThreads == kSquareThreads);
  constexpr int kLanes = kSquare / kChunk, kRows = kThreads / kLanes;
  const int64_t c0 = static_cast<int64_t>(blockIdx.x) * kSquare,
                r0 = static_cast<int64_t>(blockIdx.y) * kSquare;
  const int column = static_cast<int>(threadIdx.x) % kLanes * kChunk;
  const float scale = *scale_in;
  float seen = 0.0f;
#pragma unroll
  for (int line = static_cast<int>(threadIdx.x) / kLanes; line < kSquare; line += kRows) {
    const int64_t row = r0 + line;
    const Chunk chunk = load_chunk<kAligned>(x + row * cols, row < rows ? c0 + column : cols, cols);
    seen = amax_of(chunk, seen);
    const uint2 bytes = encode_chunk<F>(chunk, scale);
    square.at<uint2>(line, column) = bytes;
    if (row < rows) store_chunk<kAligned>(bytes, q + row * cols, c0 + column, cols);
  }
  seen = block_max(seen, memory);  // its barrier also makes the square complete
  if (threadIdx.x == 0) report_amax(out, seen);
  square.store_turned(q_t, r0, c0, rows, cols);
}

// Runs after a cast: raises the history's staging slot to the amax, if there is a history, and computes the
// inverse of the scale.
__global__ void record(const float* amax, const float* scale, float* staged, float* scale_inv,
                       bool infinity_is_nan) {
  after_earlier_kernels();
  if (staged != nullptr && *amax > *staged) *staged = *amax;
  *scale_inv = inverse_of(*scale, *amax, infinity_is_nan);
}

// --- ops
// ------------------------------------------------------------------------------------------------------------

void check_fp8(const DeviceContract& check, ScalarType dtype) {
  check.require(is_fp8(dtype), "dtype", "is ", torch::headeronly::toString(dtype),
                ", must be Float8_e4m3fn or Float8_e5m2");
}

Tensor zero_amax(const Tensor& like, const OnDevice& device) {
  const Tensor amax = empty(like, {}, ScalarType::Float);
  set_zero(amax.data_ptr(), sizeof(float), device.stream());
  return amax;
}

Pair rms_norm_quantize(const Tensor& x, const Tensor& weight_in, double eps, const Tensor& scale,
                       ScalarType dtype) {
  const DeviceContract check("rms_norm_quantize", x);
  check.rank("x", x, 2);
  const Size t{"T", x.size(0)}, hidden{"hidden", x.size(1)};
  check.tensor("x", x, kHigh, {t, hidden});
  check.tensor("weight", weight_in, {x.scalar_type()}, {hidden});
  check.tensor("scale", scale, {ScalarType::Float}, {});
  check_fp8(check, dtype);
  const OnDevice device(x);
  const Tensor q = empty(x, {t.value(), hidden.value()}, dtype);
  if (x.numel() == 0) return {q, zero_amax(x, device)};
  const Tensor amax = empty(x, {}, ScalarType::Float);
  cast_norm(x, weight_in, eps, scale, q, {data<float>(amax), true}, device);
  return {q, amax};
}

Pair layer_norm_quantize(const Tensor& x, const Tensor& weight_in, const std::optional<Tensor>& bias_in,
                         double eps, const Tensor& scale, ScalarType dtype) {
  const DeviceContract check("layer_norm_quantize", x);
  check.rank("x", x, 2);
  const Size t{"T", x.size(0)}, hidden{"hidden", x.size(1)};
  check.tensor("x", x, kHigh, {t, hidden});
  check.tensor("weight", weight_in, {x.scalar_type()}, {hidden});
  if (bias_in) check.tensor("bias", *bias_in, {x.scalar_type()}, {hidden});
  check.tensor("scale", scale, {ScalarType::Float}, {});
  check_fp8(check, dtype);
  const OnDevice device(x);
  const Tensor weight = dense(weight_in), bias = dense(bias_in ? *bias_in : weight_in);
  const Tensor q = empty(x, {t.value(), hidden.value()}, dtype);
  if (x.numel() == 0) return {q, zero_amax(x, device)};
  const Tensor amax = empty(x, {}, ScalarType::Float);
  const Rows rows = rows_of(x);
  const bool fast = fast_rows(rows) && aligned(weight.data_ptr(), 16) && aligned(bias.data_ptr(), 16);
  const CastCounters out = prepared({data<float>(amax), true}, rows.count, device, x);
  with_types(dtype, x.scalar_type(), fast, [&](auto fmt, auto elem, auto whole) {
    using T = typename decltype(elem)::type;
    launch_early(layer_norm_row<typename decltype(fmt)::type, T, whole.value>,
                 static_cast<unsigned>(rows.count), row_threads(rows.width), 0, device.stream(),
                 data<T>(rows.held), rows.stride, data<T>(weight), bias_in ? data<T>(bias) : nullptr,
                 data<uint8_t>(q), rows.width, static_cast<float>(eps), data<float>(scale), out);
  });
  return {q, amax};
}

Pair silu_mul_quantize(const Tensor& gate, const Tensor& up, const Tensor& scale, ScalarType dtype) {
  const DeviceContract check("silu_mul_quantize", gate);
  check.rank("gate", gate, 2);
  const Size t{"T", gate.size(0)}, width{"intermediate", gate.size(1)};
  check.tensor("gate", gate, kHigh, {t, width});
  check.tensor("up", up, {gate.scalar_type()}, {t, width});
  check.tensor("scale", scale, {ScalarType::Float}, {});
  check_fp8(check, dtype);
  const OnDevice device(gate);
  const Tensor q = empty(gate, {t.value(), width.value()}, dtype);
  if (gate.numel() == 0) return {q, zero_amax(gate, device)};
  const Tensor amax = empty(gate, {}, ScalarType::Float);
  cast_gated(gate, up, scale, q, {data<float>(amax), true}, device);
  return {q, amax};
}

std::tuple<Tensor, Tensor, Tensor> quantize_transpose(const Tensor& x_in, const Tensor& scale,
                                                      ScalarType dtype) {
  const DeviceContract check("quantize_transpose", x_in);
  check.rank("x", x_in, 2);
  const Size m{"M", x_in.size(0)}, k{"K", x_in.size(1)};
  check.tensor("x", x_in, kHigh, {m, k});
  check.tensor("scale", scale, {ScalarType::Float}, {});
  check_fp8(check, dtype);
  const OnDevice device(x_in);
  const Tensor x = dense(x_in), q = empty(x, {m.value(), k.value()}, dtype);
  const Tensor q_t = empty(x, {k.value(), m.value()}, dtype);
  if (x.numel() == 0) return {q, q_t, zero_amax(x, device)};
  const Tensor amax = empty(x, {}, ScalarType::Float);
  const dim3 grid(static_cast<unsigned>(ceil_over(k.value(), kSquare)),
                  static_cast<unsigned>(ceil_over(m.value(), kSquare)));
  const CastCounters out = prepared({data<float>(amax), true}, int64_t{grid.x} * grid.y, device, x);
  with_types(dtype, x.scalar_type(), fast_rows(rows_of(x)), [&](auto fmt, auto elem, auto whole) {
    using T = typename decltype(elem)::type;
    launch(cast_transpose<typename decltype(fmt)::type, T, whole.value>, grid, kThreads, 0, device.stream(),
           data<T>(x), data<uint8_t>(q), data<uint8_t>(q_t), m.value(), k.value(), data<float>(scale), out);
  });
  return {q, q_t, amax};
}

std::tuple<Tensor, Tensor, Tensor> quantize_delayed(const Tensor& x, const Tensor& scale,
                                                    const std::optional<Tensor>& history, ScalarType dtype,
                                                    bool turned, bool infinity_is_nan) {
  const DeviceContract check("quantize_delayed", x);
  check.rank("x", x, 2);
  check.dtype("x", x, kHigh);
  check.tensor("scale", scale, {ScalarType::Float}, {});
  check_fp8(check, dtype);
  check_history(check, "history", history);
  const OnDevice device(x);
  Tensor q, q_t, amax;
  if (turned) {
    std::tie(q, q_t, amax) = quantize_transpose(x, scale, dtype);
  } else {
    q = empty(x, {x.size(0), x.size(1)}, dtype);
    q_t = empty(x, {0, 0}, dtype);
    amax = empty(x, {}, ScalarType::Float);
    cast_plain(x, scale, q, {data<float>(amax), true}, device);
  }
  return {q, q_t, recorded(amax, scale, history, infinity_is_nan, device)};
}

}  // namespace

void check_history(const DeviceContract& check, const char* name, const std::optional<Tensor>& history) {
  if (!history) return;
  check.here(name, *history);
  check.dtype(name, *history, {ScalarType::Float});
  check.rank(name, *history, 1);
  check.require(history->size(0) > 0, name, "is empty, must hold at least the staging slot");
}

Tensor recorded(const Tensor& amax, const Tensor& scale, const std::optional<Tensor>& history,
                bool infinity_is_nan, const OnDevice& device) {
  const Tensor scale_inv = empty(amax, {}, ScalarType::Float);
  launch_early(record, 1, 1, 0, device.stream(), data<float>(amax), data<float>(scale),
               history ? data<float>(*history) : nullptr, data<float>(scale_inv), infinity_is_nan);
  return scale_inv;
}

void cast_norm(const Tensor& x, const Tensor& weight_in, double eps, const Tensor& scale, const Tensor& q,
               const CastCounters& requested_counters, const OnDevice& device) {
  const Tensor weight = dense(weight_in);
  const Rows rows = rows_of(x);
  const bool fast = fast_rows(rows) && aligned(weight.data_ptr(), 16);
  const CastCounters out = prepared(requested_counters, rows.count, device, x);
  with_types(q.scalar_type(), x.scalar_type(), fast, [&](auto fmt, auto elem, auto whole) {
    using T = typename decltype(elem)::type;
    launch_early(norm_row<typename decltype(fmt)::type, T, whole.value>, static_cast<unsigned>(rows.count),
                 row_threads(rows.width), 0, device.stream(), data<T>(rows.held), rows.stride,
                 data<T>(weight), data<uint8_t>(q), rows.width, static_cast<float>(eps), data<float>(scale),
                 out);
  });
}

void cast_gated(const Tensor& gate, const Tensor& up, const Tensor& scale, const Tensor& q,
                const CastCounters& requested_counters, const OnDevice& device) {
  const Rows g = rows_of(gate), u = rows_of(up);
  const unsigned blocks = blocks_for(g, device);
  const CastCounters out = prepared(requested_counters, blocks, device, gate);
  const bool fast = fast_rows(g) && fast_rows(u);
  with_types(q.scalar_type(), gate.scalar_type(), fast, [&](auto fmt, auto elem, auto whole) {
    using T = typename decltype(elem)::type;
    launch_early(silu_mul<typename decltype(fmt)::type, T, whole.value>, blocks, kThreads, 0, device.stream(),
                 data<T>(g.held), g.stride, data<T>(u.held), u.stride, data<uint8_t>(q), g.count, g.width,
                 data<float>(scale), out);
  });
}

}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(FP8SERVE_OPS, FP8SERVE_DEVICE_KEY, m) {
  m.impl("rms_norm_quantize", TORCH_BOX(&fp8serve::rms_norm_quantize));
  m.impl("layer_norm_quantize", TORCH_BOX(&fp8serve::layer_norm_quantize));
  m.impl("silu_mul_quantize", TORCH_BOX(&fp8serve::silu_mul_quantize));
  m.impl("quantize_transpose", TORCH_BOX(&fp8serve::quantize_transpose));
  m.impl("quantize_delayed", TORCH_BOX(&fp8serve::quantize_delayed));
}
