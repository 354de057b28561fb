// Products of experts: which rows and columns of the operands are whose is read on the device, so that no
// launch waits for it. grouped_mm cuts the rows of the output by expert, grouped_wgrad the sum.
#pragma once

#include "cuda/gemm_bf16.h"

namespace fp8serve {

// How far an expert's values lie from those of the first: `expert` for each expert before it, `place` for
// each of its predecessors' rows (grouped_mm) or blocks of columns (grouped_wgrad).
struct Step {
  int64_t expert = 0, place = 0;
};

// The problem of each expert, cut out of that of all.
//
// grouped_mm: `all.m` is the number of rows of all experts. grouped_wgrad (`along_k`): `all.k` is nobody's,
// and the columns of both operands lie padded: an expert's begin at padded_begin, with zeros up to the next
// multiple of 16, and are `stride` bytes from row to row.
struct Grouped {
  Gemm all;
  const int32_t* ends;  // where the rows (columns) of each expert end, in device memory
  int experts, total;   // total: rows (columns) of all experts
  Step a_scale, b_scale;
  int stride;
  bool along_k;

  // Whatever the device holds, no more than there is.
  __device__ __forceinline__ int end(int expert) const { return max(0, min(ends[expert], total)); }
  __device__ __forceinline__ int begin(int expert) const { return expert == 0 ? 0 : end(expert - 1); }

  // Pieces of `size` rows without a list of them: expert e's have the numbers from begin(e) / size + e on,
  // which are as many as it needs, or more.
  __device__ __forceinline__ int first_piece(int expert, int size) const {
    return begin(expert) / size + expert;
  }
  int pieces(int size) const { return total / size + experts; }
  __device__ __forceinline__ int expert_of_piece(int piece, int size) const {
    int low = 0, high = experts - 1;  // the last expert whose first piece is not beyond
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      first_piece(middle, size) <= piece ? void(low = middle) : void(high = middle - 1);
    }
    return low;
  }
  __device__ __forceinline__ int expert_of_row(int row) const {
    int low = 0, high = experts - 1;  // the first expert that ends beyond
    while (low < high) {
      const int middle = (low + high) / 2;
      end(middle) > row ? void(high = middle) : void(low = middle + 1);
    }
    return low;
  }
  __device__ __forceinline__ int padded_begin(int expert) const { return first_piece(expert, 16) * 16; }

  __device__ __forceinline__ Gemm of(int expert) const {
    const int from = begin(expert), rows = max(0, end(expert) - from);
    Gemm g = all;
    int64_t place = from;
    if (along_k) {
      g.k = (rows + 15) / 16 * 16;
      g.a += padded_begin(expert);
      g.b += padded_begin(expert);
      g.out = output_at(static_cast<int64_t>(expert) * g.m * g.n);
      place = blocks_before(expert);
      if (rows == 0) g.a_scale = g.b_scale = Scale{};  // an empty sum: nothing to scale
    } else {
      g.m = rows;
      g.a += static_cast<int64_t>(from) * g.k;
      g.b += static_cast<int64_t>(expert) * g.n * g.k;
      g.out = output_at(static_cast<int64_t>(from) * g.n);
    }
    if (g.a_scale.data != nullptr) g.a_scale.data += expert * a_scale.expert + place * a_scale.place;
    if (g.b_scale.data != nullptr) g.b_scale.data += expert * b_scale.expert + place * b_scale.place;
    if (g.bias != nullptr) {
      const int64_t bytes = g.bias_type == Number::fp32 ? 4 : 2;
      g.bias = static_cast<const uint8_t*>(g.bias) + static_cast<int64_t>(expert) * g.n * bytes;
    }
    return g;
  }

 private:
  __device__ __forceinline__ void* output_at(int64_t element) const {
    return static_cast<uint8_t*>(all.out) + element * (all.out_type == Number::fp32 ? 4 : 2);
  }
  __device__ __forceinline__ int blocks_before(int expert) const {
    int blocks = 0;
    if (a_scale.place == 0 && b_scale.place == 0) return blocks;  // no block scales
    for (int e = 0; e < expert; ++e) blocks += (max(0, end(e) - begin(e)) + kScaleBlock - 1) / kScaleBlock;
    return blocks;
  }
};

void grouped_mma(const Grouped& g, const OnDevice& device);
// At most kSkinnyRows rows of all experts together, E4M3 x E4M3.
void grouped_skinny(const Grouped& g, const OnDevice& device);

// CUTLASS kernels: false when the problem is not theirs.
using GroupedCutlassKernel = bool(const Grouped& g, const OnDevice& device, const Tensor& allocator);
GroupedCutlassKernel grouped_sm90_outside, grouped_sm90_inside, grouped_sm100_outside, grouped_sm100_inside;

}  // namespace fp8serve
