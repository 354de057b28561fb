// The contract of `count_saturated`, the same on every device.
#pragma once

#include "check.h"

namespace fp8serve {

// `Check`: a Contract, or a device's own.
template <class Check>
void check_counters(const Check& check, const Tensor& q, const Tensor& amax, const Tensor& seen,
                    const Tensor& saturated, const std::optional<Tensor>& rows) {
  check.rank("q", q, 2);
  check.tensor("q", q, {ScalarType::Float8_e4m3fn}, {{"T", q.size(0)}, {"K", q.size(1)}});
  check.tensor("amax", amax, {ScalarType::Float}, {});
  check.tensor("seen", seen, {ScalarType::Float}, {});
  check.tensor("saturated", saturated, {ScalarType::Long}, {});
  if (rows) check.tensor("rows", *rows, {ScalarType::Long}, {});
}

}  // namespace fp8serve
