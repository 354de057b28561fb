// scaled_mm through torch's dispatcher: gemm_cublaslt calls aten::_scaled_mm, which uses cuBLASLt on a GPU,
// and gemm_reference calls the reference of fp8/ops/gemm.py.
#pragma once

#include "cuda/gemm.h"
#include "cuda/gemm_switches.h"
#include "cuda/layout.h"

namespace fp8serve {

// A product as tensors: a [M, K] and b [N, K] with K contiguous and a multiple of 16.
struct Product {
  const Tensor &a, &b, &a_scale, &b_scale;
  const std::optional<Tensor>& bias;
  Tensor out;  // [M, N]
};

namespace by_torch {

using torch::stable::detail::from;

template <size_t n>
Tensor call(const char* op, const char* overload, std::array<StableIValue, n> stack) {
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Returns whether `scale` is [rows, 1] and begins at a multiple of 16 bytes, as cuBLASLt requires of a vector
// of scales. A slice, such as the scales of one expert's rows, may begin at any element.
inline bool scaled_by_rows(const Tensor& scale, int64_t rows) {
  return scale.dim() == 2 && scale.size(0) == rows && scale.size(1) == 1 && aligned(scale.data_ptr(), 16);
}

}  // namespace by_torch

// Returns the switch of cuBLASLt's kernel for this product: `cublaslt` if each operand has one scale, and
// `cublaslt_rows` if one operand or both have a scale per row. Returns nullopt for what cuBLASLt or torch
// does not take:
//
//   N is not a multiple of 16
//   the output is FP8
//   both operands are E5M2
//   there is a bias, and the output is FP32 or of another type than the bias
//   K is 0
//   an operand is not contiguous
//   an operand or the bias does not begin at a multiple of 16 bytes
//   an operand has block scales (unless there is only one block)
//   an operand has a scale per row, and the output is not BF16
//   an operand has a scale per row, and its scales do not begin at a multiple of 16 bytes
inline std::optional<GemmKernel> cublaslt_for(const Product& p) {
  const int64_t m = p.out.size(0), n = p.out.size(1);
  const ScalarType type = p.out.scalar_type();
  if (n % 16 != 0 || is_fp8(type)) return std::nullopt;
  if (p.a.scalar_type() == ScalarType::Float8_e5m2 && p.b.scalar_type() == ScalarType::Float8_e5m2)
    return std::nullopt;
  if (p.bias && (type == ScalarType::Float || p.bias->scalar_type() != type)) return std::nullopt;
  for (const Tensor* t : {&p.a, &p.b}) {
    if (t->size(1) == 0 || !t->is_contiguous() || !aligned(t->data_ptr(), 16)) return std::nullopt;
  }
  if (p.bias && !aligned(p.bias->data_ptr(), 16)) return std::nullopt;
  if (p.a_scale.numel() == 1 && p.b_scale.numel() == 1) return GemmKernel::cublaslt;
  const bool a_takes = p.a_scale.numel() == 1 || by_torch::scaled_by_rows(p.a_scale, m);
  const bool b_takes = p.b_scale.numel() == 1 || by_torch::scaled_by_rows(p.b_scale, n);
  if (a_takes && b_takes && type == ScalarType::BFloat16) return GemmKernel::cublaslt_rows;
  return std::nullopt;
}

// Writes the product to p.out, with sums in FP32 ("accurate", use_fast_accum is false) as in our own kernels.
// If torch refuses the product, its exception reaches the caller. If only one operand has a scale per row,
// the other's single scale is repeated for every row, because cuBLASLt takes vectors of scales for both
// operands or for neither.
inline void gemm_cublaslt(const Product& p, const OnDevice& device) {
  using by_torch::from;
  const Tensor b = torch::stable::transpose(p.b, 0, 1);
  const bool mixed = (p.a_scale.numel() == 1) != (p.b_scale.numel() == 1);
  const Tensor a_scale = mixed ? scales_of_rows(p.a_scale, p.out.size(0), device) : p.a_scale;
  const Tensor rows_of_b = mixed ? scales_of_rows(p.b_scale, p.out.size(1), device) : p.b_scale;
  const Tensor b_scale = rows_of_b.numel() == 1 ? rows_of_b : torch::stable::transpose(rows_of_b, 0, 1);
  by_torch::call<9>(
      "aten::_scaled_mm", "out",
      {from(p.a), from(b), from(a_scale), from(b_scale), from(p.bias), from(std::optional<Tensor>()),
       from(std::optional(p.out.scalar_type())), from(false), from(p.out)});
}

// Writes the product to p.out by the reference of fp8/ops/gemm.py, which takes every product but is slow.
inline void gemm_reference(const Product& p) {
  using by_torch::from;
  Tensor out = p.out;
  const Tensor product = by_torch::call<6>(
      "fp8serve::scaled_mm_by_reference", "",
      {from(p.a), from(p.b), from(p.a_scale), from(p.b_scale), from(p.bias), from(p.out.scalar_type())});
  torch::stable::copy_(out, product);
}

// The second half of scaled_mm_quantize if no kernel casts its own product: returns the FP32 product times
// `scale` [], cast to `dtype`, and the product's amax [].
inline std::tuple<Tensor, Tensor> quantized(const Tensor& product, const Tensor& scale, ScalarType dtype) {
  using by_torch::from;
  std::array<StableIValue, 3> stack{from(product), from(scale), from(dtype)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("fp8serve::quantize", "", stack.data(), TORCH_ABI_VERSION));
  return {torch::stable::detail::to<Tensor>(stack[0]), torch::stable::detail::to<Tensor>(stack[1])};
}

}  // namespace fp8serve
