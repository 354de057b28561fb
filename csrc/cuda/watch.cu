// quantize_watched: the cast of a served layer's input. The same launch records the largest magnitude and
// counts the values that saturate. The kernels are those of the unwatched casts (casts.h).
#include <torch/csrc/stable/library.h>

#include "cuda/casts.h"
#include "watch.h"

namespace fp8serve {

Tensor quantize_watched(const Tensor& x, const std::optional<Tensor>& other, const std::optional<double>& eps,
                        const Tensor& scale, const Tensor& seen, const Tensor& saturated,
                        const std::optional<Tensor>& rows) {
  const DeviceContract check("quantize_watched", x);
  check_watched(check, x, other, eps, scale, seen, saturated, rows);
  const OnDevice device(x);
  const Tensor q = empty(x, {x.size(0), x.size(1)}, ScalarType::Float8_e4m3fn);
  if (x.numel() == 0) return q;
  const CastCounters out = counters(seen, saturated, rows);
  const Source source = source_of(other, eps);
  if (source == Source::plain) cast_plain(x, scale, q, out, device);
  if (source == Source::norm) cast_norm(x, *other, *eps, scale, q, out, device);
  if (source == Source::gated) cast_gated(x, *other, scale, q, out, device);
  return q;
}

}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(FP8SERVE_OPS, FP8SERVE_DEVICE_KEY, m) {
  m.impl("quantize_watched", TORCH_BOX(&fp8serve::quantize_watched));
}
