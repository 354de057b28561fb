// Ops that are other ops one after the other, in one call. At decoding an op takes a few microseconds to
// call, and about ten when a layer's weights have emptied the caches: longer than its work.
//
// rms_norm_quantize_rows and silu_mul_quantize_rows are an op and the cast of its output, with a scale for
// each row or each 128 of a row. grouped_mlp is the weighted sum of the outputs of each token's experts:
// sort_by_expert, the casts, grouped_mm, silu_mul and add_weighted. It casts a token once and copies the
// bytes to the token's experts.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <optional>
#include <tuple>

#include "check.h"
#include "cpu/gemm.h"
#include "cpu/parts.h"
#include "cpu/rows.h"
#include "cpu/tensors.h"

namespace fp8serve {
namespace {

constexpr int64_t kBlock = 128;

Pair cast_rows(const Contract& check, const Tensor& x, int64_t width, bool power_2) {
  check.require(width == 0 || width == kBlock, "width", "is ", width, ", must be 0 or 128");
  return quantize_strips(x, ScalarType::Float8_e4m3fn, power_2, 1, width);
}

Pair rms_norm_quantize_rows(const Tensor& x, const Tensor& weight, double eps, int64_t width, bool power_2) {
  return cast_rows(Contract("rms_norm_quantize_rows"), rms_norm(x, weight, eps), width, power_2);
}

Pair silu_mul_quantize_rows(const Tensor& gate, const Tensor& up, int64_t width, bool power_2) {
  return cast_rows(Contract("silu_mul_quantize_rows"), silu_mul(gate, up), width, power_2);
}

// x [T, N] by `rows` int64 [R] -> [R, N].
Tensor gather_rows(const Tensor& x, const Tensor& rows) {
  const int64_t count = rows.size(0), bytes = x.size(1) * (x.scalar_type() == ScalarType::Float ? 4 : 1);
  const Tensor out = empty({count, x.size(1)}, x.scalar_type());
  parallel_rows(count, bytes, [&](int64_t r) {
    std::memcpy(data<char>(out) + r * bytes, data<const char>(x) + data<const int64_t>(rows)[r] * bytes,
                static_cast<size_t>(bytes));
  });
  return out;
}

Tensor grouped_mlp(const Tensor& x_in, const Tensor& chosen, const Tensor& weights, const Tensor& tokens,
                   const Tensor& gate_up, const Tensor& gate_up_scale,
                   const std::optional<Tensor>& gate_up_bias, const Tensor& down, const Tensor& down_scale,
                   const std::optional<Tensor>& down_bias, int64_t width, bool power_2) {
  const Contract check("grouped_mlp");
  check.rank("x", x_in, 2);
  check.rank("chosen", chosen, 2);
  check.tensor("x", x_in, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half},
               {Size{"T", chosen.size(0)}, Size{"K", x_in.size(1)}});
  const Tensor x = dense(x_in);
  const ScalarType type = x.scalar_type();
  const auto [rows, places, offsets] = sort_by_expert(chosen, tokens);
  const auto [q, scale_inv] = cast_rows(check, x, width, power_2);
  Tensor gate_and_up = gemm::grouped_mm(gather_rows(q, rows), gate_up, gather_rows(scale_inv, rows),
                                        gate_up_scale, offsets, gate_up_bias, type);
  const int64_t size = gate_and_up.size(1) / 2;
  const Tensor gated = silu_mul(torch::stable::narrow(gate_and_up, 1, 0, size),
                                torch::stable::narrow(gate_and_up, 1, size, size));
  const auto [gated_q, gated_scale_inv] = cast_rows(check, gated, width, power_2);
  const Tensor outputs =
      gemm::grouped_mm(gated_q, down, gated_scale_inv, down_scale, offsets, down_bias, type);
  return add_weighted(outputs, places, weights);
}

}  // namespace
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("rms_norm_quantize_rows", TORCH_BOX(&fp8serve::rms_norm_quantize_rows));
  fp8serve::report<fp8serve::kCasting<fp8serve::Numerics::last_bit>>("rms_norm_quantize_rows");
  m.impl("silu_mul_quantize_rows", TORCH_BOX(&fp8serve::silu_mul_quantize_rows));
  fp8serve::report<fp8serve::kCasting<fp8serve::Numerics::last_bit>>("silu_mul_quantize_rows");
  m.impl("grouped_mlp", TORCH_BOX(&fp8serve::grouped_mlp));
  fp8serve::report("grouped_mlp", fp8serve::gemm::fp8_variant);
}
