// wgrad: dy^T x, the gradient of a weight with few rows or columns, such as an adapter's: the sum is over
// tokens, which are the rows of both operands.
//
// A task is 64 columns of x. 256 tokens of these columns at a time are interleaved into pairs and multiplied
// with all columns of dy, which is transposed once for all tasks. Sums are FP32, over the tokens in order
// (pair_product.h).
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "check.h"
#include "cpu/features.h"
#include "cpu/pair_product.h"
#include "cpu/scratch.h"
#include "cpu/tensors.h"

namespace fp8serve {
namespace {

constexpr int64_t kColumns = 64;  // of x, in a task
constexpr int64_t kTokens = 256;  // interleaved at a time
constexpr int64_t kRows = 4;      // of a tile of pair_product.h

// Tokens [first, first + count) of `columns` columns, padded with zeros to 64 columns and an even count.
struct PairTokens {
  static FP8_INLINE void run(const uint16_t* x, int64_t stride, int64_t count, int64_t columns,
                             uint32_t* out) {
    for (int64_t t = 0; t < count; t += 2, out += kColumns) {
      uint16_t token_pair[2][kColumns] = {};
      for (int64_t i = 0; i < 2 && t + i < count; ++i)
        std::copy_n(x + (t + i) * stride, columns, token_pair[i]);
      pairs::interleave(token_pair[0], token_pair[1], kColumns, out);
    }
  }
};

Tensor wgrad(const Tensor& dy_in, const Tensor& x_in) {
  const Contract check("wgrad");
  check.rank("dy", dy_in, 2);
  check.rank("x", x_in, 2);
  const Size t{"T", dy_in.size(0)}, n{"N", dy_in.size(1)}, k{"K", x_in.size(1)};
  check.tensor("dy", dy_in, {ScalarType::BFloat16}, {t, n});
  check.tensor("x", x_in, {ScalarType::BFloat16}, {t, k});
  const Tensor dy = dense(dy_in), x = dense(x_in), out = empty({n.value(), k.value()}, ScalarType::Float);
  const int64_t tokens = t.value(), rows = (n.value() + kRows - 1) / kRows * kRows,
                stride = tokens + tokens % 2;
  thread_local Scratch transpose_memory;
  auto* dy_t = transpose_memory.get<uint16_t>(rows * stride);
  std::fill_n(dy_t, rows * stride, uint16_t{0});
  pairs::transpose(data<const uint16_t>(dy), tokens, n.value(), stride, dy_t);

  parallel_tasks((k.value() + kColumns - 1) / kColumns, [&](int64_t task) {
    thread_local Scratch pair_memory, sum_memory;
    const int64_t column = task * kColumns, columns = std::min(kColumns, k.value() - column);
    auto* words = pair_memory.get<uint32_t>(kTokens / 2 * kColumns);
    auto* sums = sum_memory.get<float>(rows * kColumns);
    std::fill_n(sums, rows * kColumns, 0.0f);
    for (int64_t first = 0; first < tokens; first += kTokens) {
      const int64_t count = std::min(kTokens, tokens - first);
      dispatch<PairTokens>(data<const uint16_t>(x) + first * k.value() + column, k.value(), count, columns,
                           words);
      pairs::multiply({.a = dy_t + first,
                       .a_stride = stride,
                       .b = words,
                       .b_stride = kColumns,
                       .k = count + count % 2,
                       .out = sums,
                       .out_stride = kColumns,
                       .rows = rows,
                       .columns = kColumns,
                       .add = true});
    }
    for (int64_t r = 0; r < n.value(); ++r)
      std::copy_n(sums + r * kColumns, columns, data<float>(out) + r * k.value() + column);
  });
  return out;
}

}  // namespace
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("wgrad", TORCH_BOX(&fp8serve::wgrad));
  fp8serve::report<fp8serve::pairs::kVariants>("wgrad");
}
