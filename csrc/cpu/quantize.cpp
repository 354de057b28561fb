// quantize, quantize_current, quantize_rowwise, quantize_block: high precision in, FP8 and its scale out.
//
// One loop casts and one loop finds the amax; a granularity is the shape of the tiles that they run over. A
// tile is read twice, the second time from cache (the whole tensor for per-tensor current scaling, which
// memory must serve twice). With a given scale the cast and the amax share one read. Amaxes are compared as
// integers: float order is integer order for magnitudes, and NaN, which does not count, is the only thing
// above infinity.
//
// The loops are plain C++ over branch-free casts (fp8.h) and the compiler vectorises them for each
// instruction set.
#include <torch/csrc/stable/library.h>

#include "check.h"
#include "cpu/cast_rows.h"
#include "cpu/features.h"
#include "cpu/parts.h"
#include "cpu/scratch.h"
#include "cpu/tensors.h"
#include "fp8.h"

namespace fp8serve {
namespace {

constexpr int64_t kBlock = 128;
constexpr int64_t kGrain = 1 << 16;  // elements a task handles: 128 KiB of BF16

struct AmaxRow {
  template <class T>
  static FP8_INLINE void run(const T* x, int64_t n, float* amax) {
    *amax = amax_row(x, n);
  }
};

template <class F>
struct CastRow {
  template <class T>
  static FP8_INLINE void run(const T* x, uint8_t* q, int64_t n, float scale) {
    cast_row<F>(x, q, n, scale);
  }
};

// Cast and amax in one read: a piece of 1024 is still in the first-level cache when it is read again.
template <class F>
struct CastAmaxRow {
  template <class T>
  static FP8_INLINE void run(const T* x, uint8_t* q, int64_t n, float scale, float* amax) {
    constexpr int64_t kPiece = 1024;
    float largest = 0.0f;
    for (int64_t begin = 0; begin < n; begin += kPiece) {
      const int64_t count = begin + kPiece < n ? kPiece : n - begin;
      const float piece = amax_row(x + begin, count);
      largest = piece > largest ? piece : largest;
      cast_row<F>(x + begin, q + begin, count, scale);
    }
    *amax = largest;
  }
};

// A strip of `rows` x `cols`, cut into tiles of `rows` x `width`. Row by row, so that memory is read in
// order: all the tiles' amaxes, all their scales, all the casts. `scales` has room for one scale per tile.
template <class F>
struct QuantizeStrip {
  template <class T>
  static FP8_INLINE void run(const T* x, uint8_t* q, int64_t rows, int64_t cols, int64_t width, bool power_2,
                             bool infinity_is_nan, float* scales, float* scale_inv) {
    const int64_t tiles = cols == 0 ? 1 : (cols + width - 1) / width;
    for (int64_t t = 0; t < tiles; ++t) scales[t] = 0.0f;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t t = 0; t < tiles; ++t) {
        const float amax = amax_row(x + r * cols + t * width, count(cols, width, t));
        scales[t] = amax > scales[t] ? amax : scales[t];
      }
    }
    for (int64_t t = 0; t < tiles; ++t) {
      const float amax = scales[t];
      scales[t] = scale_for(amax, F::max(), power_2);
      scale_inv[t] = inverse_of(scales[t], amax, infinity_is_nan);
    }
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t at = r * cols + t * width;
        cast_row<F>(x + at, q + at, count(cols, width, t), scales[t]);
      }
    }
  }
  static FP8_INLINE int64_t count(int64_t cols, int64_t width, int64_t tile) {
    return (tile + 1) * width < cols ? width : cols - tile * width;
  }
};

// Calls f(begin, count) for [0, n) in grains.
template <class F>
void parallel_grains(int64_t n, const F& f) {
  parallel_tasks((n + kGrain - 1) / kGrain,
                 [&](int64_t task) { f(task * kGrain, std::min(kGrain, n - task * kGrain)); });
}

template <class T>
float amax_of(const T* x, int64_t n) {
  SharedAmax amax;
  parallel_grains(n, [&](int64_t begin, int64_t count) {
    float largest = 0.0f;
    dispatch<AmaxRow>(x + begin, count, &largest);
    amax.raise(largest);
  });
  return amax.value();
}

Tensor empty_like(const Tensor& x, ScalarType dtype) {
  const auto sizes = x.sizes();
  return empty(sizes.data(), sizes.size(), dtype);
}

Tensor checked_input(const Contract& check, const Tensor& x, ScalarType dtype) {
  check.cpu("x", x);
  check.dtype("x", x, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half});
  check.require(dtype == ScalarType::Float8_e4m3fn || dtype == ScalarType::Float8_e5m2, "dtype", "is ",
                torch::headeronly::toString(dtype), ", must be Float8_e4m3fn or Float8_e5m2");
  return dense(x);
}

// Calls f(Type<Format>, Type<Element>).
template <class F>
void with_types(ScalarType format, ScalarType element, const F& f) {
  with_format(format, [&](auto fmt) { with_element(element, [&](auto elem) { f(fmt, elem); }); });
}

}  // namespace

Pair quantize(const Tensor& x_in, const Tensor& scale, ScalarType dtype) {
  const Contract check("quantize");
  const Tensor x = checked_input(check, x_in, dtype);
  check.tensor("scale", scale, {ScalarType::Float}, {});
  Tensor q = empty_like(x, dtype);
  const float s = *data<float>(scale);
  SharedAmax amax;
  with_types(dtype, x.scalar_type(), [&](auto fmt, auto elem) {
    using F = typename decltype(fmt)::type;
    const auto* in = data<typename decltype(elem)::type>(x);
    auto* out = data<uint8_t>(q);
    parallel_grains(x.numel(), [&](int64_t begin, int64_t count) {
      float largest = 0.0f;
      dispatch<CastAmaxRow<F>>(in + begin, out + begin, count, s, &largest);
      amax.raise(largest);
    });
  });
  return {q, scalar(amax.value())};
}

namespace {

Pair quantize_current(const Tensor& x_in, ScalarType dtype, bool power_2, bool infinity_is_nan) {
  const Contract check("quantize_current");
  const Tensor x = checked_input(check, x_in, dtype);
  Tensor q = empty_like(x, dtype);
  float amax = 0.0f, scale = 1.0f;
  with_types(dtype, x.scalar_type(), [&](auto fmt, auto elem) {
    using F = typename decltype(fmt)::type;
    const auto* in = data<typename decltype(elem)::type>(x);
    auto* out = data<uint8_t>(q);
    amax = amax_of(in, x.numel());
    scale = scale_for(amax, F::max(), power_2);
    parallel_grains(x.numel(), [&](int64_t begin, int64_t count) {
      dispatch<CastRow<F>>(in + begin, out + begin, count, scale);
    });
  });
  return {q, scalar(inverse_of(scale, amax, infinity_is_nan))};
}

}  // namespace

Pair quantize_strips(const Tensor& x, ScalarType dtype, bool power_2, int64_t strip_rows, int64_t width,
                     bool infinity_is_nan) {
  const int64_t rows = x.size(0), cols = x.size(1);
  const int64_t strips = (rows + strip_rows - 1) / strip_rows;
  const int64_t tiles = width == 0 ? 1 : (cols + width - 1) / width;
  Tensor q = empty({rows, cols}, dtype);
  Tensor scale_inv = empty({strips, tiles}, ScalarType::Float);
  if (tiles == 0) return {q, scale_inv};
  const int64_t per_task = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, strip_rows * cols));
  with_types(dtype, x.scalar_type(), [&](auto fmt, auto elem) {
    using F = typename decltype(fmt)::type;
    const auto* in = data<typename decltype(elem)::type>(x);
    parallel_tasks((strips + per_task - 1) / per_task, [&](int64_t task) {
      thread_local Scratch scratch;
      float* scales = scratch.get<float>(tiles);
      for (int64_t s = task * per_task; s < std::min(strips, (task + 1) * per_task); ++s) {
        const int64_t offset = s * strip_rows * cols;
        const int64_t count = std::min(strip_rows, rows - s * strip_rows);
        dispatch<QuantizeStrip<F>>(in + offset, data<uint8_t>(q) + offset, count, cols,
                                   width == 0 ? std::max<int64_t>(cols, 1) : width, power_2, infinity_is_nan,
                                   scales, data<float>(scale_inv) + s * tiles);
      }
    });
  });
  return {q, scale_inv};
}

namespace {

Pair quantize_rowwise(const Tensor& x_in, ScalarType dtype, bool power_2, bool infinity_is_nan) {
  const Contract check("quantize_rowwise");
  const Tensor x = checked_input(check, x_in, dtype);
  check.rank("x", x, 2);
  return quantize_strips(x, dtype, power_2, 1, 0, infinity_is_nan);
}

Pair quantize_block(const Tensor& x_in, ScalarType dtype, int64_t block_rows, bool power_2,
                    bool infinity_is_nan) {
  const Contract check("quantize_block");
  const Tensor x = checked_input(check, x_in, dtype);
  check.rank("x", x, 2);
  check.require(block_rows == 1 || block_rows == kBlock, "block_rows", "is ", block_rows,
                ", must be 1 or 128");
  return quantize_strips(x, dtype, power_2, block_rows, kBlock, infinity_is_nan);
}

}  // namespace
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("quantize", TORCH_BOX(&fp8serve::quantize));
  fp8serve::report<fp8serve::kCasting<fp8serve::Numerics::exact>>("quantize");
  m.impl("quantize_current", TORCH_BOX(&fp8serve::quantize_current));
  fp8serve::report<fp8serve::kCasting<fp8serve::Numerics::exact>>("quantize_current");
  m.impl("quantize_rowwise", TORCH_BOX(&fp8serve::quantize_rowwise));
  fp8serve::report<fp8serve::kCasting<fp8serve::Numerics::exact>>("quantize_rowwise");
  m.impl("quantize_block", TORCH_BOX(&fp8serve::quantize_block));
  fp8serve::report<fp8serve::kCasting<fp8serve::Numerics::exact>>("quantize_block");
}
