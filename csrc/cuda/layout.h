// Operands as the GEMM kernels read them.
#pragma once

#include "cuda/tensors.h"

namespace fp8serve {

// FP8 data [rows, k] as [rows, k padded to 16] with k contiguous and rows 16-byte aligned, zeros in the
// padding. The tensor itself where it already is so; a transposed view (the backward pass) is transposed by
// one kernel.
Tensor k_contiguous(const Tensor& q, const OnDevice& device);

// The transpose [k, rows] of contiguous FP8 data [rows, k].
Tensor transposed(const Tensor& q, const OnDevice& device);

// Matrices [..., rows, k] in FP8 or BF16 as the bytes of all their rows, each padded with zeros to a multiple
// of 16: [all rows, bytes]. The tensor itself where it already is so.
Tensor rows_padded(const Tensor& matrices, const OnDevice& device);

// Scales [rows, 1]: the tensor itself, or its only number repeated for every row.
Tensor scales_of_rows(const Tensor& scale, int64_t rows, const OnDevice& device);

}  // namespace fp8serve
