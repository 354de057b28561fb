// count_saturated: what serving keeps of every FP8 input, its largest magnitude and how many elements were
// cut off. One launch for both; the values are read (those of a fused cast are computed again) only in the
// rare step whose amax was cut off, which the kernel sees without the host.
#include <torch/csrc/stable/library.h>

#include "cuda/rows.h"
#include "watch.h"

namespace fp8serve {
namespace {

constexpr unsigned kBlocks =
    64;  // enough for the rows of a decoding step; a prompt that saturates waits longer

template <class T>
struct Watch {
  const T *x, *other;
  int64_t x_stride, other_stride;
  const float *scale, *amax;
  float* seen;
  int64_t* saturated;
  const int64_t* rows;  // null for all
  int64_t count, width;
  float eps;
};

// How many of a row's values lie beyond the format, of those that this thread has.
template <class T, bool kAligned, Source kSource>
__device__ __forceinline__ unsigned count_row(const Watch<T>& w, int64_t row, float scale, float* memory) {
  const T *x = w.x + row * w.x_stride, *other = w.other;
  if constexpr (kSource == Source::gated) other += row * w.other_stride;
  float factor = 1.0f;
  if constexpr (kSource == Source::norm) factor = row_factor<kAligned>(x, w.width, w.eps, memory);
  unsigned found = 0;
  for_chunks(w.width, [&](int64_t at) {
    Chunk y = load_chunk<kAligned>(x, at, w.width);
    if constexpr (kSource == Source::norm) y = normed<T>(y, load_chunk<kAligned>(other, at, w.width), factor);
    if constexpr (kSource == Source::gated) y = gated<T>(y, load_chunk<kAligned>(other, at, w.width));
#pragma unroll
    for (int i = 0; i < kChunk; ++i) found += is_cut_off<E4M3>(y.value[i] * scale);
  });
  return found;
}

template <class T, bool kAligned, Source kSource>
__global__ void __launch_bounds__(kRowThreads) count(const __grid_constant__ Watch<T> w) {
  __shared__ float memory[32];
  const float amax = *w.amax, scale = *w.scale;
  if (blockIdx.x == 0 && threadIdx.x == 0) *w.seen = fmaxf(*w.seen, amax);
  if (!is_cut_off<E4M3>(amax * scale)) return;
  const int64_t live = w.rows == nullptr ? w.count : min(w.count, *w.rows);
  for (int64_t row = blockIdx.x; row < live; row += gridDim.x) {
    const auto found = static_cast<float>(count_row<T, kAligned, kSource>(w, row, scale, memory));
    __syncthreads();                               // the sum of squares has been read
    const float total = block_sum(found, memory);  // exact: a row is shorter than 2^24
    __syncthreads();
    if (threadIdx.x == 0 && total > 0.0f) {
      atomicAdd(reinterpret_cast<unsigned long long*>(w.saturated), static_cast<unsigned long long>(total));
    }
  }
}

template <class T>
Watch<T> watch_of(const Rows& x, const std::optional<Rows>& up, const Tensor& other, const Tensor& scale,
                  const Tensor& amax, const Tensor& seen, const Tensor& saturated,
                  const std::optional<Tensor>& rows, float eps) {
  return {.x = data<T>(x.held),
          .other = data<T>(other),
          .x_stride = x.stride,
          .other_stride = up ? up->stride : 0,
          .scale = data<float>(scale),
          .amax = data<float>(amax),
          .seen = data<float>(seen),
          .saturated = data<int64_t>(saturated),
          .rows = rows ? data<const int64_t>(*rows) : nullptr,
          .count = x.count,
          .width = x.width,
          .eps = eps};
}

// Calls f(integral_constant<Source>).
template <class F>
void with_source(Source source, const F& f) {
  if (source == Source::plain) return f(std::integral_constant<Source, Source::plain>{});
  if (source == Source::norm) return f(std::integral_constant<Source, Source::norm>{});
  f(std::integral_constant<Source, Source::gated>{});
}

void count_saturated(const Tensor& x, const std::optional<Tensor>& other_in, const std::optional<double>& eps,
                     const Tensor& scale, const Tensor& amax, const Tensor& seen, const Tensor& saturated,
                     const std::optional<Tensor>& live) {
  const DeviceContract check("count_saturated", x);
  check_counters(check, x, other_in, eps, scale, amax, seen, saturated, live);
  const OnDevice device(x);
  const Source source = source_of(other_in, eps);
  const Rows rows = rows_of(x);
  const std::optional<Rows> up = source == Source::gated ? std::optional(rows_of(*other_in)) : std::nullopt;
  const Tensor other = source == Source::norm ? dense(*other_in) : up ? up->held : x;
  const bool fast = fast_rows(rows) && (!up || fast_rows(*up)) && aligned(other.data_ptr(), 16);
  const unsigned blocks = std::max(1u, static_cast<unsigned>(std::min<int64_t>(rows.count, kBlocks)));
  with_source(source, [&](auto kind) {
    with_element(x.scalar_type(), [&](auto elem) {
      using T = typename decltype(elem)::type;
      const auto w = watch_of<T>(rows, up, other, scale, amax, seen, saturated, live,
                                 static_cast<float>(eps.value_or(0.0)));
      const auto run = [&](auto kernel) {
        launch(kernel, blocks, row_threads(rows.width), 0, device.stream(), w);
      };
      fast ? run(count<T, true, kind.value>) : run(count<T, false, kind.value>);
    });
  });
}

}  // namespace
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(FP8SERVE_OPS, FP8SERVE_DEVICE_KEY, m) {
  m.impl("count_saturated", TORCH_BOX(&fp8serve::count_saturated));
}
