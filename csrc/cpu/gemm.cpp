// scaled_mm: FP8 or BF16 [M, K] x FP8 [N, K] -> [M, N], any mix of formats and scale granularities;
// scaled_mm_add, the same added to a residual; mm, the same sums for two BF16 operands; packed_mm, all
// three with weights that pack_weight has packed; joined_mm, for stacked weights that are scaled in blocks;
// mx_mm, all of them for operands in MX blocks (mx.h); nvfp4_mm, scaled_mm for the values of two operands in
// NVFP4, which are BF16.
//
// Both operands have K contiguous, as weights in a checkpoint do: they are read as they are, memory-mapped
// or not. Training and calibration do that; serving packs them (gemm_packed.h). This file checks the
// arguments of the ops; the work is in gemm_run.cpp, the arithmetic in gemm.h.
#include <torch/csrc/stable/library.h>

#include "cpu/gemm_arguments.h"

namespace fp8serve {
namespace gemm {
namespace {

// The arguments that every op here has; tensors are held until the work is done.
struct Arguments {
  Tensor a, b;
  std::optional<Tensor> a_scale, b_scale, bias, residual;
  bool packed = false;
  std::optional<Tensor> ends = {};  // ends of the stacked matrices in b
  bool mx = false;                  // whether a or b is in MX blocks
};

std::optional<Tensor> dense(const std::optional<Tensor>& t) {
  return t ? std::optional<Tensor>(fp8serve::dense(*t)) : std::nullopt;
}
const void* pointer(const std::optional<Tensor>& t) { return t ? t->data_ptr() : nullptr; }

Tensor multiply(const Contract& check, const Arguments& in, std::initializer_list<ScalarType> a_types,
                std::initializer_list<ScalarType> b_types, ScalarType out_dtype) {
  check.rank("a", in.a, 2);
  const Size m{"M", in.a.size(0)}, k{"K", in.a.size(1)};
  check.tensor("a", in.a, a_types, {m, k});
  check.rank("b", in.b, in.packed ? 3 : 2);
  const Size n{"N", in.b.size(0) * (in.packed ? kGroup : 1)};
  if (in.packed) {
    check.require(k.value() % kRun == 0, "a", "has rows of ", k.value(), " values, must be a multiple of 8");
    check.tensor("b", in.b, b_types,
                 {{"N / 16", n.value() / kGroup}, {"K / 8", k.value() / kRun}, {"a run", kGroup * kRun}});
  } else {
    check.tensor("b", in.b, b_types, {n, k});
  }
  if (in.bias) check.tensor("bias", *in.bias, kHigh, {n});
  if (in.residual) check.tensor("residual", *in.residual, {out_dtype}, {m, n});
  check.require(std::find(kHigh.begin(), kHigh.end(), out_dtype) != kHigh.end(), "out_dtype", "is ",
                torch::headeronly::toString(out_dtype), ", must be Float, BFloat16 or Half");
  const Arguments args{fp8serve::dense(in.a),
                       fp8serve::dense(in.b),
                       dense(in.a_scale),
                       dense(in.b_scale),
                       dense(in.bias),
                       dense(in.residual),
                       in.packed,
                       dense(in.ends),
                       in.mx};
  Tensor out = empty({m.value(), n.value()}, out_dtype);
  Problem p{
      .a = {data<const char>(args.a), kind_of(args.a), k.value()},
      .b = {.values = data<const char>(args.b), .kind = kind_of(args.b), .k = k.value(), .packed = in.packed},
      .m = m.value(),
      .n = n.value(),
      .k = k.value(),
      .bias_type = args.bias ? args.bias->scalar_type() : out_dtype,
      .out_type = out_dtype,
      .bias = pointer(args.bias),
      .residual = pointer(args.residual),
      .out = out.data_ptr()};
  RowScales a_rows, b_rows;
  if (args.mx) {
    attach_mx_scale(check, "a_scale_inv", *args.a_scale, m, k, p.a, a_rows);
    attach_mx_scale(check, "b_scale_inv", *args.b_scale, n, k, p.b, b_rows);
    if (out.numel() > 0) is_far(p) ? run_far(p) : run(p);
    return out;
  }
  if (args.a_scale) attach_scale(check, "a_scale_inv", *args.a_scale, m, k, p.a);
  if (args.ends) {
    attach_joined_scale(check, *args.b_scale, *args.ends, n, k, p.b);
  } else if (args.b_scale) {
    attach_scale(check, "b_scale_inv", *args.b_scale, n, k, p.b);
  }
  if (p.blocked()) p.ones.assign(static_cast<size_t>(p.k / kScaleBlock + 1), 1.0f);
  if (out.numel() > 0) is_far(p) ? run_far(p) : run(p);
  return out;
}

Tensor scaled_mm(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                 const std::optional<Tensor>& bias, ScalarType out_dtype) {
  return multiply(Contract("scaled_mm"), {a, b, a_scale, b_scale, bias, std::nullopt}, kFp8OrBf16, kFp8,
                  out_dtype);
}

Tensor scaled_mm_add(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                     const std::optional<Tensor>& bias, const Tensor& residual) {
  return multiply(Contract("scaled_mm_add"), {a, b, a_scale, b_scale, bias, residual}, kFp8OrBf16, kFp8,
                  residual.scalar_type());
}

Tensor mm(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, ScalarType out_dtype) {
  const Arguments in{a, b, std::nullopt, std::nullopt, bias, std::nullopt};
  return multiply(Contract("mm"), in, kBf16, kBf16, out_dtype);
}

Tensor packed_mm(const Tensor& a, const Tensor& b, const std::optional<Tensor>& a_scale,
                 const std::optional<Tensor>& b_scale, const std::optional<Tensor>& bias,
                 const std::optional<Tensor>& residual, ScalarType out_dtype) {
  const Contract check("packed_mm");
  const Arguments in{a, b, a_scale, b_scale, bias, residual, true};
  const bool plain = b.scalar_type() == ScalarType::BFloat16;
  check.require(plain ? !a_scale && !b_scale : a_scale && b_scale, "a_scale_inv and b_scale_inv",
                plain ? "are for FP8 weights, not for BFloat16" : "must both be given");
  return plain ? multiply(check, in, kBf16, kBf16, out_dtype)
               : multiply(check, in, kFp8OrBf16, kFp8, out_dtype);
}

Tensor joined_mm(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                 const Tensor& ends, const std::optional<Tensor>& bias, ScalarType out_dtype) {
  return multiply(Contract("joined_mm"), {a, b, a_scale, b_scale, bias, std::nullopt, b.dim() == 3, ends},
                  kFp8OrBf16, kFp8, out_dtype);
}

Tensor mx_mm(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
             const std::optional<Tensor>& bias, const std::optional<Tensor>& residual, ScalarType out_dtype) {
  const Arguments in{a, b, a_scale, b_scale, bias, residual, b.dim() == 3, std::nullopt, true};
  return multiply(Contract("mx_mm"), in, kFp8OrBf16, kFp8OrBf16, out_dtype);
}

Tensor nvfp4_mm(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                const std::optional<Tensor>& bias, ScalarType out_dtype) {
  return multiply(Contract("nvfp4_mm"), {a, b, a_scale, b_scale, bias, std::nullopt}, kBf16, kBf16,
                  out_dtype);
}

// Whether the GEMM reads packed weights as they are, instead of unpacking them first.
bool reads_packed() { return best_level(Kind::bf16, Kind::bf16).unpack_packed != nullptr; }

}  // namespace
}  // namespace gemm
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("scaled_mm", TORCH_BOX(&fp8serve::gemm::scaled_mm));
  m.impl("scaled_mm_add", TORCH_BOX(&fp8serve::gemm::scaled_mm_add));
  m.impl("mm", TORCH_BOX(&fp8serve::gemm::mm));
  m.impl("packed_mm", TORCH_BOX(&fp8serve::gemm::packed_mm));
  m.impl("joined_mm", TORCH_BOX(&fp8serve::gemm::joined_mm));
  m.impl("mx_mm", TORCH_BOX(&fp8serve::gemm::mx_mm));
  m.impl("nvfp4_mm", TORCH_BOX(&fp8serve::gemm::nvfp4_mm));
  for (const char* op : {"scaled_mm", "scaled_mm_add", "packed_mm", "joined_mm"})
    fp8serve::report(op, fp8serve::gemm::fp8_variant);
  for (const char* op : {"mm", "mx_mm", "nvfp4_mm"}) fp8serve::report(op, fp8serve::gemm::bf16_variant);
}

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CompositeExplicitAutograd, m) {
  m.impl("reads_packed", TORCH_BOX(&fp8serve::gemm::reads_packed));
}
