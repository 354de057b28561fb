// quantize_mx: high precision in, MXFP8 out, in blocks of 1x32 with E8M0 scales
// (fp8serve/fp8/ops/microscaling.py).
//
// A row is read twice, the second time from cache: for the amaxes of its blocks, and for the cast. Amaxes are
// compared as integers, and the code of a scale is integer arithmetic on the bits of an amax.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "check.h"
#include "cpu/cast_rows.h"
#include "cpu/features.h"
#include "cpu/gemm.h"
#include "cpu/rows.h"
#include "cpu/scratch.h"
#include "cpu/tensors.h"
#include "fp8.h"

namespace fp8serve {
namespace {

using gemm::kMxBlock;

// The code of the smallest power of two that is at least amax / max. The maximum is 1.75 times a power of
// two: the exponent is raised by one if the amax's mantissa is above 1.75.
// An infinite amax gives 127, the code of the scale 1.
template <class F>
FP8_INLINE uint8_t code_for(float amax) {
  const int32_t bits = std::bit_cast<int32_t>(amax);
  const int32_t exponent = (bits >> 23) - ((F::max_bits >> 23) - 127);
  const int32_t code = exponent + ((bits & 0x7fffff) > (F::max_bits & 0x7fffff) ? 1 : 0);
  return static_cast<uint8_t>(bits >= kInfinity ? 127 : (code > 0 ? code : 0));
}

template <class F>
struct QuantizeRow {
  template <class T>
  static FP8_INLINE void run(const T* x, uint8_t* q, int64_t n, bool infinity_is_nan, uint8_t* codes,
                             float* multipliers) {
    for (int64_t begin = 0; begin < n; begin += kMxBlock) {
      const float amax =
          begin + kMxBlock <= n ? amax_row(x + begin, kMxBlock) : amax_row(x + begin, n - begin);
      const uint8_t code = code_for<F>(amax);
      // 2^(127 - code), the reciprocal of the block's scale
      multipliers[begin / kMxBlock] = std::bit_cast<float>((254 - code) << 23);
      codes[begin / kMxBlock] = infinity_is_nan && std::bit_cast<int32_t>(amax) >= kInfinity ? 255 : code;
    }
    int64_t begin = 0;
#if FP8_X86
    if (has(kAvx512Vbmi)) {
      cast_blocks_vbmi<F>(x, q, n, multipliers);
      begin = n / 64 * 64;
    }
#endif
    for (; begin + kMxBlock <= n; begin += kMxBlock)
      cast_row_plain<F>(x + begin, q + begin, kMxBlock, multipliers[begin / kMxBlock]);
    if (begin < n) cast_row_plain<F>(x + begin, q + begin, n - begin, multipliers[begin / kMxBlock]);
  }
};

std::tuple<Tensor, Tensor> quantize_mx(const Tensor& x_in, ScalarType dtype, bool infinity_is_nan) {
  const Contract check("quantize_mx");
  check.cpu("x", x_in);
  check.rank("x", x_in, 2);
  check.dtype("x", x_in, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half});
  check.require(dtype == ScalarType::Float8_e4m3fn || dtype == ScalarType::Float8_e5m2, "dtype", "is ",
                torch::headeronly::toString(dtype), ", must be Float8_e4m3fn or Float8_e5m2");
  const Tensor x = dense(x_in);
  const int64_t rows = x.size(0), cols = x.size(1), blocks = (cols + kMxBlock - 1) / kMxBlock;
  Tensor q = empty({rows, cols}, dtype), codes = empty({rows, blocks}, ScalarType::Float8_e8m0fnu);
  with_format(dtype, [&](auto format) {
    with_element(x.scalar_type(), [&](auto element) {
      using F = typename decltype(format)::type;
      const auto* in = data<const typename decltype(element)::type>(x);
      parallel_rows(rows, cols, [&](int64_t r) {
        thread_local Scratch scratch;
        dispatch<QuantizeRow<F>>(in + r * cols, data<uint8_t>(q) + r * cols, cols, infinity_is_nan,
                                 data<uint8_t>(codes) + r * blocks, scratch.get<float>(blocks));
      });
    });
  });
  return {q, codes};
}

}  // namespace
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("quantize_mx", TORCH_BOX(&fp8serve::quantize_mx));
  fp8serve::report<fp8serve::kCasting<fp8serve::Numerics::exact>>("quantize_mx");
}
