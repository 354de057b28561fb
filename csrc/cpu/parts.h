// The ops that composed ops call (composed.cpp). A direct call needs no dispatch and gives the same bits.
#pragma once

#include <optional>
#include <tuple>

#include "check.h"

namespace fp8serve {

using Pair = std::tuple<Tensor, Tensor>;

// These cast with a given scale and return (q, amax).
Pair quantize(const Tensor& x, const Tensor& scale, ScalarType dtype);
Pair rms_norm_quantize(const Tensor& x, const Tensor& weight, double eps, const Tensor& scale,
                       ScalarType dtype);
Pair silu_mul_quantize(const Tensor& gate, const Tensor& up, const Tensor& scale, ScalarType dtype);

// Returns (q, scale_inv) of x [M, K], which is dense. Its rows are cut into strips of `strip_rows`, a strip
// into tiles of `width` columns with a scale each; width 0: one tile of all columns.
Pair quantize_strips(const Tensor& x, ScalarType dtype, bool power_2, int64_t strip_rows, int64_t width,
                     bool infinity_is_nan = false);

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps);
Tensor silu_mul(const Tensor& gate, const Tensor& up);

std::tuple<Tensor, Tensor, Tensor> sort_by_expert(const Tensor& chosen, const Tensor& tokens);
Tensor add_weighted(const Tensor& outputs, const Tensor& places, const Tensor& weights);

namespace gemm {

Tensor grouped_mm(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                  const Tensor& offsets, const std::optional<Tensor>& bias, ScalarType out_dtype);

}  // namespace gemm
}  // namespace fp8serve
