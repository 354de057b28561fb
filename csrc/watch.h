// The contract of `quantize_watched`, the same on every device.
#pragma once

#include "check.h"

namespace fp8serve {

// The values that are cast: x itself, the RMSNorm of x (`other` is its weight), or silu(x) * other.
enum class Source { plain, norm, gated };

inline Source source_of(const std::optional<Tensor>& other, const std::optional<double>& eps) {
  if (!other) return Source::plain;
  return eps ? Source::norm : Source::gated;
}

// `Check`: Contract (CPU) or DeviceContract.
template <class Check>
void check_watched(const Check& check, const Tensor& x, const std::optional<Tensor>& other,
                   const std::optional<double>& eps, const Tensor& scale, const Tensor& seen,
                   const Tensor& saturated, const std::optional<Tensor>& rows) {
  check.rank("x", x, 2);
  const Size t{"T", x.size(0)}, width{"K", x.size(1)};
  check.tensor("x", x, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half}, {t, width});
  if (other && eps) check.tensor("other", *other, {x.scalar_type()}, {width});
  if (other && !eps) check.tensor("other", *other, {x.scalar_type()}, {t, width});
  check.require(other || !eps, "eps", "is given without a weight in other");
  check.tensor("scale", scale, {ScalarType::Float}, {});
  check.tensor("seen", seen, {ScalarType::Float}, {});
  check.tensor("saturated", saturated, {ScalarType::Long}, {});
  if (rows) check.tensor("rows", *rows, {ScalarType::Long}, {});
}

}  // namespace fp8serve
