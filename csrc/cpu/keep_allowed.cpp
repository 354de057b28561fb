// keep_allowed: sets the logits of tokens that may not come next to -inf. A word has the bits of 32 tokens;
// with most schemas most words allow none of them or all.
#include <torch/csrc/stable/library.h>

#include <cmath>

#include "check.h"
#include "cpu/features.h"
#include "cpu/rows.h"
#include "cpu/tensors.h"

namespace fp8serve {
namespace {

constexpr int64_t kWord = 32;

struct KeepAllowed {
  static FP8_INLINE void run(float* x, const uint32_t* allowed, int64_t n) {
    for (int64_t i = 0; i < n; i += kWord, ++allowed) {
      const int64_t count = n - i < kWord ? n - i : kWord;
      if (*allowed == ~uint32_t{0}) continue;
      for (int64_t j = 0; j < count; ++j) x[i + j] = (*allowed >> j & 1) != 0 ? x[i + j] : -INFINITY;
    }
  }
};

void keep_allowed(const Tensor& logits, const Tensor& rows_in, const Tensor& allowed_in) {
  const Contract check("keep_allowed");
  check.rank("logits", logits, 2);
  const Size count{"R", logits.size(0)}, vocab{"vocab", logits.size(1)};
  check.tensor("logits", logits, {ScalarType::Float}, {count, vocab});
  check.require(logits.is_contiguous(), "logits", "must be contiguous");
  check.rank("rows", rows_in, 1);
  const Size marked{"M", rows_in.size(0)};
  check.tensor("rows", rows_in, {ScalarType::Long}, {marked});
  check.tensor("allowed", allowed_in, {ScalarType::Int},
               {marked, {"ceil(vocab / 32)", (vocab.value() + kWord - 1) / kWord}});
  const Tensor rows = dense(rows_in), allowed = dense(allowed_in);
  const int64_t words = allowed.size(1);
  for (int64_t i = 0; i < marked.value(); ++i) {
    const int64_t row = data<const int64_t>(rows)[i];
    check.require(row >= 0 && row < count.value(), "rows", "names row ", row,
                  ", must be below R = ", count.value());
  }
  parallel_rows(marked.value(), vocab.value(), [&](int64_t i) {
    dispatch<KeepAllowed>(data<float>(logits) + data<const int64_t>(rows)[i] * vocab.value(),
                          data<const uint32_t>(allowed) + i * words, vocab.value());
  });
}

}  // namespace
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("keep_allowed", TORCH_BOX(&fp8serve::keep_allowed));
  fp8serve::report<fp8serve::kVector<fp8serve::Numerics::exact>>("keep_allowed");
}
