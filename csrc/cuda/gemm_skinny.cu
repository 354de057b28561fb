// Decoding: E4M3 activations of 1..64 rows times E4M3 weights. Bound by reading the weights once.
//
// The weights are the 16-row operand of mma.m16n8k32 and the activations its 8-column one, so 8 rows of
// activations cost as much as 1. Nothing is staged: the order of K inside an mma is free as long as both
// operands agree, so a lane takes 16 neighbouring bytes of its weight row straight into the registers of two
// mma's (with the same 16 bytes of its activation row, from the first-level cache), four such loads ahead of
// their use. 8 warps of a block share 16 weight rows and take every eighth block of 128 of K each. A matrix
// with few rows has two such teams of warps a block, so that a multiprocessor has as much to read, and K is
// split between them. The sums are added in a fixed order which depends on the weight's shape and the chip
// alone: a row's result is the same, bit for bit, whatever rows are computed with it. Scales, bias and
// residual follow in the same launch. Activations in BF16 can be cast as they are loaded, by every block
// anew, which is less work than a launch; the first block counts them.
//
// Of experts, a block takes up to 16 rows of one; it is the block of their first row.
#include "cuda/gemm_grouped.h"

namespace fp8serve {
namespace {

constexpr int kRows = 16;   // weight rows of a block
constexpr int kLine = 128;  // bytes
constexpr int kWarps = 8;   // of a team
constexpr int kThreads = 32 * kWarps, kMostTeams = 2;
static_assert(kWarps == kWarpsThatTell);  // those of the first team
constexpr int kGroupsOfExpert = 2, kRowsOfExpert = 8 * kGroupsOfExpert;

__device__ __forceinline__ uint4 sixteen(const uint8_t* bytes, bool valid) {
  return valid ? load_once(reinterpret_cast<const uint4*>(bytes)) : uint4{0, 0, 0, 0};
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

// Asks for the block's first weights, a line a thread, before it is known whether the activations are there.
__device__ __forceinline__ void expect_weights(const Gemm& g) {
  const int line = static_cast<int>(threadIdx.x), row = static_cast<int>(blockIdx.x) * kRows + line % kRows;
  const int at = line / kRows * kLine;
  if (at < g.k) expect(g.b + static_cast<int64_t>(min(row, g.n - 1)) * g.k + at);
}

// Activations as they lie: sixteen bytes of a token's row.
struct AsTheyAre {
  __device__ __forceinline__ uint4 sixteen(const Gemm& g, int token, int at) {
    return *reinterpret_cast<const uint4*>(g.a + static_cast<int64_t>(token) * g.k + at);
  }
  __device__ __forceinline__ void tell() const {}
};

// Activations that are cast here.
class Casting {
 public:
  __device__ Casting(const Gemm& g, const ToCast& from)
      : from_(from), scale_(*from.scale), counted_(from.out.counted_rows(g.m)) {}
  __device__ __forceinline__ uint4 sixteen(const Gemm& g, int token, int at) {
    const BF16* row = from_.x + static_cast<int64_t>(token) * g.k;
    const Chunk low = load_chunk<true>(row, at, g.k), high = load_chunk<true>(row, at + kChunk, g.k);
    if (blockIdx.x == 0) count(low, high, token < counted_);
    const uint2 first = encode_chunk<E4M3>(low, scale_), second = encode_chunk<E4M3>(high, scale_);
    return {first.x, first.y, second.x, second.y};
  }
  // Whole warps call this, once.
  __device__ __forceinline__ void tell() const {
    if (blockIdx.x != 0) return;
    const float seen = lanes_max<32>(seen_);
    if (threadIdx.x % 32 == 0) raise(from_.out.amax, seen);
    if (is_cut_off<E4M3>(seen * scale_)) add_cut_off(from_.out, found_);
  }

 private:
  __device__ __forceinline__ void count(const Chunk& low, const Chunk& high, bool counted) {
    const float most = amax_of(high, amax_of(low, 0.0f));
    seen_ = fmaxf(seen_, most);
    if (counted && is_cut_off<E4M3>(most * scale_)) {
      found_ += cut_off<E4M3>(low, scale_) + cut_off<E4M3>(high, scale_);
    }
  }
  const ToCast& from_;
  float scale_, seen_ = 0.0f;
  int64_t counted_;
  unsigned found_ = 0;
};

// 16 weight rows x 8 tokens over 128 of K.
template <Element kElement, class From>
__device__ __forceinline__ void multiply(float (&part)[4], const Weights& w, const Gemm& g, From& from,
                                         int token, int at) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool valid = token < g.m && at + half * 64 < g.k;
    const uint4 x = valid ? from.sixteen(g, token, at + half * 64) : uint4{0, 0, 0, 0};
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

// The sums of a team's warps, and what a thread of the first team has of the block's result: elements that
// lie kThreads apart.
template <int kGroups>  // tokens in eights
using Sums = float[kWarps][8 * kGroups][kRows];
template <int kGroups>
using Mine = float[(kGroups + 1) / 2];

// f(which, token, column of the block) for these elements.
template <int kGroups, class F>
__device__ __forceinline__ void for_mine(const F& f) {
#pragma unroll
  for (int t = 0; t < (kGroups + 1) / 2; ++t) {
    const int i = static_cast<int>(threadIdx.x) + t * kThreads;
    if (i < 8 * kGroups * kRows) f(t, i / kRows, i % kRows);
  }
}

template <int kGroups>
__device__ __forceinline__ void add_team(Mine<kGroups>& mine, const Sums<kGroups>& sums) {
  for_mine<kGroups>([&](int t, int token, int column) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += sums[w][token][column];
    mine[t] += sum;
  });
}

template <int kGroups>
__device__ __forceinline__ void finish(const Gemm& g, const Mine<kGroups>& mine, int n0) {
  float seen = 0.0f;
  for_mine<kGroups>([&](int t, int token, int of) {
    const int column = n0 + of;
    if (token >= g.m || column >= g.n) return;
    seen = put(g, static_cast<int64_t>(token) * g.n + column, finished(g, mine[t], token, column), seen);
  });
  tell_amax(g, seen);
}

template <Element kElement, int kGroups, bool kInside, class From>
__device__ __forceinline__ void compute(const Gemm& g, From from) {
  __shared__ Sums<kGroups> sums;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int n0 = static_cast<int>(blockIdx.x) * kRows, row = n0 + lane / 4, piece = lane % 4 * 16;
  const int blocks = (g.k + kScaleBlock - 1) / kScaleBlock, stride = static_cast<int>(blockDim.x) / 32;
  float total[kGroups][4] = {};
  int block = warp;
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
      multiply<kElement>(part, w, g, from, token, at);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int of = j * 8 + lane % 4 * 2 + e % 2;
        total[j][e] += kInside ? part[e] * (by_row[e / 2] * g.a_scale.inner(of, g.m, block)) : part[e];
      }
    }
  }
  from.tell();
  Mine<kGroups> mine = {};
  for (int team = 0; team < stride / kWarps; ++team) {
    if (team > 0) __syncthreads();  // the team before has been added
    if (warp / kWarps == team) {
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          sums[warp % kWarps][j * 8 + lane % 4 * 2 + e % 2][lane / 4 + e / 2 * 8] = total[j][e];
      }
    }
    __syncthreads();
    if (warp < kWarps) add_team<kGroups>(mine, sums);
  }
  if (warp < kWarps) finish<kGroups>(g, mine, n0);
}

template <Element kElement, int kGroups, bool kInside>
__global__ void __launch_bounds__(kMostTeams* kThreads) gemm_stream(const __grid_constant__ Gemm g) {
  expect_weights(g);
  after_earlier_kernels();
  compute<kElement, kGroups, kInside>(g, AsTheyAre());
}

template <int kGroups>
__global__ void __launch_bounds__(kMostTeams* kThreads)
    gemm_stream_casting(const __grid_constant__ Gemm g, const __grid_constant__ ToCast from) {
  expect_weights(g);
  after_earlier_kernels();
  compute<Element::e4m3, kGroups, false>(g, Casting(g, from));
}

template <bool kInside>
__global__ void __launch_bounds__(kMostTeams* kThreads) grouped_stream(const __grid_constant__ Grouped all) {
  after_earlier_kernels();
  const int row = static_cast<int>(blockIdx.y), expert = all.expert_of_row(row),
            before = row - all.begin(expert);
  if (before % kRowsOfExpert != 0 || before < 0 || row >= all.end(expert)) return;
  const Gemm g = from_row(all.of(expert), before);
  compute<Element::e4m3, kGroupsOfExpert, kInside>(g, AsTheyAre());
}

template <Element kElement, bool kInside>
auto kernel_for(int m) {
  if (m <= 8) return gemm_stream<kElement, 1, kInside>;
  if (m <= 16) return gemm_stream<kElement, 2, kInside>;
  return m <= 32 ? gemm_stream<kElement, 4, kInside> : gemm_stream<kElement, 8, kInside>;
}

// Threads of a block: two teams where there are fewer than three blocks a multiprocessor and K is long enough
// for both.
int threads_for(const Gemm& g, const OnDevice& device) {
  const int64_t blocks = ceil_over(g.n, kRows), steps = ceil_over(ceil_over(g.k, kScaleBlock), kWarps);
  return steps > 1 && blocks < 3 * device.multiprocessors() ? kMostTeams * kThreads : kThreads;
}

unsigned blocks_for(const Gemm& g) { return static_cast<unsigned>(ceil_over(g.n, kRows)); }

}  // namespace

void gemm_skinny(const Gemm& g, const OnDevice& device) {
  const bool inside = g.a_scale.inside() || g.b_scale.inside();
  launch_early(inside ? kernel_for<Element::e4m3, true>(g.m) : kernel_for<Element::e4m3, false>(g.m),
               blocks_for(g), threads_for(g, device), 0, device.stream(), g);
}

void gemm_skinny_casting(const Gemm& g, const ToCast& from, const OnDevice& device) {
  const auto kernel = g.m <= 8    ? gemm_stream_casting<1>
                      : g.m <= 16 ? gemm_stream_casting<2>
                      : g.m <= 32 ? gemm_stream_casting<4>
                                  : gemm_stream_casting<8>;
  launch_early(kernel, blocks_for(g), threads_for(g, device), 0, device.stream(), g, from);
}

void grouped_skinny(const Grouped& g, const OnDevice& device) {
  const bool inside = g.all.a_scale.inside() || g.all.b_scale.inside();
  launch_early(inside ? grouped_stream<true> : grouped_stream<false>,
               dim3(blocks_for(g.all), static_cast<unsigned>(g.total)), threads_for(g.all, device), 0,
               device.stream(), g);
}

void gemm_skinny_bf16(const Gemm& g, const OnDevice& device) {
  launch_early(kernel_for<Element::bf16, false>(g.m), blocks_for(g), threads_for(g, device), 0,
               device.stream(), g);
}

}  // namespace fp8serve
