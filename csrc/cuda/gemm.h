// The arguments of a GEMM, and the kernels that compute it:
//
//   product[m][n] = (sum over k of a[m][k] b[n][k]) * a_scale[m] * b_scale[n] + bias[n]
//
// `scaled_by` multiplies by the two scales without leaving FP32's range in between. Block scales apply inside
// the sum instead, one per 128 of k. The output is one of
//
//   out = product
//   out = residual + product, where the product is rounded to the output's type before the addition
//   out = saturate(product * out_scale) in FP8, and amax = max |product|
//
// Kernels: gemm_sm89.cu takes every problem on every chip (mma.sync). gemm_skinny.cu takes up to 64 rows
// (decoding), and gemm_tall.cu adds in its order for any number of rows. gemm_sm90.cu, gemm_sm100.cu and
// gemm_sm120.cu take the cases for which a CUTLASS kernel is compiled and return false for all others.
// gemm.cu tries the kernels in order of speed.
#pragma once

#include "cuda/casts.h"
#include "cuda/tile_choice.h"

namespace fp8serve {

constexpr int kScaleBlock = 128;

// scale_inv of any granularity: value(row, block of K) = data[(row >> shift) * blocks + block].
struct Scale {
  const float* data = nullptr;
  int shift = 31;  // 31: one for all rows (row >> 31 is 0); 0: per row; 7: per 128 rows
  int blocks = 0;  // blocks of K per scale row when the scale acts inside the sum; 0: it acts outside

  __host__ __device__ bool inside() const { return blocks != 0; }
  // The factor of a row's partial sum over one block of K; rows past the end are read as the last one.
  __device__ __forceinline__ float inner(int row, int rows, int block) const {
    return inside() ? data[static_cast<int64_t>(min(row, rows - 1) >> shift) * blocks + block] : 1.0f;
  }
  // The factor of a row's whole sum; without data (an empty sum) there is nothing to scale.
  __device__ __forceinline__ float outer(int row) const {
    return inside() || data == nullptr ? 1.0f : data[row >> shift];
  }
  // Returns the scale of the rows from `row` on. Only for a scale per tensor or per row (shift 31 or 0).
  __device__ __forceinline__ Scale from(int row) const {
    return shift == 0 ? Scale{data + static_cast<int64_t>(row) * max(blocks, 1), shift, blocks} : *this;
  }
  __host__ __device__ bool one() const { return shift == 31 && blocks == 0; }
};

struct Gemm {
  const uint8_t *a, *b;  // [m, k] and [n, k] FP8, k contiguous, rows 16-byte aligned: k is a multiple of 16
  bool a_e5m2, b_e5m2;
  int m, n, k;
  Scale a_scale, b_scale;
  const void* bias;  // [n] or null
  Number bias_type, out_type;
  void* out;                         // [m, n]
  const void* residual = nullptr;    // [m, n] of out_type, or null; the skinny and the tall kernel add it
  const float* out_scale = nullptr;  // if set, out holds FP8, and out_type is ignored
  float* amax = nullptr;             // with out_scale: receives the largest |value|
  AmaxScratch scratch = {};          // where that is brought together; without: in *amax, which holds 0
  bool out_e5m2 = false;
  bool stored = false;  // the preceding kernel does not write b: the skinny kernel may read b while that runs
};

__device__ __forceinline__ float bias_at(const Gemm& g, int column) {
  return g.bias == nullptr ? 0.0f : load(g.bias, column, g.bias_type);
}
__device__ __forceinline__ uint16_t encode_output(const Gemm& g, float low, float high) {
  return g.out_e5m2 ? encode_pair<true>(low, high) : encode_pair<false>(low, high);
}
// Stores `value` at element `at` of the output. Returns the larger of `seen` and |value|.
__device__ __forceinline__ float put(const Gemm& g, int64_t at, float value, float seen) {
  if (g.out_scale == nullptr) {
    store(value, g.out, at, g.out_type);
  } else {
    static_cast<uint8_t*>(g.out)[at] = static_cast<uint8_t>(encode_output(g, value * *g.out_scale, 0.0f));
  }
  return fmaxf(seen, fabsf(value));
}
// Combines the threads' amax `seen`. kReportingWarps warps of every block call this once.
constexpr unsigned kReportingWarps = 8;
__device__ __forceinline__ void report_amax(const Gemm& g, float seen) {
  if (g.amax == nullptr) return;
  seen = lanes_max<32>(seen);
  if (threadIdx.x % 32 != 0) return;
  g.scratch.maxima == nullptr ? atomic_max_float(g.amax, seen)
                              : combine_amax(g.scratch, g.amax, seen, gridDim.x * kReportingWarps);
}

constexpr int kSkinnyRows = 64;

void gemm_mma(const Gemm& g, const OnDevice& device);
void gemm_skinny(const Gemm& g, const OnDevice& device);  // m <= kSkinnyRows

// Returns how many warps of a block of the skinny kernel share K, which decides the order of its sums. It
// depends on the shape of the weights and the chip alone, and in the invariant mode on K and the chip alone.
int skinny_warps(const Gemm& g, const OnDevice& device);
// Multiplies any number of rows with the sums of the skinny kernel, bit for bit. The operands are E4M3.
void gemm_tall(const Gemm& g, const OnDevice& device);

// CUTLASS kernels. They return false if no kernel is compiled for the problem and this tile, or CUTLASS
// refuses it. `outside`: scales per tensor or row; `inside`: a per 1x128, b per 1x128 or 128x128.
using CutlassKernel = bool(const Gemm& g, TileChoice choice, const OnDevice& device, const Tensor& allocator);
CutlassKernel gemm_sm90_outside, gemm_sm90_inside, gemm_sm100_outside, gemm_sm100_inside, gemm_sm120_outside,
    gemm_sm120_inside;

}  // namespace fp8serve
