// Decoding: E4M3 activations of 1..64 rows times E4M3 weights. Bound by reading the weights once.
//
// The weights are the 16-row operand of mma.m16n8k32 and the activations its 8-column one, so 8 rows of
// activations cost as much as 1. Nothing is staged: the order of K inside an mma is free as long as both
// operands agree, so a lane takes 16 neighbouring bytes of its weight row straight into the registers of two
// mma's (with the same 16 bytes of its activation row, from the first-level cache), four such loads ahead of
// their use. 8 warps of a block share 16 weight rows and take every eighth block of 128 of K each; small
// matrices are also split over blocks along K. The sums are added in a fixed order which depends on the
// weight's shape and the chip alone: a row's result is the same, bit for bit, whatever rows are computed with
// it.
//
// Of experts, a block takes up to 16 rows of one; it is the block of their first row.
#include "cuda/gemm_grouped.h"

namespace fp8serve {
namespace {

constexpr int kRows = 16;  // weight rows of a block
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kGroupsOfExpert = 2, kRowsOfExpert = 8 * kGroupsOfExpert;

struct Split {
  int count;       // blocks along K
  int rows;        // of a partial sum
  float* partial;  // [count][rows][n] sums, or null if count is 1
};

__device__ __forceinline__ uint4 sixteen(const uint8_t* bytes, bool valid) {
  return valid ? load_once(reinterpret_cast<const uint4*>(bytes)) : uint4{0, 0, 0, 0};
}
__device__ __forceinline__ uint4 sixteen_cached(const uint8_t* bytes, bool valid) {
  return valid ? *reinterpret_cast<const uint4*>(bytes) : uint4{0, 0, 0, 0};
}

struct Weights {
  uint4 low[2], high[2];  // 64-byte halves of rows g and g + 8
};

__device__ __forceinline__ Weights load_weights(const Gemm& g, int row, int at) {
  Weights w;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int k = at + half * 64;
    w.low[half] = sixteen(g.b + static_cast<int64_t>(min(row, g.n - 1)) * g.k + k, k < g.k);
    w.high[half] = sixteen(g.b + static_cast<int64_t>(min(row + 8, g.n - 1)) * g.k + k, k < g.k);
  }
  return w;
}

// 16 weight rows x 8 tokens over 128 of K.
template <Element kElement>
__device__ __forceinline__ void multiply(float (&part)[4], const Weights& w, const uint8_t* token, int at,
                                         int k, bool valid) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 x = sixteen_cached(token + half * 64, valid && at + half * 64 < k);
    const uint4 low = w.low[half], high = w.high[half];
    multiply_add<kElement, kElement>(part, {low.x, high.x, low.y, high.y}, {x.x, x.y});
    multiply_add<kElement, kElement>(part, {low.z, high.z, low.w, high.w}, {x.z, x.w});
  }
}

__device__ __forceinline__ float finished(const Gemm& g, float sum, int token, int column) {
  return scaled_by(sum, g.a_scale.outer(token), g.b_scale.outer(column)) + bias_at(g, column);
}

// At most kRowsOfExpert of an expert's rows, from this one on.
__device__ __forceinline__ Gemm from_row(Gemm g, int row) {
  g.m = min(g.m - row, kRowsOfExpert);
  g.a += static_cast<int64_t>(row) * g.k;
  g.out =
      static_cast<uint8_t*>(g.out) + static_cast<int64_t>(row) * g.n * (g.out_type == Number::fp32 ? 4 : 2);
  g.a_scale = g.a_scale.from(row);
  return g;
}

template <Element kElement, int kGroups, bool kInside>  // kGroups: tokens in eights
__device__ __forceinline__ void compute(const Gemm& g, const Split& split) {
  __shared__ float sums[kWarps][8 * kGroups][kRows];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int n0 = static_cast<int>(blockIdx.x) * kRows, row = n0 + lane / 4, piece = lane % 4 * 16;
  const int blocks = (g.k + kScaleBlock - 1) / kScaleBlock, stride = kWarps * split.count;
  float total[kGroups][4] = {};
  int block = static_cast<int>(blockIdx.y) * kWarps + warp;
  Weights next = load_weights(g, row, block * kScaleBlock + piece);
  for (; block < blocks; block += stride) {
    const Weights w = next;
    const int at = block * kScaleBlock + piece;
    next = load_weights(g, row, at + stride * kScaleBlock);
    float by_row[2] = {1.0f, 1.0f};
    if constexpr (kInside) {
      by_row[0] = g.b_scale.inner(row, g.n, block);
      by_row[1] = g.b_scale.inner(row + 8, g.n, block);
    }
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const int token = j * 8 + lane / 4;
      float part[4] = {};
      multiply<kElement>(part, w, g.a + static_cast<int64_t>(min(token, g.m - 1)) * g.k + at, at, g.k,
                         token < g.m);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int of = j * 8 + lane % 4 * 2 + e % 2;
        total[j][e] += kInside ? part[e] * (by_row[e / 2] * g.a_scale.inner(of, g.m, block)) : part[e];
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[warp][j * 8 + lane % 4 * 2 + e % 2][lane / 4 + e / 2 * 8] = total[j][e];
  }
  __syncthreads();
  float seen = 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < 8 * kGroups * kRows; i += kThreads) {
    const int token = i / kRows, column = n0 + i % kRows;
    if (token >= g.m || column >= g.n) continue;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += sums[w][token][i % kRows];
    if (split.partial == nullptr) {
      seen = put(g, static_cast<int64_t>(token) * g.n + column, finished(g, sum, token, column), seen);
    } else {
      split.partial[(static_cast<int64_t>(blockIdx.y) * split.rows + token) * g.n + column] = sum;
    }
  }
  if (split.partial == nullptr) raise_amax(g, seen);
}

template <Element kElement, int kGroups, bool kInside>
__global__ void __launch_bounds__(kThreads)
    gemm_stream(const __grid_constant__ Gemm g, const __grid_constant__ Split split) {
  compute<kElement, kGroups, kInside>(g, split);
}

template <bool kInside>
__global__ void __launch_bounds__(kThreads)
    grouped_stream(const __grid_constant__ Grouped all, const __grid_constant__ Split split) {
  const int row = static_cast<int>(blockIdx.z), expert = all.expert_of_row(row),
            before = row - all.begin(expert);
  if (before % kRowsOfExpert != 0 || before < 0 || row >= all.end(expert)) return;
  Split own = split;
  if (own.partial != nullptr) own.partial += static_cast<int64_t>(row) * all.all.n;
  compute<Element::e4m3, kGroupsOfExpert, kInside>(from_row(all.of(expert), before), own);
}

__global__ void __launch_bounds__(kThreads)
    add_grouped_splits(const __grid_constant__ Grouped all, const __grid_constant__ Split split) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t count = static_cast<int64_t>(split.rows) * all.all.n;
  if (at >= count) return;
  const int row = static_cast<int>(at / all.all.n), expert = all.expert_of_row(row);
  const int token = row - all.begin(expert), column = static_cast<int>(at % all.all.n);
  if (token < 0 || row >= all.end(expert)) return;
  const Gemm g = all.of(expert);
  float sum = 0.0f;
  for (int i = 0; i < split.count; ++i) sum += split.partial[i * count + at];
  put(g, static_cast<int64_t>(token) * g.n + column, finished(g, sum, token, column), 0.0f);
}

__global__ void __launch_bounds__(kThreads)
    add_splits(const __grid_constant__ Gemm g, const __grid_constant__ Split split) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t count = static_cast<int64_t>(g.m) * g.n;
  float seen = 0.0f;
  if (at < count) {
    float sum = 0.0f;
    for (int i = 0; i < split.count; ++i) sum += split.partial[i * count + at];
    seen = put(g, at, finished(g, sum, static_cast<int>(at / g.n), static_cast<int>(at % g.n)), seen);
  }
  raise_amax(g, seen);
}

template <Element kElement, bool kInside>
auto kernel_for(int m) {
  if (m <= 8) return gemm_stream<kElement, 1, kInside>;
  if (m <= 16) return gemm_stream<kElement, 2, kInside>;
  return m <= 32 ? gemm_stream<kElement, 4, kInside> : gemm_stream<kElement, 8, kInside>;
}

// Blocks along K so that every multiprocessor has about three, each with at least one step for every warp.
int splits_for(const Gemm& g, const OnDevice& device) {
  const int64_t across = ceil_over(g.n, kRows), steps = ceil_over(ceil_over(g.k, kScaleBlock), kWarps);
  const int64_t wanted = ceil_over(3 * device.multiprocessors(), across);
  return static_cast<int>(std::clamp<int64_t>(wanted, 1, std::clamp<int64_t>(steps, 1, 8)));
}

// Calls launch_with(split, grid, blocks that add up the splits) for sums of `rows` rows.
template <class Launch>
void with_splits(const Gemm& g, int rows, const OnDevice& device, const Tensor& allocator,
                 const Launch& launch_with) {
  Split split{splits_for(g, device), rows, nullptr};
  const int64_t held = split.count > 1 ? static_cast<int64_t>(split.count) * rows * g.n : 0;
  const Tensor partial = empty(allocator, {held}, ScalarType::Float);
  if (split.count > 1) split.partial = data<float>(partial);
  launch_with(split, dim3(static_cast<unsigned>(ceil_over(g.n, kRows)), static_cast<unsigned>(split.count)),
              static_cast<unsigned>(ceil_over(static_cast<int64_t>(rows) * g.n, kThreads)));
}

template <class Kernel>
void run(Kernel kernel, const Gemm& g, const OnDevice& device, const Tensor& allocator) {
  with_splits(g, g.m, device, allocator, [&](const Split& split, dim3 grid, unsigned blocks_to_add) {
    launch(kernel, grid, kThreads, 0, device.stream(), g, split);
    if (split.count > 1) launch(add_splits, blocks_to_add, kThreads, 0, device.stream(), g, split);
  });
}

}  // namespace

void gemm_skinny(const Gemm& g, const OnDevice& device, const Tensor& allocator) {
  const bool inside = g.a_scale.inside() || g.b_scale.inside();
  run(inside ? kernel_for<Element::e4m3, true>(g.m) : kernel_for<Element::e4m3, false>(g.m), g, device,
      allocator);
}

void grouped_skinny(const Grouped& g, const OnDevice& device, const Tensor& allocator) {
  const bool inside = g.all.a_scale.inside() || g.all.b_scale.inside();
  with_splits(g.all, g.total, device, allocator, [&](const Split& split, dim3 grid, unsigned blocks_to_add) {
    grid.z = static_cast<unsigned>(g.total);
    launch(inside ? grouped_stream<true> : grouped_stream<false>, grid, kThreads, 0, device.stream(), g,
           split);
    if (split.count > 1) launch(add_grouped_splits, blocks_to_add, kThreads, 0, device.stream(), g, split);
  });
}

void gemm_skinny_bf16(const Gemm& g, const OnDevice& device, const Tensor& allocator) {
  run(kernel_for<Element::bf16, false>(g.m), g, device, allocator);
}

}  // namespace fp8serve
