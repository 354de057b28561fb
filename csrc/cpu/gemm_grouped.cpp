// grouped_mm: rows sorted by expert, each expert's rows times its own weight; grouped_quantize casts such
// rows by a scale for each expert. One parallel region for all experts: at decoding most have a row or none.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "cpu/cast_rows.h"
#include "cpu/experts.h"
#include "cpu/gemm_arguments.h"
#include "cpu/parts.h"
#include "cpu/rows.h"

namespace fp8serve::gemm {
namespace {

// The scale_inv of all experts; `of` gives that of one expert.
struct Scales {
  Tensor held;
  int64_t per_expert = 0, per_row = 0;  // elements from one expert, and from one row, to the next
  int64_t rows = 1, blocks = 0;         // as in Operand

  void of(int64_t expert, int64_t row, Operand& out) const {
    out.scale = data<const float>(held) + expert * per_expert + row * per_row;
    out.scale_rows = rows;
    out.scale_blocks = blocks;
  }
};

constexpr int64_t kAllRows = int64_t{1} << 62;

// The scales of all experts in MX blocks (mx.h), one expert's rows after the other's; `of` gives those of the
// rows from `row` on, whose own scales are the computed ones from `computed` on.
struct MxScales {
  Tensor held;
  int64_t blocks = 0;
  RowScales rows;

  // Computes the scales of the rows of these experts, each of which has `count`.
  void compute(const std::vector<int64_t>& experts, int64_t count) {
    compute_row_scales(data<const uint8_t>(held), blocks, experts, count, rows);
  }
  void of(int64_t row, int64_t computed, Operand& out) const {
    out.mx_codes = data<const uint8_t>(held) + row * blocks;
    out.mx_blocks = blocks;
    out.mx_rows = rows.codes.data() + computed;
    out.scale = rows.values.data() + computed;
    out.scale_rows = 1;
    out.scale_blocks = 0;
  }
};

// Empty unless the scale is E8M0, which must have this shape.
std::optional<MxScales> mx_scales_of(const Contract& check, const char* name, const Tensor& scale,
                                     std::initializer_list<Size> shape) {
  if (!is_mx(scale)) return std::nullopt;
  check.cpu(name, scale);
  check.shape(name, scale, shape);
  return MxScales{dense(scale), scale.size(scale.dim() - 1), {}};
}

Scales scales_of_rows(const Contract& check, const Tensor& scale, Size count, Size rows, Size k) {
  check.cpu("a_scale_inv", scale);
  check.dtype("a_scale_inv", scale, {ScalarType::Float});
  if (scale.dim() == 0) return {scale, 0, 0, kAllRows, 0};
  if (scale.dim() == 1) {
    check.shape("a_scale_inv", scale, {count});
    return {dense(scale), 1, 0, kAllRows, 0};
  }
  check.rank("a_scale_inv", scale, 2);
  const bool whole = scale.size(1) == 1;
  const Size blocks = whole ? exactly(1) : ceil_div(k, kScaleBlock);
  check.shape("a_scale_inv", scale, {rows, blocks});
  return {dense(scale), 0, blocks.value(), 1, whole ? 0 : blocks.value()};
}

Scales scales_of_weights(const Contract& check, const Tensor& scale, Size count, Size n, Size k) {
  check.cpu("b_scale_inv", scale);
  check.dtype("b_scale_inv", scale, {ScalarType::Float});
  if (scale.dim() == 1) {
    check.shape("b_scale_inv", scale, {count});
    return {dense(scale), 1, 0, kAllRows, 0};
  }
  check.rank("b_scale_inv", scale, 3);
  const bool by_row = scale.size(1) == n.value(), whole = by_row && scale.size(2) == 1;
  const Size tiles = by_row ? n : ceil_div(n, kScaleBlock),
             blocks = whole ? exactly(1) : ceil_div(k, kScaleBlock);
  check.shape("b_scale_inv", scale, {count, tiles, blocks});
  return {dense(scale), tiles.value() * blocks.value(), 0, by_row ? 1 : kScaleBlock,
          whole ? 0 : blocks.value()};
}

void run_each(const std::vector<Problem>& problems) {
  if (problems.empty() || problems[0].n == 0) return;
  if (!std::any_of(problems.begin(), problems.end(), is_far))
    return run(problems.data(), static_cast<int64_t>(problems.size()));
  for (const Problem& p : problems) is_far(p) ? run_far(p) : run(p);
}

// Checks the weights and returns N.
Size columns(const Contract& check, const Tensor& b, Size count, Size k, bool packed) {
  if (!packed) {
    const Size n{"N", b.size(1)};
    check.tensor("b", b, kFp8OrBf16, {count, n, k});
    return n;
  }
  const Size n{"N", b.size(1) * kGroup};
  check.require(k.value() % kRun == 0, "a", "has rows of ", k.value(), " values, must be a multiple of 8");
  check.tensor(
      "b", b, kFp8,
      {count, {"N / 16", n.value() / kGroup}, {"K / 8", k.value() / kRun}, {"a run", kGroup * kRun}});
  return n;
}

// The arguments, checked and dense.
struct Arguments {
  Tensor a, b;
  std::optional<Tensor> bias;
  Experts experts;
  Scales of_rows, of_weights;
  int64_t n, k;
  bool packed;
  ScalarType out_dtype;
  std::optional<MxScales> mx_rows, mx_weights;

  // The problem of an expert, the `index`-th of those with rows.
  Problem problem(int64_t expert, int64_t index, const Tensor& out) const {
    const int64_t begin = experts.begin(expert);
    Problem p{.a = {data<const char>(a), kind_of(a), k},
              .b = {.values = data<const char>(b) + expert * n * k * bytes_of(kind_of(b)),
                    .kind = kind_of(b),
                    .k = k,
                    .packed = packed},
              .m = experts.end(expert) - begin,
              .n = n,
              .k = k,
              .bias_type = bias ? bias->scalar_type() : out_dtype,
              .out_type = out_dtype,
              .bias = nullptr,
              .residual = nullptr,
              .out = nullptr};
    const int64_t bias_bytes = p.bias_type == ScalarType::Float ? 4 : 2;
    if (bias) p.bias = data<const char>(*bias) + expert * n * bias_bytes;
    p.a.values = p.a.at(begin, 0);
    p.out = data<char>(out) + begin * n * p.out_bytes();
    mx_rows ? mx_rows->of(begin, begin, p.a) : of_rows.of(expert, begin, p.a);
    mx_weights ? mx_weights->of(expert * n, index * n, p.b) : of_weights.of(expert, 0, p.b);
    if (p.blocked()) p.ones.assign(static_cast<size_t>(k / kScaleBlock + 1), 1.0f);
    return p;
  }
};

}  // namespace

Tensor grouped_mm(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                  const Tensor& offsets, const std::optional<Tensor>& bias, ScalarType out_dtype) {
  const Contract check("grouped_mm");
  check.rank("a", a, 2);
  const Size t{"T", a.size(0)}, k{"K", a.size(1)};
  check.tensor("a", a, kFp8OrBf16, {t, k});
  const bool packed = b.dim() == 4;
  if (!packed) check.rank("b", b, 3);
  const Size count{"E", b.size(0)}, n = columns(check, b, count, k, packed);
  if (bias) check.tensor("bias", *bias, kHigh, {count, n});
  check.require(std::find(kHigh.begin(), kHigh.end(), out_dtype) != kHigh.end(), "out_dtype", "is ",
                torch::headeronly::toString(out_dtype), ", must be Float, BFloat16 or Half");
  const Size mx_blocks = ceil_div(k, kMxBlock);
  auto mx_rows = mx_scales_of(check, "a_scale_inv", a_scale, {t, mx_blocks});
  auto mx_weights = mx_scales_of(check, "b_scale_inv", b_scale, {count, n, mx_blocks});
  if (mx_rows) check_mx(check, "a_scale_inv", kind_of(a), false, k);
  if (mx_weights) check_mx(check, "b_scale_inv", kind_of(b), packed, k);
  Arguments in{dense(a),
               dense(b),
               bias ? std::optional<Tensor>(dense(*bias)) : std::nullopt,
               experts_of(check, offsets, count, t.value()),
               mx_rows ? Scales{} : scales_of_rows(check, a_scale, count, t, k),
               mx_weights ? Scales{} : scales_of_weights(check, b_scale, count, n, k),
               n.value(),
               k.value(),
               packed,
               out_dtype,
               std::move(mx_rows),
               std::move(mx_weights)};
  if (in.mx_weights) check_beside_mx(check, "a_scale_inv", in.of_rows.blocks, "[], [E] or [T, 1]");
  if (in.mx_rows) check_beside_mx(check, "b_scale_inv", in.of_weights.blocks, "[E] or [E, N, 1]");
  const std::vector<int64_t> used = in.experts.with_rows();
  if (in.mx_rows) in.mx_rows->compute({0}, t.value());
  if (in.mx_weights) in.mx_weights->compute(used, n.value());
  Tensor out = empty({t.value(), n.value()}, out_dtype);
  std::vector<Problem> problems;
  for (size_t i = 0; i < used.size(); ++i)
    problems.push_back(in.problem(used[i], static_cast<int64_t>(i), out));
  run_each(problems);
  return out;
}

namespace {

template <class F>
struct CastRow {
  template <class T>
  static FP8_INLINE void run(const T* x, uint8_t* q, int64_t n, float scale, float* amax) {
    *amax = amax_row(x, n);
    cast_row<F>(x, q, n, scale);
  }
};

std::tuple<Tensor, Tensor> grouped_quantize(const Tensor& x_in, const Tensor& scale_in, const Tensor& offsets,
                                            ScalarType dtype) {
  const Contract check("grouped_quantize");
  check.cpu("x", x_in);
  check.dtype("x", x_in, kHigh);
  check.rank("x", x_in, 2);
  check.require(dtype == ScalarType::Float8_e4m3fn || dtype == ScalarType::Float8_e5m2, "dtype", "is ",
                torch::headeronly::toString(dtype), ", must be Float8_e4m3fn or Float8_e5m2");
  check.rank("scale", scale_in, 1);
  const Size count{"E", scale_in.size(0)};
  check.tensor("scale", scale_in, {ScalarType::Float}, {count});
  const Tensor x = dense(x_in), scale = dense(scale_in);
  const int64_t rows = x.size(0), cols = x.size(1);
  const Experts experts = experts_of(check, offsets, count, rows);
  Tensor q = empty({rows, cols}, dtype), amax = empty({count.value()}, ScalarType::Float);
  std::fill_n(data<float>(amax), count.value(), 0.0f);
  std::vector<float> largest(static_cast<size_t>(rows));
  const int32_t* ends = data<const int32_t>(experts.held);
  const auto expert_of = [&](int64_t row) {
    return std::upper_bound(ends, ends + experts.count, row) - ends;
  };
  with_format(dtype, [&](auto fmt) {
    with_element(x.scalar_type(), [&](auto elem) {
      const auto* in = data<const typename decltype(elem)::type>(x);
      parallel_rows(rows, cols, [&](int64_t r) {
        dispatch<CastRow<typename decltype(fmt)::type>>(in + r * cols, data<uint8_t>(q) + r * cols, cols,
                                                        data<const float>(scale)[expert_of(r)],
                                                        &largest[static_cast<size_t>(r)]);
      });
    });
  });
  for (int64_t e = 0; e < experts.count; ++e)
    for (int64_t r = experts.begin(e); r < experts.end(e); ++r)
      data<float>(amax)[e] = std::max(data<float>(amax)[e], largest[static_cast<size_t>(r)]);
  return {q, amax};
}

}  // namespace
}  // namespace fp8serve::gemm

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("grouped_mm", TORCH_BOX(&fp8serve::gemm::grouped_mm));
  fp8serve::report("grouped_mm", fp8serve::gemm::fp8_variant);
  m.impl("grouped_quantize", TORCH_BOX(&fp8serve::gemm::grouped_quantize));
  fp8serve::report<fp8serve::kCasting<fp8serve::Numerics::exact>>("grouped_quantize");
}
