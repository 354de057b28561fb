// The arithmetic of the skinny kernel (gemm_skinny.cu), which the tall kernel (gemm_tall.cu) repeats bit for
// bit:
//
//   block = sum of 128 of K, by four mma's
//   warp  = sum of the blocks w, w + W, w + 2 W, ... of K, where W warps share K
//   team  = sum of eight neighbouring warps
//   sum   = sum of the teams
//
// All sums begin with 0 and add in this order. skinny_warps() returns W.
#pragma once

#include "cuda/gemm_bf16.h"

namespace fp8serve {

constexpr int kRows = 16;   // weight rows of an mma
constexpr int kLine = 128;  // bytes of a row in a block of K
constexpr int kWarps = 8;   // of a team

// 16 weight rows x 8 tokens over 128 of K.
template <Element kElement, class Tiles, class From>
__device__ __forceinline__ void multiply(float (&part)[4], const Tiles& tiles, From& from, int group,
                                         int block) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 x = tiles.activations(from, group, half, block);
    const uint4 low = tiles.weights(half, 0), high = tiles.weights(half, 1);
    multiply_add<kElement, kElement>(part, {low.x, high.x, low.y, high.y}, {x.x, x.y});
    multiply_add<kElement, kElement>(part, {low.z, high.z, low.w, high.w}, {x.z, x.w});
  }
}

// Adds the sum of a block of K to the warp's sum. by_row: the weight row's scale in this block.
template <bool kInside>
__device__ __forceinline__ void add_block(float& total, float sum, const Gemm& g, float by_row, int token,
                                          int block) {
  total += kInside ? sum * (by_row * g.a_scale.inner(token, g.m, block)) : sum;
}

// The operands of the epilogue besides the sum.
struct EpilogueOperands {
  float a_scale, b_scale, bias, residual;
};
__device__ __forceinline__ EpilogueOperands load_epilogue_operands(const Gemm& g, int token, int column) {
  const int64_t at = static_cast<int64_t>(token) * g.n + column;
  return {g.a_scale.outer(token), g.b_scale.outer(column), bias_at(g, column),
          g.residual == nullptr ? 0.0f : load(g.residual, at, g.out_type)};
}

__device__ __forceinline__ float apply_epilogue(const Gemm& g, float sum, const EpilogueOperands& end) {
  const float product = scaled_by(sum, end.a_scale, end.b_scale) + end.bias;
  return g.residual == nullptr ? product : rounded(product, g.out_type) + end.residual;
}

}  // namespace fp8serve
