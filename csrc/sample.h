// The contract of `sample`, the same on every device.
#pragma once

#include "check.h"

namespace fp8serve {

// `Check`: Contract (CPU) or DeviceContract.
template <class Check>
void check_sample(const Check& check, const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
                  const Tensor& top_p, const Tensor& min_p, const Tensor& uniform) {
  check.rank("logits", logits, 2);
  const Size rows{"rows", logits.size(0)}, vocab{"vocab", logits.size(1)};
  check.tensor("logits", logits, {ScalarType::Float}, {rows, vocab});
  check.require(vocab.value() > 0, "logits", "have no tokens to choose from");
  check.tensor("temperature", temperature, {ScalarType::Double}, {rows});
  check.tensor("top_k", top_k, {ScalarType::Long}, {rows});
  check.tensor("top_p", top_p, {ScalarType::Double}, {rows});
  check.tensor("min_p", min_p, {ScalarType::Double}, {rows});
  check.tensor("uniform", uniform, {ScalarType::Double}, {rows});
}

}  // namespace fp8serve
