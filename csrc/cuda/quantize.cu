// quantize, quantize_current, quantize_rowwise, quantize_block: high precision in, FP8 and its scale out.
//
// All are bound by memory: per BF16 element 2 bytes are read and 1 is written. With a given scale, or
// scales per row (up to 32768 columns), per 1x128 or per 128x128 block, a kernel reads the tensor once: a
// row or a block stays in registers between its amax and its cast. Per-tensor current scaling needs the
// amax of the whole tensor first and reads it twice, the second time backwards, to begin with what the
// first pass left in the L2 cache. Nothing is copied to the host: each kernel computes a scale where it
// needs it.
//
// Quantized data and scales equal those of fp8/ops/casts.py bit for bit: true divisions, no fast-math, and
// an amax that ignores NaN.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cuda/casts.h"
#include "cuda/rows.h"

namespace fp8serve {
namespace {

using Pair = std::tuple<Tensor, Tensor>;

constexpr int kBlock = 128;
constexpr int kThreads = 256;
constexpr int kUnroll = 4;                          // independent loads per thread
constexpr int kTile = kThreads * kUnroll * kChunk;  // elements a block takes at a time
constexpr int kSmall = 4 * kTile;                   // elements; up to here one block casts the whole tensor

// --- one scale for the whole tensor
// ---------------------------------------------------------------------------

// Tiles are counted in 32 bits, as are the chunks of rows.h.
__device__ __forceinline__ uint32_t tiles_of(int64_t n) {
  return static_cast<uint32_t>((n + kTile - 1) / kTile);
}

// Calls use(chunk, element offset) for this thread's chunks of one tile. The loads of a full tile are
// issued before the first use.
template <bool kAligned, class T, class Use>
__device__ __forceinline__ void for_tile(const T* x, int64_t tile, int64_t n, const Use& use) {
  const int64_t begin = tile * kTile + static_cast<int64_t>(threadIdx.x) * kChunk;
  if (kAligned && (tile + 1) * kTile <= n) {
    Raw<T> raw[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) raw[i] = load_raw(x + begin + i * kThreads * kChunk);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) use(unpack(raw[i]), begin + i * kThreads * kChunk);
  } else {
#pragma unroll 1
    for (int i = 0; i < kUnroll; ++i) {
      const int64_t at = begin + i * kThreads * kChunk;
      use(load_chunk<kAligned>(x, at, n), at);
    }
  }
}

template <class F, class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    cast_amax(const T* x, uint8_t* q, int64_t rows, int64_t cols, const float* scale_in,
              const __grid_constant__ CastCounters out) {
  after_earlier_kernels();
  __shared__ float memory[32];
  const float scale = *scale_in;
  const int64_t n = rows * cols, counted = out.counted_rows(rows) * cols;
  const uint32_t tiles = tiles_of(n);
  const auto for_chunks_here = [&](const auto& use) {
    for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) for_tile<kAligned>(x, tile, n, use);
  };
  float seen = 0.0f;
  for_chunks_here([&](const Chunk& chunk, int64_t at) {
    seen = amax_of(chunk, seen, counted - at);
    store_chunk<kAligned>(encode_chunk<F>(chunk, scale), q, at, n);
  });
  report_cast<F>(out, seen, scale, memory, [&] {
    unsigned num_saturated = 0;
    for_chunks_here(
        [&](const Chunk& chunk, int64_t at) { num_saturated += cut_off<F>(chunk, scale, counted - at); });
    return num_saturated;
  });
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    find_amax(const T* x, int64_t n, const __grid_constant__ CastCounters out) {
  after_earlier_kernels();
  __shared__ float memory[32];
  float seen = 0.0f;
  const uint32_t tiles = tiles_of(n);
  for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    for_tile<kAligned>(x, tile, n, [&](const Chunk& chunk, int64_t) { seen = amax_of(chunk, seen); });
  }
  seen = block_max(seen, memory);
  if (threadIdx.x == 0) report_amax(out, seen);
}

template <class F, class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    cast_by_amax(const T* x, uint8_t* q, int64_t n, const float* amax, float* scale_inv, bool power_2,
                 bool infinity_is_nan) {
  after_earlier_kernels();
  const float scale = scale_for(*amax, F::max(), power_2);
  if (blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = inverse_of(scale, *amax, infinity_is_nan);
  const uint32_t tiles = tiles_of(n);
  for (uint32_t done = blockIdx.x; done < tiles; done += gridDim.x) {  // backwards: L2 has the last tiles
    for_tile<kAligned>(x, tiles - 1 - done, n, [&](const Chunk& chunk, int64_t at) {
      store_chunk<kAligned>(encode_chunk<F>(chunk, scale), q, at, n);
    });
  }
}

// --- one scale per row
// ----------------------------------------------------------------------------------------

// One block per row. The row stays in registers, kChunks chunks per thread.
template <class F, class T, bool kAligned, int kChunks>
__global__ void __launch_bounds__(1024)
    quantize_row(const T* x, uint8_t* q, int64_t cols, float* scale_inv, bool power_2, bool infinity_is_nan) {
  after_earlier_kernels();
  __shared__ float memory[32];
  const T* from = x + blockIdx.x * cols;
  uint8_t* to = q + blockIdx.x * cols;
  Chunk chunk[kChunks];
  float seen = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    chunk[i] =
        load_chunk<kAligned>(from, (static_cast<int64_t>(i) * blockDim.x + threadIdx.x) * kChunk, cols);
  }
#pragma unroll
  for (int i = 0; i < kChunks; ++i) seen = amax_of(chunk[i], seen);
  const float amax = block_max(seen, memory), scale = scale_for(amax, F::max(), power_2);
  if (threadIdx.x == 0) scale_inv[blockIdx.x] = inverse_of(scale, amax, infinity_is_nan);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    store_chunk<kAligned>(encode_chunk<F>(chunk[i], scale), to,
                          (static_cast<int64_t>(i) * blockDim.x + threadIdx.x) * kChunk, cols);
  }
}

// Rows that are too long for registers are read twice.
template <class F, class T, bool kAligned>
__global__ void __launch_bounds__(1024)
    quantize_long_row(const T* x, uint8_t* q, int64_t cols, float* scale_inv, bool power_2,
                      bool infinity_is_nan) {
  after_earlier_kernels();
  __shared__ float memory[32];
  const T* from = x + blockIdx.x * cols;
  uint8_t* to = q + blockIdx.x * cols;
  float seen = 0.0f;
  for_chunks(cols, [&](int64_t at) { seen = amax_of(load_chunk<kAligned>(from, at, cols), seen); });
  const float amax = block_max(seen, memory), scale = scale_for(amax, F::max(), power_2);
  if (threadIdx.x == 0) scale_inv[blockIdx.x] = inverse_of(scale, amax, infinity_is_nan);
  for_chunks(cols, [&](int64_t at) {
    store_chunk<kAligned>(encode_chunk<F>(load_chunk<kAligned>(from, at, cols), scale), to, at, cols);
  });
}

// --- one scale per block
// --------------------------------------------------------------------------------------

// 16 lanes handle a segment of 128 columns; each thread works on kUnroll segments at once.
template <class F, class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    quantize_segments(const T* x, uint8_t* q, int64_t rows, int64_t cols, float* scale_inv, bool power_2,
                      bool infinity_is_nan) {
  after_earlier_kernels();
  constexpr int kLanes = kBlock / kChunk, kGroups = kThreads / kLanes;
  const auto per_row = static_cast<uint32_t>((cols + kBlock - 1) / kBlock);
  const int lane = threadIdx.x % kLanes;
  const Steps first(blockIdx.x * kGroups * kUnroll + threadIdx.x / kLanes, kGroups, per_row);
  const auto element = [&](const Steps& of) {
    return static_cast<int64_t>(of.column()) * kBlock + lane * kChunk;
  };
  Chunk chunk[kUnroll];
  Steps segment = first;
#pragma unroll
  for (int i = 0; i < kUnroll; ++i, segment.next()) {
    chunk[i] =
        load_chunk<kAligned>(x + segment.row() * cols, segment.row() < rows ? element(segment) : cols, cols);
  }
  segment = first;
#pragma unroll
  for (int i = 0; i < kUnroll; ++i, segment.next()) {
    const float amax = lanes_max<kLanes>(amax_of(chunk[i], 0.0f)), scale = scale_for(amax, F::max(), power_2);
    if (segment.row() >= rows) continue;
    if (lane == 0) {
      scale_inv[segment.row() * per_row + segment.column()] = inverse_of(scale, amax, infinity_is_nan);
    }
    store_chunk<kAligned>(encode_chunk<F>(chunk[i], scale), q + segment.row() * cols, element(segment), cols);
  }
}

// One block per 128 x 128 square. The square stays in registers, 8 chunks per thread.
template <class F, class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    quantize_square(const T* x, uint8_t* q, int64_t rows, int64_t cols, float* scale_inv, bool power_2,
                    bool infinity_is_nan) {
  after_earlier_kernels();
  __shared__ float memory[32];
  constexpr int kLanes = kBlock / kChunk, kRows = kThreads / kLanes, kPasses = kBlock / kRows;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x % kLanes * kChunk;
  const int64_t top = static_cast<int64_t>(blockIdx.y) * kBlock + threadIdx.x / kLanes;
  Chunk chunk[kPasses];
  float seen = 0.0f;
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int64_t row = top + i * kRows;
    chunk[i] = load_chunk<kAligned>(x + row * cols, row < rows ? at : cols, cols);
  }
#pragma unroll
  for (int i = 0; i < kPasses; ++i) seen = amax_of(chunk[i], seen);
  const float amax = block_max(seen, memory), scale = scale_for(amax, F::max(), power_2);
  if (threadIdx.x == 0) {
    scale_inv[static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x] =
        inverse_of(scale, amax, infinity_is_nan);
  }
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int64_t row = top + i * kRows;
    if (row < rows) store_chunk<kAligned>(encode_chunk<F>(chunk[i], scale), q + row * cols, at, cols);
  }
}

// --- ops
// --------------------------------------------------------------------------------------------------------

Tensor input(const DeviceContract& check, const Tensor& x, ScalarType dtype) {
  check.here("x", x);
  check.dtype("x", x, kHigh);
  check.require(is_fp8(dtype), "dtype", "is ", torch::headeronly::toString(dtype),
                ", must be Float8_e4m3fn or Float8_e5m2");
  return dense(x);
}

// Calls f(Type<Format>, Type<Element>, true_type if rows of `cols` elements may be read 16 bytes at a time).
template <class F>
void with_types(ScalarType format, const Tensor& x, int64_t cols, const F& f) {
  const bool fast = aligned(x.data_ptr(), 16) && cols % kChunk == 0;
  with_format(format, [&](auto fmt) {
    with_element(x.scalar_type(),
                 [&](auto elem) { fast ? f(fmt, elem, std::true_type{}) : f(fmt, elem, std::false_type{}); });
  });
}

// Returns the number of blocks for a pass over n elements: one for small tensors, else several times as
// many as are resident at once, so that they do not all read, and then all write, at the same time.
int blocks_for(int64_t n, const OnDevice& device) {
  if (n <= kSmall) return 1;
  return static_cast<int>(std::min<int64_t>(ceil_over(n, kTile), 32 * device.multiprocessors()));
}

Tensor quantized_like(const Tensor& x, ScalarType dtype) {
  return torch::stable::new_empty(x, x.sizes(), dtype);
}

Pair quantize(const Tensor& x_in, const Tensor& scale, ScalarType dtype) {
  const DeviceContract check("quantize", x_in);
  const Tensor x = input(check, x_in, dtype);
  check.tensor("scale", scale, {ScalarType::Float}, {});
  const OnDevice device(x);
  Tensor q = quantized_like(x, dtype), amax = empty(x, {}, ScalarType::Float);
  cast_plain(x, scale, q, {data<float>(amax), true}, device);
  return {q, amax};
}

Pair quantize_current(const Tensor& x_in, ScalarType dtype, bool power_2, bool infinity_is_nan) {
  const DeviceContract check("quantize_current", x_in);
  const Tensor x = input(check, x_in, dtype);
  const OnDevice device(x);
  const int64_t n = x.numel();
  Tensor q = quantized_like(x, dtype), scale_inv = empty(x, {}, ScalarType::Float);
  const Tensor amax = empty(x, {}, ScalarType::Float);
  const int blocks = blocks_for(n, device);
  const CastCounters out = prepared({data<float>(amax), true}, blocks, device, x);
  with_types(dtype, x, n, [&](auto fmt, auto elem, auto fast) {
    using F = typename decltype(fmt)::type;
    using T = typename decltype(elem)::type;
    launch_early(find_amax<T, fast.value>, blocks, kThreads, 0, device.stream(), data<T>(x), n, out);
    launch_early(cast_by_amax<F, T, fast.value>, blocks, kThreads, 0, device.stream(), data<T>(x),
                 data<uint8_t>(q), n, data<float>(amax), data<float>(scale_inv), power_2, infinity_is_nan);
  });
  return {q, scale_inv};
}

// Returns the threads of a block for a row of `chunks` chunks, `each` per thread.
int row_threads(int64_t chunks, int each) {
  return static_cast<int>(std::clamp<int64_t>(ceil_over(ceil_over(chunks, each), 32) * 32, 32, 1024));
}

template <class F, class T, bool kAligned>
void quantize_rows(const Tensor& x, const Tensor& q, const Tensor& scale_inv, bool power_2,
                   bool infinity_is_nan, Stream stream) {
  const int64_t cols = x.size(1), chunks = ceil_over(cols, kChunk);
  const auto rows = static_cast<unsigned>(x.size(0));
  const auto run = [&](auto kernel, int each) {
    launch_early(kernel, rows, row_threads(chunks, each), 0, stream, data<T>(x), data<uint8_t>(q), cols,
                 data<float>(scale_inv), power_2, infinity_is_nan);
  };
  if (chunks <= 128) return run(quantize_row<F, T, kAligned, 1>, 1);
  if (chunks <= 512) return run(quantize_row<F, T, kAligned, 2>, 2);
  if (chunks <= 4096) return run(quantize_row<F, T, kAligned, 4>, 4);
  run(quantize_long_row<F, T, kAligned>, 1);
}

Pair quantize_rowwise(const Tensor& x_in, ScalarType dtype, bool power_2, bool infinity_is_nan) {
  const DeviceContract check("quantize_rowwise", x_in);
  const Tensor x = input(check, x_in, dtype);
  check.rank("x", x, 2);
  const OnDevice device(x);
  Tensor q = quantized_like(x, dtype), scale_inv = empty(x, {x.size(0), 1}, ScalarType::Float);
  if (x.size(0) == 0) return {q, scale_inv};
  with_types(dtype, x, x.size(1), [&](auto fmt, auto elem, auto fast) {
    quantize_rows<typename decltype(fmt)::type, typename decltype(elem)::type, fast.value>(
        x, q, scale_inv, power_2, infinity_is_nan, device.stream());
  });
  return {q, scale_inv};
}

Pair quantize_block(const Tensor& x_in, ScalarType dtype, int64_t block_rows, bool power_2,
                    bool infinity_is_nan) {
  const DeviceContract check("quantize_block", x_in);
  const Tensor x = input(check, x_in, dtype);
  check.rank("x", x, 2);
  check.require(block_rows == 1 || block_rows == kBlock, "block_rows", "is ", block_rows,
                ", must be 1 or 128");
  const OnDevice device(x);
  const int64_t rows = x.size(0), cols = x.size(1), across = ceil_over(cols, kBlock);
  Tensor q = quantized_like(x, dtype);
  Tensor scale_inv = empty(x, {ceil_over(rows, block_rows), across}, ScalarType::Float);
  if (x.numel() == 0) return {q, scale_inv};
  with_types(dtype, x, cols, [&](auto fmt, auto elem, auto fast) {
    using F = typename decltype(fmt)::type;
    using T = typename decltype(elem)::type;
    const auto run = [&](auto kernel, dim3 grid) {
      launch_early(kernel, grid, kThreads, 0, device.stream(), data<T>(x), data<uint8_t>(q), rows, cols,
                   data<float>(scale_inv), power_2, infinity_is_nan);
    };
    constexpr int kPerBlock = kThreads / (kBlock / kChunk) * kUnroll;
    if (block_rows == 1) {
      run(quantize_segments<F, T, fast.value>,
          dim3(static_cast<unsigned>(ceil_over(rows * across, kPerBlock))));
    } else {
      run(quantize_square<F, T, fast.value>,
          dim3(static_cast<unsigned>(across), static_cast<unsigned>(ceil_over(rows, kBlock))));
    }
  });
  return {q, scale_inv};
}

}  // namespace

void cast_plain(const Tensor& x_in, const Tensor& scale, const Tensor& q,
                const CastCounters& requested_counters, const OnDevice& device) {
  const Tensor x = dense(x_in);
  const int64_t n = x.numel(), rows = x.dim() == 2 ? x.size(0) : 1, cols = rows == 0 ? 0 : n / rows;
  const int blocks = blocks_for(n, device);
  const CastCounters out = prepared(requested_counters, blocks, device, x);
  with_types(q.scalar_type(), x, n, [&](auto fmt, auto elem, auto fast) {
    using F = typename decltype(fmt)::type;
    using T = typename decltype(elem)::type;
    launch_early(cast_amax<F, T, fast.value>, blocks, kThreads, 0, device.stream(), data<T>(x),
                 data<uint8_t>(q), rows, cols, data<float>(scale), out);
  });
}

}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(FP8SERVE_OPS, FP8SERVE_DEVICE_KEY, m) {
  m.impl("quantize", TORCH_BOX(&fp8serve::quantize));
  m.impl("quantize_current", TORCH_BOX(&fp8serve::quantize_current));
  m.impl("quantize_rowwise", TORCH_BOX(&fp8serve::quantize_rowwise));
  m.impl("quantize_block", TORCH_BOX(&fp8serve::quantize_block));
}
