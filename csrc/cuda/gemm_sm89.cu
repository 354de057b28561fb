// The GEMM that takes every product: any formats, any scales, any sizes, on every chip from Ada on.
//
// A block computes a tile of 128 x 128 with 8 warps of 64 x 32 each. cp.async copies 128-byte rows of both
// operands into three stages of shared memory. There the position of a row's 16-byte piece is its number xor
// the row's number modulo 8, so that neither the copies nor ldmatrix have bank conflicts. The 128 values of a
// row are also one scale block: the partial sums of 128 of K have registers of their own, are multiplied by
// the block scales, if there are any, and are added to the total in FP32. This keeps the sum accurate on
// chips whose tensor cores keep few bits of it. Ada and sm_120 have the FP8 instruction (SASS: QMMA). Hopper
// and sm_100 convert to FP16 first, exactly, at half the rate or less: there this kernel is the fallback.
//
// Products of experts use the same tiles: a block looks up the expert of its tile, and returns if the expert
// has no such tile.
#include "cuda/gemm_grouped.h"

namespace fp8serve {
namespace {

constexpr int kTileM = 128, kTileN = 128, kTileK = 128;  // a byte is an FP8 value
constexpr int kStages = 3;
constexpr int kThreads = 256;
static_assert(kThreads == 32 * kReportingWarps);
constexpr int kPiece = 16;                     // bytes of one asynchronous copy
constexpr int kPieces = kTileK / kPiece;       // per row
constexpr int kPanel = kTileM * kTileK;        // bytes of one operand in one stage
constexpr int kShared = kStages * 2 * kPanel;  // 96 KiB
// On sm_100 the operands are converted to FP16 in registers; unrolling four steps would need too many of
// them.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
constexpr int kStepsAtOnce = 1;
#else
constexpr int kStepsAtOnce = 4;
#endif
constexpr int kWarpM = 64, kWarpN = 32;
constexpr int kFragsM = kWarpM / 16, kFragsN = kWarpN / 8;
// Tile rows that run at the same time, so that they share columns in the second-level cache.
constexpr int kBand = 8;

__device__ __forceinline__ int swizzled(int row, int piece) {
  return row * kTileK + ((piece ^ (row & 7)) * kPiece);
}

// Copies 128 rows x 128 values of a matrix [rows, k], whose rows are `stride` bytes apart, to shared memory;
// zeros outside the matrix.
__device__ __forceinline__ void load_panel(unsigned char* panel, const uint8_t* bytes, int first, int rows,
                                           int k0, int k, int stride) {
#pragma unroll
  for (int i = 0; i < kTileM * kPieces / kThreads; ++i) {
    const int index = static_cast<int>(threadIdx.x) + i * kThreads;
    const int row = index / kPieces, piece = index % kPieces;
    const int64_t at = static_cast<int64_t>(first + row) * stride + k0 + piece * kPiece;
    const bool valid = first + row < rows && k0 + piece * kPiece < k;
    copy_async(panel + swizzled(row, piece), valid ? bytes + at : bytes, valid);
  }
}

struct Place {
  int m0, n0;          // first row and column of the block's tile in the output
  int warp_m, warp_n;  // first row and column of the warp's part in the tile
  int lane;
};

__device__ __forceinline__ Place place_at(int tile_m, int tile_n) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  return {tile_m * kTileM, tile_n * kTileN, warp % 2 * kWarpM, warp / 2 * kWarpN,
          static_cast<int>(threadIdx.x) % 32};
}

// Blocks are numbered in bands of kBand tile rows, and column by column in a band.
__device__ __forceinline__ Place place_of(const Gemm& g, int index) {
  const int tiles_m = (g.m + kTileM - 1) / kTileM, tiles_n = (g.n + kTileN - 1) / kTileN;
  const int per_band = kBand * tiles_n, band = index / per_band;
  const int height = min(kBand, tiles_m - band * kBand);
  return place_at(band * kBand + index % per_band % height, index % per_band / height);
}

using Sums = float[kFragsM][kFragsN][4];

template <Element kElement>
using Is = std::integral_constant<Element, kElement>;

template <Element kA, Element kB>
__device__ __forceinline__ void multiply(Sums& part, const unsigned char* a_panel,
                                         const unsigned char* b_panel, const Place& p) {
  const int matrix = p.lane / 8, line = p.lane % 8;
#pragma unroll kStepsAtOnce
  for (int step = 0; step < kTileK / 32; ++step) {
    uint32_t b[kFragsN][2];
#pragma unroll
    for (int j = 0; j < kFragsN; j += 2) {
      uint32_t both[4];
      const int row = p.warp_n + j * 8 + matrix / 2 * 8 + line;
      load_matrices(both, b_panel + swizzled(row, 2 * step + matrix % 2));
      b[j][0] = both[0], b[j][1] = both[1], b[j + 1][0] = both[2], b[j + 1][1] = both[3];
    }
#pragma unroll
    for (int i = 0; i < kFragsM; ++i) {
      uint32_t a[4];
      const int row = p.warp_m + i * 16 + matrix % 2 * 8 + line;
      load_matrices(a, a_panel + swizzled(row, 2 * step + matrix / 2));
#pragma unroll
      for (int j = 0; j < kFragsN; ++j) multiply_add<kA, kB>(part[i][j], a, b[j]);
    }
  }
}

// The output's row of fragment i (`half` is 1 for its elements 2 and 3), and the first of the two
// neighbouring columns of fragment j.
__device__ __forceinline__ int row_of(const Place& p, int i, int half) {
  return p.m0 + p.warp_m + i * 16 + half * 8 + p.lane / 4;
}
__device__ __forceinline__ int column_of(const Place& p, int j) {
  return p.n0 + p.warp_n + j * 8 + p.lane % 4 * 2;
}

template <bool kInside>
__device__ __forceinline__ void promote(Sums& total, const Sums& part, const Gemm& g, const Place& p,
                                        int block) {
  float by_column[kFragsN][2];
  if constexpr (kInside) {
#pragma unroll
    for (int j = 0; j < kFragsN; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) by_column[j][e] = g.b_scale.inner(column_of(p, j) + e, g.n, block);
    }
  }
#pragma unroll
  for (int i = 0; i < kFragsM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float by_row = 1.0f;
      if constexpr (kInside) by_row = g.a_scale.inner(row_of(p, i, half), g.m, block);
#pragma unroll
      for (int j = 0; j < kFragsN; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float sum = part[i][j][2 * half + e];
          total[i][j][2 * half + e] += kInside ? sum * (by_row * by_column[j][e]) : sum;
        }
      }
    }
  }
}

// Stores two neighbouring values, in one access if the row's alignment allows it. Returns the largest of
// `seen` and their magnitudes.
__device__ __forceinline__ float put_pair(const Gemm& g, int row, int column, float low, float high,
                                          float seen) {
  const int64_t at = static_cast<int64_t>(row) * g.n + column;
  if (g.n % 2 != 0 || (g.out_scale == nullptr && g.out_type != Number::bf16)) {
    seen = put(g, at, low, seen);
    return column + 1 < g.n ? put(g, at + 1, high, seen) : seen;
  }
  if (g.out_scale == nullptr) {
    static_cast<uint32_t*>(g.out)[at / 2] =
        float_to_bfloat(low) | static_cast<uint32_t>(float_to_bfloat(high)) << 16;
  } else {
    static_cast<uint16_t*>(g.out)[at / 2] = encode_output(g, low * *g.out_scale, high * *g.out_scale);
  }
  return fmaxf(seen, fmaxf(fabsf(low), fabsf(high)));
}

__device__ __forceinline__ void finish(const Sums& total, const Gemm& g, const Place& p) {
  float seen = 0.0f;
#pragma unroll
  for (int j = 0; j < kFragsN; ++j) {
    const int column = column_of(p, j);
    if (column >= g.n) continue;
    const int next = min(column + 1, g.n - 1);
    const float scale[2] = {g.b_scale.outer(column), g.b_scale.outer(next)};
    const float bias[2] = {bias_at(g, column), bias_at(g, next)};
#pragma unroll
    for (int i = 0; i < kFragsM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of(p, i, half);
        if (row >= g.m) continue;
        const float by_row = g.a_scale.outer(row);
        const float* sum = total[i][j] + 2 * half;
        seen = put_pair(g, row, column, scaled_by(sum[0], by_row, scale[0]) + bias[0],
                        scaled_by(sum[1], by_row, scale[1]) + bias[1], seen);
      }
    }
  }
  report_amax(g, seen);
}

// Computes and stores the block's tile. Rows of both operands are `stride` bytes apart.
template <Element kA, Element kB, bool kInside>
__device__ __forceinline__ void compute(const Gemm& g, const Place& p, int stride) {
  unsigned char* shared = dynamic_shared();
  const int steps = (g.k + kTileK - 1) / kTileK;
  const auto load_stage = [&](int step) {
    if (step < steps) {
      unsigned char* stage = shared + step % kStages * 2 * kPanel;
      load_panel(stage, g.a, p.m0, g.m, step * kTileK, g.k, stride);
      load_panel(stage + kPanel, g.b, p.n0, g.n, step * kTileK, g.k, stride);
    }
    copy_commit();  // also an empty group, so that the number of pending groups stays the same
  };
  for (int step = 0; step < kStages - 1; ++step) load_stage(step);
  Sums total = {};
  for (int step = 0; step < steps; ++step) {
    copy_wait<kStages - 2>();
    __syncthreads();  // this stage has arrived everywhere, and all threads are done with the next one
    load_stage(step + kStages - 1);
    const unsigned char* stage = shared + step % kStages * 2 * kPanel;
    Sums part = {};
    multiply<kA, kB>(part, stage, stage + kPanel, p);
    promote<kInside>(total, part, g, p, step);
  }
  finish(total, g, p);
}

template <Element kA, Element kB, bool kInside>
__global__ void __launch_bounds__(kThreads, 1) gemm_tile(const __grid_constant__ Gemm g) {
  compute<kA, kB, kInside>(g, place_of(g, static_cast<int>(blockIdx.x)), g.k);
}

template <Element kA, Element kB, bool kInside>
__global__ void __launch_bounds__(kThreads, 1) grouped_tile(const __grid_constant__ Grouped all) {
  const int index = static_cast<int>(blockIdx.x), tiles_n = (all.all.n + kTileN - 1) / kTileN;
  if (all.along_k) {
    const int tiles = (all.all.m + kTileM - 1) / kTileM * tiles_n;
    const Gemm g = all.of(index / tiles);
    return compute<kA, kB, kInside>(g, place_of(g, index % tiles), all.stride);
  }
  const int piece = index / tiles_n, expert = all.expert_of_piece(piece, kTileM);
  const Gemm g = all.of(expert);
  const Place p = place_at(piece - all.first_piece(expert, kTileM), index % tiles_n);
  if (p.m0 < g.m) compute<kA, kB, kInside>(g, p, all.stride);
}

// Calls multiply(Type of kA, Type of kB) for the formats of the operands.
template <class Multiply>
void with_formats(const Gemm& g, const Multiply& multiply) {
  using enum Element;
  if (g.a_e5m2) {
    g.b_e5m2 ? multiply(Is<e5m2>{}, Is<e5m2>{}) : multiply(Is<e5m2>{}, Is<e4m3>{});
  } else {
    g.b_e5m2 ? multiply(Is<e4m3>{}, Is<e5m2>{}) : multiply(Is<e4m3>{}, Is<e4m3>{});
  }
}

template <Element kA, Element kB>
void launch_gemm(const Gemm& g, const OnDevice& device) {
  const auto blocks = static_cast<unsigned>(ceil_over(g.m, kTileM) * ceil_over(g.n, kTileN));
  const bool inside = g.a_scale.inside() || g.b_scale.inside();
  launch(inside ? gemm_tile<kA, kB, true> : gemm_tile<kA, kB, false>, blocks, kThreads, kShared,
         device.stream(), g);
}

}  // namespace

void gemm_mma(const Gemm& g, const OnDevice& device) {
  with_formats(g, [&](auto a, auto b) { launch_gemm<a.value, b.value>(g, device); });
}

void grouped_mma(const Grouped& g, const OnDevice& device) {
  const int64_t rows = g.along_k ? g.experts * ceil_over(g.all.m, kTileM) : g.pieces(kTileM);
  const auto blocks = static_cast<unsigned>(rows * ceil_over(g.all.n, kTileN));
  const bool inside = g.all.a_scale.inside() || g.all.b_scale.inside();
  with_formats(g.all, [&](auto a, auto b) {
    launch(inside ? grouped_tile<a.value, b.value, true> : grouped_tile<a.value, b.value, false>, blocks,
           kThreads, kShared, device.stream(), g);
  });
}

void gemm_mma_bf16(const Gemm& g, const OnDevice& device) {
  launch_gemm<Element::bf16, Element::bf16>(g, device);
}

}  // namespace fp8serve
