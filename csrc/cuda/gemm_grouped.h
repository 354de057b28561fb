// Products of experts. The kernels read on the device which rows or columns belong to which expert, so that
// no launch waits for the host. grouped_mm divides the rows of the output among the experts, grouped_wgrad
// the dimension that is summed.
#pragma once

#include "cuda/gemm_bf16.h"

namespace fp8serve {

// The distance, in elements, of an expert's scales from those of the first expert: `expert` for each
// preceding expert, and `place` for each row (grouped_mm) or block of columns (grouped_wgrad) of preceding
// experts.
struct Step {
  int64_t expert = 0, place = 0;
};

// The products of all experts; of() returns the problem of one.
//
// grouped_mm: `all.m` is the number of rows of all experts. grouped_wgrad (`along_k`): the columns of both
// operands are padded. An expert's columns begin at padded_begin() and are followed by zeros up to the next
// multiple of 16. `all.k` is the number of all padded columns.
struct Grouped {
  Gemm all;
  const int32_t* ends;  // where the rows (columns) of each expert end, in device memory
  int experts, total;   // total: rows (columns) of all experts
  Step a_scale, b_scale;
  int stride;  // bytes from row to row of both operands
  bool along_k;

  // Where the rows (columns) of an expert end. Limited to the tensor, because the host cannot check `ends`.
  __device__ __forceinline__ int end(int expert) const { return max(0, min(ends[expert], total)); }
  __device__ __forceinline__ int begin(int expert) const { return expert == 0 ? 0 : end(expert - 1); }

  // Numbers pieces of `size` rows without a list: expert e's pieces have the numbers from begin(e) / size + e
  // to the first number of the next expert. These are at least as many as e needs.
  __device__ __forceinline__ int first_piece(int expert, int size) const {
    return begin(expert) / size + expert;
  }
  int pieces(int size) const { return total / size + experts; }
  __device__ __forceinline__ int expert_of_piece(int piece, int size) const {
    int low = 0, high = experts - 1;  // finds the last expert whose first piece is at most `piece`
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      first_piece(middle, size) <= piece ? void(low = middle) : void(high = middle - 1);
    }
    return low;
  }
  __device__ __forceinline__ int expert_of_row(int row) const {
    int low = 0, high = experts - 1;  // finds the first expert that ends after `row`
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

// CUTLASS kernels. They return false if no kernel is compiled for the problem, or CUTLASS refuses it.
using GroupedCutlassKernel = bool(const Grouped& g, const OnDevice& device, const Tensor& allocator);
GroupedCutlassKernel grouped_sm90_outside, grouped_sm90_inside, grouped_sm100_outside, grouped_sm100_inside;

}  // namespace fp8serve
