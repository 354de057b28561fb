// quantize_transpose: the cast of a matrix for both of its readers in one pass: its codes, and those of its
// transpose. GEMM operands have the contracted dimension contiguous, so the backward pass of a linear layer
// reads x^T and w^T.
//
// Blocks of 64 rows x 64 columns: the codes of a block's rows go to their place and, from the first-level
// cache, turned, to the other matrix as 64 whole cache lines.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "check.h"
#include "cpu/cast_rows.h"
#include "cpu/isa.h"
#include "cpu/tensors.h"
#include "fp8.h"

namespace fp8serve {
namespace {

constexpr int64_t kSide = 64;

// A block of codes [64][64], turned. Eight rows at a time: a byte of each makes 8 bytes of an output row.
struct Turn {
  static FP8_INLINE void run(const uint8_t* block, uint8_t* out, int64_t stride, int64_t rows, int64_t cols) {
    for (int64_t c = 0; c < cols; ++c) {
      for (int64_t r = 0; r < rows; ++r) out[c * stride + r] = block[r * kSide + c];
    }
  }
};

template <class F>
struct CastBlock {
  template <class T>
  static FP8_INLINE void run(const T* x, uint8_t* q, uint8_t* q_t, int64_t rows, int64_t cols, int64_t m,
                             int64_t k, float scale, float* amax) {
    alignas(64) uint8_t block[kSide * kSide];
    float seen = 0.0f;
    for (int64_t r = 0; r < rows; ++r) {
      const float row = amax_row(x + r * k, cols);
      seen = row > seen ? row : seen;
      cast_row<F>(x + r * k, block + r * kSide, cols, scale);
      std::memcpy(q + r * k, block + r * kSide, static_cast<size_t>(cols));
    }
    Turn::run(block, q_t, m, rows, cols);
    *amax = seen;
  }
};

std::tuple<Tensor, Tensor, Tensor> quantize_transpose(const Tensor& x_in, const Tensor& scale,
                                                      ScalarType dtype) {
  const Contract check("quantize_transpose");
  check.rank("x", x_in, 2);
  const Size m{"M", x_in.size(0)}, k{"K", x_in.size(1)};
  check.tensor("x", x_in, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half}, {m, k});
  check.tensor("scale", scale, {ScalarType::Float}, {});
  check.require(dtype == ScalarType::Float8_e4m3fn || dtype == ScalarType::Float8_e5m2, "dtype", "is ",
                torch::headeronly::toString(dtype), ", must be Float8_e4m3fn or Float8_e5m2");
  const Tensor x = dense(x_in), q = empty({m.value(), k.value()}, dtype),
               q_t = empty({k.value(), m.value()}, dtype);
  const int64_t rows = m.value(), cols = k.value();
  const int64_t down = (rows + kSide - 1) / kSide, across = (cols + kSide - 1) / kSide;
  SharedAmax amax;
  with_format(dtype, [&](auto format) {
    with_element(x.scalar_type(), [&](auto element) {
      using F = typename decltype(format)::type;
      using T = typename decltype(element)::type;
      parallel_tasks(down, [&](int64_t i) {
        for (int64_t j = 0; j < across; ++j) {
          const int64_t r = i * kSide, c = j * kSide;
          float seen = 0.0f;
          dispatch<CastBlock<F>>(data<const T>(x) + r * cols + c, data<uint8_t>(q) + r * cols + c,
                                 data<uint8_t>(q_t) + c * rows + r, std::min(kSide, rows - r),
                                 std::min(kSide, cols - c), rows, cols, *data<float>(scale), &seen);
          amax.raise(seen);
        }
      });
    });
  });
  return {q, q_t, scalar(amax.value())};
}

}  // namespace
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("quantize_transpose", TORCH_BOX(&fp8serve::quantize_transpose));
}
