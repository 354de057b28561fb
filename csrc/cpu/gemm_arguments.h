// The arguments of GEMM ops: types, scales of any granularity, and scales that are very large or very small.
#pragma once

#include "check.h"
#include "cpu/gemm_run.h"
#include "cpu/mx.h"
#include "cpu/tensors.h"

namespace fp8serve::gemm {

inline constexpr auto kHigh = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
inline constexpr auto kFp8 = {ScalarType::Float8_e4m3fn, ScalarType::Float8_e5m2};
inline constexpr auto kBf16 = {ScalarType::BFloat16};
inline constexpr auto kFp8OrBf16 = {ScalarType::Float8_e4m3fn, ScalarType::Float8_e5m2, ScalarType::BFloat16};

inline Kind kind_of(const Tensor& x) {
  if (x.scalar_type() == ScalarType::BFloat16) return Kind::bf16;
  return x.scalar_type() == ScalarType::Float8_e5m2 ? Kind::e5m2 : Kind::e4m3;
}

inline void attach_scale(const Contract& check, const char* name, const Tensor& scale, Size rows, Size k,
                         Operand& out) {
  check.cpu(name, scale);
  check.dtype(name, scale, {ScalarType::Float});
  out.scale = data<const float>(scale);
  out.scale_rows = std::max<int64_t>(rows.value(), 1);
  if (scale.numel() == 1 && (scale.dim() == 0 || scale.dim() == 2)) return;
  check.rank(name, scale, 2);
  const Size tiles = ceil_div(rows, kScaleBlock), blocks = ceil_div(k, kScaleBlock);
  const bool by_row = scale.size(0) == rows.value();
  if (!by_row) check.shape(name, scale, {tiles, blocks});
  if (by_row && scale.size(1) != 1) check.shape(name, scale, {rows, blocks});
  out.scale_rows = by_row ? 1 : kScaleBlock;
  out.scale_blocks = by_row && scale.size(1) == 1 ? 0 : blocks.value();
}

inline bool is_mx(const Tensor& scale) { return scale.scalar_type() == ScalarType::Float8_e8m0fnu; }

// Checks that a matrix of this kind may be in MX blocks, whose scales are E8M0.
inline void check_mx(const Contract& check, const char* name, Kind kind, bool packed, Size k) {
  check.require(kind != Kind::bf16, name, "is E8M0 beside values in BF16");
  check.require(!packed || k.value() % kMxBlock == 0, name, "is E8M0 beside a packed matrix with rows of ",
                k.value(), " values, must be a multiple of 32");
}

// If one operand is in MX blocks, the FP32 scales of the other one must be per tensor or per row, so that
// they can be applied after the sum.
inline void check_beside_mx(const Contract& check, const char* name, int64_t scale_blocks,
                            const char* shapes) {
  check.require(scale_blocks == 0, name, "has blocks of 128, must be E8M0 or FP32 ", shapes);
}

// Like attach_scale, for a matrix that may be in MX blocks. `row_scales` receives what is computed from its
// scales.
inline void attach_mx_scale(const Contract& check, const char* name, const Tensor& scale, Size rows, Size k,
                            Operand& out, RowScales& row_scales) {
  if (!is_mx(scale)) {
    attach_scale(check, name, scale, rows, k, out);
    return check_beside_mx(check, name, out.scale_blocks, "[] or [rows, 1]");
  }
  check.cpu(name, scale);
  const Size blocks = ceil_div(k, kMxBlock);
  check.shape(name, scale, {rows, blocks});
  check_mx(check, name, out.kind, out.packed, k);
  out.mx_codes = data<const uint8_t>(scale);
  out.mx_blocks = blocks.value();
  compute_row_scales(out.mx_codes, out.mx_blocks, {0}, rows.value(), row_scales);
  out.mx_rows = row_scales.codes.data();
  out.scale = row_scales.values.data();
  out.scale_rows = 1;
}

// The scales of stacked matrices, whose rows end at `ends` int32 [P]. A tile of the output must not span two
// of the matrices.
inline void attach_joined_scale(const Contract& check, const Tensor& scale, const Tensor& ends, Size rows,
                                Size k, Operand& out) {
  check.tensor("ends", ends, {ScalarType::Int}, {{"P", ends.numel()}});
  out.ends = data<const int32_t>(ends);
  int64_t begin = 0, count = 0;
  for (int64_t i = 0; i < ends.numel(); begin = out.ends[i++]) {
    const int64_t end = out.ends[i];
    check.require(end > begin && end % kGroup == 0, "ends", "goes from ", begin, " to ", end,
                  ", must rise by multiples of 16");
    count += (end - begin + kScaleBlock - 1) / kScaleBlock;
  }
  check.require(begin == rows.value() && begin > 0, "ends", "ends at ", begin, ", must end at N, ",
                rows.value());
  const Size blocks = ceil_div(k, kScaleBlock);
  check.cpu("b_scale_inv", scale);
  check.tensor("b_scale_inv", scale, {ScalarType::Float}, {{"blocks of rows", count}, blocks});
  out.scale = data<const float>(scale);
  out.scale_rows = kScaleBlock;
  out.scale_blocks = blocks.value();
}

// Whether sum * a_scale may overflow or underflow in FP32 although sum * a_scale * b_scale would not.
inline bool is_far(const Problem& p) {
  if (p.blocked() || p.a.scale == nullptr || p.b.scale == nullptr) return false;
  const int64_t count = p.a.scale_rows == 1 ? p.m : 1;
  return std::any_of(p.a.scale, p.a.scale + count, [](float s) { return s > kFarUp || s < kFarDown; });
}

// apply_epilogue for problems that are is_far, on FP32 sums [m, n]. It runs seldom, so it is not vectorized.
template <class Out, class Bias>
void apply_far_epilogue(const Problem& p, const float* sums) {
  for (int64_t i = 0; i < p.m * p.n; ++i) {
    const float bias = p.bias == nullptr ? 0.0f : load(static_cast<const Bias*>(p.bias)[i % p.n]);
    Out* out = static_cast<Out*>(p.out) + i;
    store(scaled_by(sums[i], p.a.outer(i / p.n), p.b.outer(i % p.n)) + bias, out);
    if (p.residual != nullptr) store(load(static_cast<const Out*>(p.residual)[i]) + load(*out), out);
  }
}

inline void run_far(const Problem& p) {
  const Tensor sums = empty({p.m, p.n}, ScalarType::Float);
  Problem plain = p;
  plain.a.scale = plain.b.scale = nullptr;
  plain.bias = plain.residual = nullptr;
  plain.out = sums.data_ptr();
  plain.out_type = plain.bias_type = ScalarType::Float;
  run(plain);
  with_element(p.out_type, [&](auto out) {
    with_element(p.bias_type, [&](auto bias) {
      apply_far_epilogue<typename decltype(out)::type, typename decltype(bias)::type>(
          p, data<const float>(sums));
    });
  });
}

}  // namespace fp8serve::gemm
