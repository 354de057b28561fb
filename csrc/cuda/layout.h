// Operands as the GEMM kernels read them.
#pragma once

#include "cuda/tensors.h"

namespace fp8serve {

// FP8 data [rows, k] as [rows, k padded to 16] with k contiguous and rows 16-byte aligned, zeros in the
// padding. The tensor itself where it already is so; a transposed view (the backward pass) is transposed by
// one kernel.
Tensor k_contiguous(const Tensor& q, const OnDevice& device);

// The same for BF16 [rows, k], as bytes: [rows, 2 k padded to 16].
Tensor k_contiguous_bf16(const Tensor& matrix, const OnDevice& device);

}  // namespace fp8serve
