// Converts operands to the layouts that the GEMM kernels read.
#pragma once

#include "cuda/tensors.h"

namespace fp8serve {

// Returns FP8 data [rows, k] as [rows, k padded to a multiple of 16], with k contiguous, rows 16-byte
// aligned and zeros in the padding. Returns the tensor itself if it already has this layout. A transposed
// view (the backward pass) is transposed by one kernel.
Tensor k_contiguous(const Tensor& q, const OnDevice& device);

// Returns the transpose [k, rows] of contiguous FP8 data [rows, k].
Tensor transposed(const Tensor& q, const OnDevice& device);

// Returns matrices [..., rows, k] in FP8 or BF16 as the bytes of all their rows, each padded with zeros to
// a multiple of 16: [all rows, bytes]. Returns a contiguous tensor itself if no row needs padding.
Tensor rows_padded(const Tensor& matrices, const OnDevice& device);

// Returns scales [rows, 1]: the tensor itself, or its only number repeated for every row.
Tensor scales_of_rows(const Tensor& scale, int64_t rows, const OnDevice& device);

}  // namespace fp8serve
