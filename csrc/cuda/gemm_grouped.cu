// Products of experts (fp8/ops/grouped.py). Rows or columns are sorted by expert:
//
//   grouped_mm        a [T, K] x b [E, N, K] -> [T, N]           forward, and the gradient of the input
//   grouped_wgrad     a [N, T] x b [K, T]    -> [E, N, K]        the gradient of the weights
//   grouped_quantize  x [T, K] by scales [E] -> q [T, K], amax [E]
//
// The host never reads where each expert ends: the grid is large enough for every division of the T rows, and
// blocks without work return. So the host cannot check `offsets` either: if they decrease or do not end at T,
// the result is wrong, but no access is outside of the tensors.
//
// Kernels of grouped_mm: the skinny kernel up to 64 rows of all experts together (E4M3 x E4M3); for more rows
// CUTLASS on Hopper and sm_100, else the mma kernel. Kernels of grouped_wgrad: CUTLASS, else mma.
#include <torch/csrc/stable/library.h>

#include <limits>
#include <optional>
#include <tuple>

#include "cuda/chips.h"
#include "cuda/gemm_grouped.h"
#include "cuda/gemm_switches.h"
#include "cuda/layout.h"

namespace fp8serve {
namespace {

constexpr int kThreads = 256;

// --- padding of grouped_wgrad's columns: every expert's begin at a multiple of 16
// ---------------------------------------------------------------------------------------------------

// Copies `from` [rows, total] to `to` [rows, stride]; a thread moves 16 columns of one expert.
__global__ void __launch_bounds__(kThreads)
    pad_columns(const uint8_t* from, uint8_t* to, int rows, const __grid_constant__ Grouped g) {
  const auto pieces = static_cast<uint32_t>(g.stride / 16);
  const Steps at(blockIdx.x * kThreads + threadIdx.x, 0, pieces);
  if (at.row() >= rows) return;
  const int row = static_cast<int>(at.row()), piece = static_cast<int>(at.column());
  const int expert = g.expert_of_piece(piece, 16);
  const int first = g.begin(expert) + (piece - g.first_piece(expert, 16)) * 16, end = g.end(expert);
  const uint8_t* source = from + static_cast<int64_t>(row) * g.total;
  uint32_t word[4] = {0, 0, 0, 0};
  for (int i = 0; i < 16; ++i) {
    if (first + i < end) word[i / 4] |= static_cast<uint32_t>(source[first + i]) << (8 * (i % 4));
  }
  reinterpret_cast<uint4*>(to)[at.row() * pieces + piece] = {word[0], word[1], word[2], word[3]};
}

Tensor padded_columns(const Tensor& matrix, const Grouped& g, const OnDevice& device) {
  const Tensor from = dense(matrix), to = empty(from, {from.size(0), g.stride}, from.scalar_type());
  const auto blocks = static_cast<unsigned>(ceil_over(to.numel() / 16, kThreads));
  launch(pad_columns, blocks, kThreads, 0, device.stream(), data<uint8_t>(from), data<uint8_t>(to),
         static_cast<int>(from.size(0)), g);
  return to;
}

// --- contract
// ---------------------------------------------------------------------------------------------------

// The scale_inv of one operand, for all experts.
struct Scales {
  Tensor held;
  Scale scale;  // of the first expert
  Step step;
};

Scales whole(const Tensor& scale, int64_t expert) {
  Tensor held = dense(scale);
  return {held, {.data = data<const float>(held)}, {.expert = expert}};
}

// Returns a scale [] or [E]; nullopt if `scale` has more dimensions.
std::optional<Scales> one_or_each(const DeviceContract& check, const char* name, const Tensor& scale,
                                  Size count) {
  check.here(name, scale);
  check.dtype(name, scale, {ScalarType::Float});
  if (scale.dim() == 0) return whole(scale, 0);
  if (scale.dim() != 1) return std::nullopt;
  check.shape(name, scale, {count});
  return whole(scale, 1);
}

// Returns the scales of a's rows: [], [E], [T, 1] or [T, ceil(K / 128)].
Scales scales_of_rows(const DeviceContract& check, const Tensor& scale, Size count, Size rows, Size k) {
  if (auto scales = one_or_each(check, "a_scale_inv", scale, count)) return *scales;
  check.rank("a_scale_inv", scale, 2);
  const bool by_row = scale.size(1) == 1;
  const Size blocks = by_row ? exactly(1) : ceil_div(k, kScaleBlock);
  check.shape("a_scale_inv", scale, {rows, blocks});
  Tensor held = dense(scale);
  const int across = by_row ? 0 : static_cast<int>(blocks.value());
  return {held, {data<const float>(held), 0, across}, {.place = blocks.value()}};
}

// Returns the scales of the weights: [], [E], [E, N, 1], [E, N, ceil(K / 128)] or
// [E, ceil(N / 128), ceil(K / 128)].
Scales scales_of_weights(const DeviceContract& check, const Tensor& scale, Size count, Size n, Size k) {
  if (auto scales = one_or_each(check, "b_scale_inv", scale, count)) return *scales;
  check.rank("b_scale_inv", scale, 3);
  const bool of_rows = scale.size(1) == n.value(), by_row = of_rows && scale.size(2) == 1;
  const Size tiles = of_rows ? n : ceil_div(n, kScaleBlock),
             blocks = by_row ? exactly(1) : ceil_div(k, kScaleBlock);
  check.shape("b_scale_inv", scale, {count, tiles, blocks});
  if (tiles.value() * blocks.value() == 1) return whole(scale, 1);
  Tensor held = dense(scale);
  const int across = by_row ? 0 : static_cast<int>(blocks.value());
  return {
      held, {data<const float>(held), of_rows ? 0 : 7, across}, {.expert = tiles.value() * blocks.value()}};
}

// Returns the scales of an operand whose columns are sorted by expert: [], [E], [E, rows, 1], or [rows,
// blocks] with ceil(columns / 128) blocks for each expert.
Scales scales_of_columns(const DeviceContract& check, const char* name, const Tensor& scale, Size count,
                         Size rows) {
  if (auto scales = one_or_each(check, name, scale, count)) return *scales;
  Tensor held = dense(scale);
  if (scale.dim() == 3) {
    check.shape(name, scale, {count, rows, exactly(1)});
    return {held, {data<const float>(held), 0, 0}, {.expert = rows.value()}};
  }
  check.rank(name, scale, 2);
  check.shape(name, scale, {rows, exactly(scale.size(1))});
  return {held, {data<const float>(held), 0, static_cast<int>(scale.size(1))}, {.place = 1}};
}

void check_high(const DeviceContract& check, ScalarType out_dtype) {
  check.require(std::find(kHigh.begin(), kHigh.end(), out_dtype) != kHigh.end(), "out_dtype", "is ",
                torch::headeronly::toString(out_dtype), ", must be Float, BFloat16 or Half");
}

void check_sizes(const DeviceContract& check, std::initializer_list<Size> sizes) {
  for (const Size& size : sizes) {
    check.require(size.value() < std::numeric_limits<int>::max() - kScaleBlock, size.name, "is ",
                  size.value(), ", must fit 32 bits");
  }
}

// --- ops
// ---------------------------------------------------------------------------------------------------

bool holds_e5m2(const Tensor& t) { return t.scalar_type() == ScalarType::Float8_e5m2; }

Gemm problem(const Tensor& a, const Tensor& b, bool b_e5m2, const Scale& a_scale, const Scale& b_scale,
             const Tensor& out) {
  return {.a = data<const uint8_t>(a),
          .b = data<const uint8_t>(b),
          .a_e5m2 = holds_e5m2(a),
          .b_e5m2 = b_e5m2,
          .m = static_cast<int>(a.size(0)),
          .n = static_cast<int>(out.size(out.dim() - 1)),
          .k = static_cast<int>(a.size(1)),
          .a_scale = a_scale,
          .b_scale = b_scale,
          .bias = nullptr,
          .bias_type = Number::fp32,
          .out_type = number_of(out.scalar_type()),
          .out = out.data_ptr()};
}

[[maybe_unused]] bool grouped_cutlass(const Grouped& g, const OnDevice& device, const Tensor& allocator) {
  [[maybe_unused]] const int chip = device.capability();
  if (!aligned(g.all.b_scale.data, 16)) return false;  // a view may begin anywhere
  [[maybe_unused]] const bool inside = g.all.a_scale.inside() || g.all.b_scale.inside();
#ifdef FP8SERVE_HAVE_sm90
  if (runs_on(chip, 90, false))
    return (inside ? grouped_sm90_inside : grouped_sm90_outside)(g, device, allocator);
#endif
#ifdef FP8SERVE_HAVE_sm100
  if (runs_on(chip, 100, FP8SERVE_HAVE_sm100 == 2))
    return (inside ? grouped_sm100_inside : grouped_sm100_outside)(g, device, allocator);
#endif
  (void)allocator;
  return false;
}

void run(const Grouped& g, const OnDevice& device, const Tensor& allocator) {
  const bool few = !g.along_k && g.total <= kSkinnyRows && !g.all.a_e5m2 && !g.all.b_e5m2;
  if (few) return grouped_skinny(g, device);
  const bool cutlass = gemm_switches.on(GemmKernel::grouped_cutlass);
  if (!cutlass || !grouped_cutlass(g, device, allocator)) grouped_mma(g, device);
}

Tensor grouped_mm(const Tensor& a_in, const Tensor& b_in, const Tensor& a_scale, const Tensor& b_scale,
                  const Tensor& offsets, const std::optional<Tensor>& bias_in, ScalarType out_dtype) {
  const DeviceContract check("grouped_mm", a_in);
  check.rank("a", a_in, 2);
  const Size t{"T", a_in.size(0)}, k{"K", a_in.size(1)};
  check.tensor("a", a_in, kFp8, {t, k});
  check.rank("b", b_in, 3);
  const Size count{"E", b_in.size(0)}, n{"N", b_in.size(1)};
  check.tensor("b", b_in, kFp8, {count, n, k});
  check.tensor("offsets", offsets, {ScalarType::Int}, {count});
  if (bias_in) check.tensor("bias", *bias_in, kHigh, {count, n});
  check_high(check, out_dtype);
  check_sizes(check, {t, n, k, count});
  const Scales a_by = scales_of_rows(check, a_scale, count, t, k),
               b_by = scales_of_weights(check, b_scale, count, n, k);
  const OnDevice device(a_in);
  const Tensor ends = dense(offsets), out = empty(a_in, {t.value(), n.value()}, out_dtype);
  if (out.numel() == 0 || count.value() == 0) return out;
  const Tensor a = k_contiguous(a_in, device), b = rows_padded(b_in, device);
  Gemm g = problem(a, b, holds_e5m2(b_in), k.value() == 0 ? Scale{} : a_by.scale,
                   k.value() == 0 ? Scale{} : b_by.scale, out);
  const Tensor bias = bias_in ? dense(*bias_in) : ends;
  if (bias_in) g.bias = bias.data_ptr(), g.bias_type = number_of(bias.scalar_type());
  run({g, data<const int32_t>(ends), static_cast<int>(count.value()), g.m, a_by.step, b_by.step, g.k, false},
      device, out);
  return out;
}

Tensor grouped_wgrad(const Tensor& a_in, const Tensor& b_in, const Tensor& a_scale, const Tensor& b_scale,
                     const Tensor& offsets, ScalarType out_dtype) {
  const DeviceContract check("grouped_wgrad", a_in);
  check.rank("a", a_in, 2);
  check.rank("b", b_in, 2);
  check.rank("offsets", offsets, 1);
  const Size n{"N", a_in.size(0)}, t{"T", a_in.size(1)}, k{"K", b_in.size(0)}, count{"E", offsets.size(0)};
  check.tensor("a", a_in, kFp8, {n, t});
  check.tensor("b", b_in, kFp8, {k, t});
  check.tensor("offsets", offsets, {ScalarType::Int}, {count});
  check_high(check, out_dtype);
  check_sizes(check, {n, k, count, Size{"T + 16 E", t.value() + 16 * count.value()}});
  const Scales a_by = scales_of_columns(check, "a_scale_inv", a_scale, count, n),
               b_by = scales_of_columns(check, "b_scale_inv", b_scale, count, k);
  const OnDevice device(a_in);
  const Tensor ends = dense(offsets), out = empty(a_in, {count.value(), n.value(), k.value()}, out_dtype);
  if (out.numel() == 0) return out;
  Grouped g{{},
            data<const int32_t>(ends),
            static_cast<int>(count.value()),
            static_cast<int>(t.value()),
            a_by.step,
            b_by.step,
            0,
            true};
  g.stride = g.pieces(16) * 16;
  const Tensor a = padded_columns(a_in, g, device), b = padded_columns(b_in, g, device);
  g.all = problem(a, b, holds_e5m2(b), a_by.scale, b_by.scale, out);
  run(g, device, out);
  return out;
}

// --- grouped_quantize: a block for each row
// ---------------------------------------------------------------------------------------------------

template <class F, class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    cast_row(const T* x, uint8_t* q, int64_t cols, const float* scales, float* amax,
             const AmaxScratch scratch, const __grid_constant__ Grouped g) {
  after_earlier_kernels();
  __shared__ float memory[32];
  __shared__ bool last;
  const int expert = g.expert_of_row(static_cast<int>(blockIdx.x));
  const float scale = scales[expert];
  const T* from = x + blockIdx.x * cols;
  uint8_t* to = q + blockIdx.x * cols;
  float seen = 0.0f;
  for (int64_t at = static_cast<int64_t>(threadIdx.x) * kChunk; at < cols; at += kThreads * kChunk) {
    const Chunk chunk = load_chunk<kAligned>(from, at, cols);
    seen = amax_of(chunk, seen);
    store_chunk<kAligned>(encode_chunk<F>(chunk, scale), to, at, cols);
  }
  seen = block_max(seen, memory);
  if (scratch.maxima == nullptr) {
    if (threadIdx.x == 0) atomic_max_float(amax + expert, seen);
    return;
  }
  if (threadIdx.x == 0) atomic_max_float(scratch.maxima + expert, seen), last = is_last(scratch, gridDim.x);
  __syncthreads();
  if (!last) return;
  for (int e = static_cast<int>(threadIdx.x); e < g.experts; e += kThreads) {
    amax[e] = take_maximum(scratch.maxima + e);
  }
}

std::tuple<Tensor, Tensor> grouped_quantize(const Tensor& x_in, const Tensor& scale_in, const Tensor& offsets,
                                            ScalarType dtype) {
  const DeviceContract check("grouped_quantize", x_in);
  check.rank("x", x_in, 2);
  const Size t{"T", x_in.size(0)};
  check.tensor("x", x_in, kHigh, {t, {"K", x_in.size(1)}});
  check.require(is_fp8(dtype), "dtype", "is ", torch::headeronly::toString(dtype),
                ", must be Float8_e4m3fn or Float8_e5m2");
  check.rank("scale", scale_in, 1);
  const Size count{"E", scale_in.size(0)};
  check.tensor("scale", scale_in, {ScalarType::Float}, {count});
  check.tensor("offsets", offsets, {ScalarType::Int}, {count});
  check_sizes(check, {t, count});
  const OnDevice device(x_in);
  const Tensor x = dense(x_in), scale = dense(scale_in), ends = dense(offsets);
  const int64_t cols = x.size(1);
  Tensor q = empty(x, {t.value(), cols}, dtype), amax = empty(x, {count.value()}, ScalarType::Float);
  const bool empty_handed = x.numel() == 0 || count.value() == 0;
  const AmaxScratch scratch =
      empty_handed || count.value() > kMaxima ? AmaxScratch{} : amax_scratch_of(device, x);
  if (scratch.maxima == nullptr) {
    set_zero(amax.data_ptr(), sizeof(float) * static_cast<size_t>(count.value()), device.stream());
  }
  if (empty_handed) return {q, amax};
  Grouped g{{},
            data<const int32_t>(ends),
            static_cast<int>(count.value()),
            static_cast<int>(t.value()),
            {},
            {},
            0,
            false};
  const bool fast = aligned(x.data_ptr(), 16) && cols % kChunk == 0;
  with_format(dtype, [&](auto fmt) {
    with_element(x.scalar_type(), [&](auto elem) {
      using F = typename decltype(fmt)::type;
      using T = typename decltype(elem)::type;
      launch_early(fast ? cast_row<F, T, true> : cast_row<F, T, false>, static_cast<unsigned>(t.value()),
                   kThreads, 0, device.stream(), data<T>(x), data<uint8_t>(q), cols, data<float>(scale),
                   data<float>(amax), scratch, g);
    });
  });
  return {q, amax};
}

}  // namespace
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(FP8SERVE_OPS, FP8SERVE_DEVICE_KEY, m) {
  m.impl("grouped_mm", TORCH_BOX(&fp8serve::grouped_mm));
  m.impl("grouped_wgrad", TORCH_BOX(&fp8serve::grouped_wgrad));
  m.impl("grouped_quantize", TORCH_BOX(&fp8serve::grouped_quantize));
}
