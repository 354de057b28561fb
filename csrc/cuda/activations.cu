// rms_norm, silu_mul and rotary without a cast, and the gradients of the first two: the ops that training
// runs between its GEMMs. The CPU's counterpart is cpu/activations.cpp. The forward ops round where the
// separate ops of a BF16 model would; the backward ops compute in FP32 and round once.
//
// The gradient of a norm's weight is a sum over rows in FP32. Each block sums a chunk of consecutive rows,
// with one thread for each column, and a second kernel adds the chunks in order. There are no atomics, and
// the number of chunks depends on the number of rows alone, so the sum is the same on every run and every
// GPU.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cuda/rows.h"

namespace fp8serve {
namespace {

using Pair = std::tuple<Tensor, Tensor>;

constexpr int kThreads = kRowThreads;
constexpr int kChunks = 256;                  // most partial sums of a weight's gradient
constexpr int kSharedFloats = 96 * 1024 / 4;  // columns whose partial sums fit in a block's shared memory
constexpr int kColumns = 32, kGroups = 8;     // shape of a block of add_chunks

// --- norm
// -----------------------------------------------------------------------------------------------------------

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    norm_row(const T* x, int64_t stride, const T* weight, T* y, int64_t n, float eps) {
  after_earlier_kernels();
  __shared__ float memory[32];
  const T* from = x + blockIdx.x * stride;
  const float factor = row_factor<kAligned>(from, n, eps, memory);
  for_chunks(n, [&](int64_t at) {
    const Chunk out =
        normed<T>(load_chunk<kAligned>(from, at, n), load_chunk<kAligned>(weight, at, n), factor);
    store_high<kAligned>(out, y + blockIdx.x * n, at, n);
  });
}

template <class T>
struct NormBackward {
  const T *grad, *x, *weight;
  int64_t grad_stride, x_stride;
  T* dx;
  float* partial;  // [chunks][n]
  int64_t rows, per_chunk, n;
  float eps;
  bool shared;  // sums stay in shared memory until the block's chunk of rows is done
};

// With h = x * factor and g = grad * weight: dx = factor * (g - h * mean(g * h)), dw += grad * h.
template <class T, bool kAligned>
__device__ __forceinline__ void backward_row(const NormBackward<T>& b, int64_t row, float* dw,
                                             float (*memory)[32]) {
  const T *grad = b.grad + row * b.grad_stride, *x = b.x + row * b.x_stride;
  float squares = 0.0f, products = 0.0f;
  for_chunks(b.n, [&](int64_t at) {
    const Chunk g = load_chunk<kAligned>(grad, at, b.n), w = load_chunk<kAligned>(b.weight, at, b.n),
                h = load_chunk<kAligned>(x, at, b.n);
    squares = sum_of_squares(h, squares);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) products = fmaf(g.value[i] * w.value[i], h.value[i], products);
  });
  const float factor = norm_factor(block_sum(squares, memory[0]), b.n, b.eps);
  const float mean = block_sum(products, memory[1]) * factor / static_cast<float>(b.n);
  for_chunks(b.n, [&](int64_t at) {
    const Chunk g = load_chunk<kAligned>(grad, at, b.n), w = load_chunk<kAligned>(b.weight, at, b.n),
                h = load_chunk<kAligned>(x, at, b.n);
    Chunk dx;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float normal = h.value[i] * factor;
      dx.value[i] = factor * (g.value[i] * w.value[i] - normal * mean);
      if (at + i < b.n) dw[at + i] += g.value[i] * rounded<T>(normal);
    }
    store_high<kAligned>(dx, b.dx + row * b.n, at, b.n);
  });
}

// One block per chunk of rows. Only one thread accesses a column of dw.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads) norm_backward(const __grid_constant__ NormBackward<T> b) {
  __shared__ float memory[2][32];
  float* out = b.partial + blockIdx.x * b.n;
  float* dw = b.shared ? reinterpret_cast<float*>(dynamic_shared()) : out;
  for_chunks(b.n, [&](int64_t at) {
    for (int i = 0; i < kChunk && at + i < b.n; ++i) dw[at + i] = 0.0f;
  });
  const int64_t first = blockIdx.x * b.per_chunk, last = min(b.rows, first + b.per_chunk);
  for (int64_t row = first; row < last; ++row) backward_row<T, kAligned>(b, row, dw, memory);
  if (!b.shared) return;
  for_chunks(b.n, [&](int64_t at) {
    for (int i = 0; i < kChunk && at + i < b.n; ++i) out[at + i] = dw[at + i];
  });
}

// out[column] = the sum of partial [chunks][n] over chunks. Eight groups of consecutive chunks are summed
// in parallel, then the groups in order.
template <class T>
__global__ void __launch_bounds__(kColumns* kGroups)
    add_chunks(const float* partial, int64_t chunks, int64_t n, T* out) {
  __shared__ float sums[kGroups][kColumns];
  const int lane = static_cast<int>(threadIdx.x) % kColumns, group = static_cast<int>(threadIdx.x) / kColumns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + lane;
  const int64_t each = (chunks + kGroups - 1) / kGroups, last = min(chunks, (group + 1) * each);
  float sum = 0.0f;
#pragma unroll 8
  for (int64_t c = group * each; c < last; ++c) sum += column < n ? partial[c * n + column] : 0.0f;
  sums[group][lane] = sum;
  __syncthreads();
  if (group != 0 || column >= n) return;
  for (int g = 1; g < kGroups; ++g) sum += sums[g][lane];
  store(sum, out + column);
}

// --- gated activation
// -----------------------------------------------------------------------------------------------

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    silu_mul_rows(Matrix<T> gate, Matrix<T> up, T* y, int64_t rows, int64_t n) {
  after_earlier_kernels();
  for_all_chunks(rows, n, [&](int64_t row, int64_t at) {
    const Chunk out = gated<T>(load_chunk<kAligned>(gate.at + row * gate.stride, at, n),
                               load_chunk<kAligned>(up.at + row * up.stride, at, n));
    store_high<kAligned>(out, y + row * n, at, n);
  });
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads) silu_mul_gradients(Matrix<T> grad, Matrix<T> gate, Matrix<T> up,
                                                               T* d_gate, T* d_up, int64_t rows, int64_t n) {
  for_all_chunks(rows, n, [&](int64_t row, int64_t at) {
    const GatedGradients d = gated_gradients<T>(load_chunk<kAligned>(grad.at + row * grad.stride, at, n),
                                                load_chunk<kAligned>(gate.at + row * gate.stride, at, n),
                                                load_chunk<kAligned>(up.at + row * up.stride, at, n));
    store_high<kAligned>(d.up, d_up + row * n, at, n);
    store_high<kAligned>(d.gate, d_gate + row * n, at, n);
  });
}

// --- rotary embedding
// -----------------------------------------------------------------------------------------------

// One block per token. A thread rotates eight pairs of a head at a time.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    rotate(const T* x, int64_t token_stride, const T* cos, const T* sin, T* out, int heads, int dim) {
  after_earlier_kernels();
  const int64_t token = blockIdx.x, half = dim / 2;
  const T* from = x + token * token_stride;
  T* to = out + token * heads * dim;
  cos += token * dim, sin += token * dim;
  Steps at(threadIdx.x, kThreads, static_cast<uint32_t>((half + kChunk - 1) / kChunk));
  for (; at.row() < heads; at.next()) {
    const int64_t begin = static_cast<int64_t>(at.column()) * kChunk;
    const auto load = [&](const T* head) { return load_pairs<kAligned>(head, begin, half); };
    store_pairs<kAligned>(rotated<T>(load(from + at.row() * dim), load(cos), load(sin)), to + at.row() * dim,
                          begin, half);
  }
}

// --- ops
// ------------------------------------------------------------------------------------------------------------

// Calls f(Type<element>, bool_constant<fast>).
template <class F>
void with_types(ScalarType element, bool fast, const F& f) {
  with_element(element, [&](auto elem) { fast ? f(elem, std::true_type{}) : f(elem, std::false_type{}); });
}

void check_rows(const DeviceContract& check, const Tensor& x, const char* first, const char* second,
                const Tensor& y) {
  check.rank(first, x, 2);
  const Size t{"T", x.size(0)}, width{"width", x.size(1)};
  check.tensor(first, x, kHigh, {t, width});
  check.tensor(second, y, {x.scalar_type()}, {t, width});
}

void check_norm(const DeviceContract& check, const Tensor& x, const Tensor& weight) {
  check.rank("x", x, 2);
  const Size t{"T", x.size(0)}, hidden{"hidden", x.size(1)};
  check.tensor("x", x, kHigh, {t, hidden});
  check.tensor("weight", weight, {x.scalar_type()}, {hidden});
}

Tensor rms_norm(const Tensor& x, const Tensor& weight_in, double eps) {
  check_norm(DeviceContract("rms_norm", x), x, weight_in);
  const OnDevice device(x);
  const Tensor weight = dense(weight_in), y = empty(x, {x.size(0), x.size(1)}, x.scalar_type());
  if (x.numel() == 0) return y;
  const Rows rows = rows_of(x);
  with_types(x.scalar_type(), fast_rows(rows) && aligned(weight.data_ptr(), 16), [&](auto elem, auto whole) {
    using T = typename decltype(elem)::type;
    launch_early(norm_row<T, whole.value>, static_cast<unsigned>(rows.count), row_threads(rows.width), 0,
                 device.stream(), data<T>(rows.held), rows.stride, data<T>(weight), data<T>(y), rows.width,
                 static_cast<float>(eps));
  });
  return y;
}

Pair rms_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& weight_in, double eps) {
  const DeviceContract check("rms_norm_backward", x);
  check_norm(check, x, weight_in);
  check_rows(check, x, "x", "grad", grad);
  const OnDevice device(x);
  const Tensor weight = dense(weight_in), dx = empty(x, {x.size(0), x.size(1)}, x.scalar_type());
  const Tensor dw = empty(x, {x.size(1)}, x.scalar_type());
  if (dw.numel() == 0) return {dx, dw};
  const Rows g = rows_of(grad), in = rows_of(x);
  const int64_t per_chunk = std::max<int64_t>(1, ceil_over(in.count, kChunks));
  const int64_t chunks = std::max<int64_t>(1, ceil_over(in.count, per_chunk));
  const Tensor partial = empty(x, {chunks, in.width}, ScalarType::Float);
  const bool fast = fast_rows(g) && fast_rows(in) && aligned(weight.data_ptr(), 16);
  const bool shared = in.width <= kSharedFloats;
  with_types(x.scalar_type(), fast, [&](auto elem, auto whole) {
    using T = typename decltype(elem)::type;
    const NormBackward<T> b{data<T>(g.held), data<T>(in.held), data<T>(weight),         g.stride,
                            in.stride,       data<T>(dx),      data<float>(partial),    in.count,
                            per_chunk,       in.width,         static_cast<float>(eps), shared};
    launch(norm_backward<T, whole.value>, static_cast<unsigned>(chunks), row_threads(in.width),
           shared ? static_cast<int>(in.width * sizeof(float)) : 0, device.stream(), b);
    launch(add_chunks<T>, static_cast<unsigned>(ceil_over(in.width, kColumns)), kColumns * kGroups, 0,
           device.stream(), data<float>(partial), chunks, in.width, data<T>(dw));
  });
  return {dx, dw};
}

Tensor silu_mul(const Tensor& gate, const Tensor& up) {
  check_rows(DeviceContract("silu_mul", gate), gate, "gate", "up", up);
  const OnDevice device(gate);
  const Tensor y = empty(gate, {gate.size(0), gate.size(1)}, gate.scalar_type());
  if (y.numel() == 0) return y;
  const Rows g = rows_of(gate), u = rows_of(up);
  with_types(gate.scalar_type(), fast_rows(g) && fast_rows(u), [&](auto elem, auto whole) {
    using T = typename decltype(elem)::type;
    launch_early(silu_mul_rows<T, whole.value>, blocks_for(g, device), kThreads, 0, device.stream(),
                 matrix<T>(g), matrix<T>(u), data<T>(y), g.count, g.width);
  });
  return y;
}

Pair silu_mul_backward(const Tensor& grad, const Tensor& gate, const Tensor& up) {
  const DeviceContract check("silu_mul_backward", gate);
  check_rows(check, gate, "gate", "up", up);
  check_rows(check, gate, "gate", "grad", grad);
  const OnDevice device(gate);
  const Tensor d_gate = empty(gate, {gate.size(0), gate.size(1)}, gate.scalar_type());
  const Tensor d_up = empty(gate, {gate.size(0), gate.size(1)}, gate.scalar_type());
  if (d_up.numel() == 0) return {d_gate, d_up};
  const Rows dy = rows_of(grad), g = rows_of(gate), u = rows_of(up);
  const bool fast = fast_rows(dy) && fast_rows(g) && fast_rows(u);
  with_types(gate.scalar_type(), fast, [&](auto elem, auto whole) {
    using T = typename decltype(elem)::type;
    launch(silu_mul_gradients<T, whole.value>, blocks_for(g, device), kThreads, 0, device.stream(),
           matrix<T>(dy), matrix<T>(g), matrix<T>(u), data<T>(d_gate), data<T>(d_up), g.count, g.width);
  });
  return {d_gate, d_up};
}

Tensor rotary(const Tensor& x, const Tensor& cos_in, const Tensor& sin_in) {
  const DeviceContract check("rotary", x);
  check.rank("x", x, 3);
  const Size t{"T", x.size(0)}, heads{"heads", x.size(1)}, dim{"D", x.size(2)};
  check.tensor("x", x, kHigh, {t, heads, dim});
  check.tensor("cos", cos_in, {x.scalar_type()}, {t, exactly(1), dim});
  check.tensor("sin", sin_in, {x.scalar_type()}, {t, exactly(1), dim});
  check.require(dim.value() % 2 == 0, "x", "head_dim is ", dim.value(), ", must be even");
  const OnDevice device(x);
  const Tensor cos = dense(cos_in), sin = dense(sin_in);
  Tensor out = empty(x, {t.value(), heads.value(), dim.value()}, x.scalar_type());
  if (out.numel() == 0) return out;
  const HeadsOf from(x);
  const bool fast = fast_pairs(dim.value(), {from.heads}, {cos.data_ptr(), sin.data_ptr()});
  with_types(x.scalar_type(), fast, [&](auto elem, auto whole) {
    using T = typename decltype(elem)::type;
    launch_early(rotate<T, whole.value>, static_cast<unsigned>(t.value()), kThreads, 0, device.stream(),
                 data<T>(from.held), from.heads.token_stride, data<T>(cos), data<T>(sin), data<T>(out),
                 from.heads.count, static_cast<int>(dim.value()));
  });
  return out;
}

}  // namespace
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(FP8SERVE_OPS, FP8SERVE_DEVICE_KEY, m) {
  m.impl("rms_norm", TORCH_BOX(&fp8serve::rms_norm));
  m.impl("rms_norm_backward", TORCH_BOX(&fp8serve::rms_norm_backward));
  m.impl("silu_mul", TORCH_BOX(&fp8serve::silu_mul));
  m.impl("silu_mul_backward", TORCH_BOX(&fp8serve::silu_mul_backward));
  m.impl("rotary", TORCH_BOX(&fp8serve::rotary));
}
