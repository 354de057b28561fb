// Operands as the GEMM kernels read them.
#pragma once

#include "cuda/tensors.h"

namespace fp8serve {

// FP8 codes [rows, k] as [rows, k padded to 16] with k contiguous and rows 16-byte aligned, zeros in the
// padding. The tensor itself where it already is so; a transposed view (the backward pass) is transposed by
// one kernel.
Tensor k_contiguous(const Tensor& codes, const OnDevice& device);

}  // namespace fp8serve
