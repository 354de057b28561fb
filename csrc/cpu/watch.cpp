// quantize_watched: the cast of a served layer's input, which also records the largest magnitude and how many
// elements were cut off. The FP8 data do not show the latter, because values within the range also round to
// the largest one. So the values themselves are counted (those of a fused cast are computed again), but only
// in the rare step whose amax was cut off.
#include "watch.h"

#include <torch/csrc/stable/library.h>

#include "check.h"
#include "cpu/elementwise.h"
#include "cpu/features.h"
#include "cpu/parts.h"
#include "cpu/rows.h"
#include "cpu/scratch.h"
#include "cpu/tensors.h"

namespace fp8serve {
namespace {

// Counts the values of a row that are beyond the range of the format. `other` and `y` are for sources that
// are computed first.
template <Source kSource>
struct CountRow {
  template <class T>
  static FP8_INLINE void run(const T* x, const T* other, T* y, int64_t n, float eps, float scale,
                             int64_t* num_saturated) {
    if constexpr (kSource == Source::norm) norm_row(x, other, y, n, eps);
    if constexpr (kSource == Source::gated) silu_mul_row(x, other, y, n);
    const T* values = kSource == Source::plain ? x : y;
    int64_t total = 0;
    for (int64_t i = 0; i < n; ++i) total += is_cut_off<E4M3>(load(values[i]) * scale);
    *num_saturated = total;
  }
};

template <Source kSource, class T>
int64_t count(const Tensor& x, const std::optional<Tensor>& other, float eps, float scale, int64_t live) {
  const Rows in = rows_of(x);
  const std::optional<Rows> gated = kSource == Source::gated ? std::optional(rows_of(*other)) : std::nullopt;
  const Tensor second = kSource == Source::norm ? dense(*other) : gated ? gated->tensor : x;
  std::atomic<int64_t> total{0};
  parallel_rows(live, in.width, [&](int64_t r) {
    thread_local Scratch scratch;
    int64_t num_saturated = 0;
    dispatch<CountRow<kSource>>(
        data<const T>(in.tensor) + r * in.stride, data<const T>(second) + (gated ? r * gated->stride : 0),
        scratch.get<T>(kSource == Source::plain ? 0 : in.width), in.width, eps, scale, &num_saturated);
    total += num_saturated;
  });
  return total;
}

Pair quantize_source(const Tensor& x, const std::optional<Tensor>& other, const std::optional<double>& eps,
                     const Tensor& scale) {
  constexpr auto kE4M3 = ScalarType::Float8_e4m3fn;
  if (!other) return quantize(x, scale, kE4M3);
  return eps ? rms_norm_quantize(x, *other, *eps, scale, kE4M3) : silu_mul_quantize(x, *other, scale, kE4M3);
}

Tensor quantize_watched(const Tensor& x, const std::optional<Tensor>& other, const std::optional<double>& eps,
                        const Tensor& scale, const Tensor& seen, const Tensor& saturated,
                        const std::optional<Tensor>& rows) {
  const Contract check("quantize_watched");
  check_watched(check, x, other, eps, scale, seen, saturated, rows);
  auto [q, amax] = quantize_source(x, other, eps, scale);
  const int64_t live = rows ? std::clamp<int64_t>(*data<const int64_t>(*rows), 0, x.size(0)) : x.size(0);
  if (live < x.size(0)) {  // an engine on a CPU pads no step, so this need not be fast
    const auto first = [&](Tensor of) { return torch::stable::narrow(of, 0, 0, live); };
    amax = std::get<1>(
        quantize_source(first(x), other && !eps ? std::optional(first(*other)) : other, eps, scale));
  }
  const float here = *data<float>(amax), factor = *data<float>(scale);
  float& most = *data<float>(seen);
  if (here > most) most = here;
  if (!is_cut_off<E4M3>(here * factor)) return q;
  const auto epsilon = static_cast<float>(eps.value_or(0.0));
  const Source source = source_of(other, eps);
  int64_t num_saturated = 0;
  with_element(x.scalar_type(), [&](auto element) {
    using T = typename decltype(element)::type;
    if (source == Source::plain) num_saturated = count<Source::plain, T>(x, other, epsilon, factor, live);
    if (source == Source::norm) num_saturated = count<Source::norm, T>(x, other, epsilon, factor, live);
    if (source == Source::gated) num_saturated = count<Source::gated, T>(x, other, epsilon, factor, live);
  });
  *data<int64_t>(saturated) += num_saturated;
  return q;
}

}  // namespace
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("quantize_watched", TORCH_BOX(&fp8serve::quantize_watched));
  fp8serve::report<fp8serve::kCasting<fp8serve::Numerics::last_bit>>("quantize_watched");
}
