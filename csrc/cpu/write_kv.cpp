// write_kv: new keys and values into their slots of the paged caches, cast on the way when the caches are
// FP8; rotary: heads turned by their position; rotary_write_kv: both.
#include <torch/csrc/stable/library.h>

#include "check.h"
#include "cpu/cast_rows.h"
#include "cpu/isa.h"
#include "cpu/rows.h"
#include "cpu/tensors.h"
#include "fp8.h"

namespace fp8serve {
namespace {

constexpr auto kHigh = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};

struct ConvertRow {
  template <class T, class U>
  static FP8_INLINE void run(const T* x, U* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) store(load(x[i]), out + i);
  }
};
template <class F>
struct EncodeRow {
  template <class T>
  static FP8_INLINE void run(const T* x, uint8_t* out, int64_t n, float scale) {
    cast_row<F>(x, out, n, scale);
  }
};

// One token's heads: x * cos + (-second half, first half) * sin. Nothing overlaps, and saying so lets the
// loop vectorise.
struct RotateHeads {
  template <class T>
  static FP8_INLINE void turn(const T* __restrict a, const T* __restrict b, const T* __restrict cos,
                              const T* __restrict sin, T* __restrict out, float sign, int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
      store(rounded<T>(load(a[i]) * load(cos[i])) + rounded<T>(sign * load(b[i]) * load(sin[i])), out + i);
    }
  }
  template <class T>
  static FP8_INLINE void run(const T* x, const T* cos, const T* sin, T* out, int64_t heads, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t h = 0; h < heads; ++h) {
      const T *first = x + h * dim, *second = first + half;
      turn(first, second, cos, sin, out + h * dim, -1.0f, half);
      turn(second, first, cos + half, sin + half, out + h * dim + half, 1.0f, half);
    }
  }
};

bool is_fp8(ScalarType dtype) {
  return dtype == ScalarType::Float8_e4m3fn || dtype == ScalarType::Float8_e5m2;
}

// x [T, row] into cache rows; a negative slot skips its token.
void write(const Rows& x, const Tensor& cache, const Tensor& slots, const std::optional<Tensor>& scale) {
  const auto* slot = data<const int64_t>(slots);
  const float factor = scale ? *data<float>(*scale) : 1.0f;
  with_element(x.held.scalar_type(), [&](auto from) {
    const auto* in = data<const typename decltype(from)::type>(x.held);
    const auto each = [&](auto* base, const auto& convert) {
      parallel_rows(x.count, x.width, [&](int64_t t) {
        if (slot[t] >= 0) convert(in + t * x.stride, base + slot[t] * x.width);
      });
    };
    if (is_fp8(cache.scalar_type())) {
      with_format(cache.scalar_type(), [&](auto format) {
        using F = typename decltype(format)::type;
        each(data<uint8_t>(cache), [&](auto* a, auto* b) { dispatch<EncodeRow<F>>(a, b, x.width, factor); });
      });
    } else {
      with_element(cache.scalar_type(), [&](auto to) {
        using U = typename decltype(to)::type;
        each(data<U>(cache), [&](auto* a, auto* b) { dispatch<ConvertRow>(a, b, x.width); });
      });
    }
  });
}

// What both ops demand of keys, values, caches, slots and scales.
struct Write {
  const Tensor &k, &v, &k_cache, &v_cache, &slots;
  const std::optional<Tensor>&k_scale, &v_scale;

  void verify(const Contract& check) const {
    const auto stored = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half, ScalarType::Float8_e4m3fn,
                         ScalarType::Float8_e5m2};
    check.rank("k", k, 3);
    const Size t{"T", k.size(0)}, heads{"kv_heads", k.size(1)}, dim{"head_dim", k.size(2)};
    check.tensor("k", k, kHigh, {t, heads, dim});
    check.tensor("v", v, kHigh, {t, heads, dim});
    check.rank("k_cache", k_cache, 4);
    const Size blocks{"blocks", k_cache.size(0)}, size{"block_size", k_cache.size(1)};
    check.tensor("k_cache", k_cache, stored, {blocks, size, heads, dim});
    check.tensor("v_cache", v_cache, {k_cache.scalar_type()}, {blocks, size, heads, dim});
    check.require(k_cache.is_contiguous(), "k_cache", "must be contiguous, because it is written in place");
    check.require(v_cache.is_contiguous(), "v_cache", "must be contiguous, because it is written in place");
    check.tensor("slots", slots, {ScalarType::Long}, {t});
    if (k_scale) check.tensor("k_scale", *k_scale, {ScalarType::Float}, {});
    if (v_scale) check.tensor("v_scale", *v_scale, {ScalarType::Float}, {});
  }

  // Slots as they will be used, none beyond the cache.
  Tensor checked_slots(const Contract& check) const {
    const Tensor out = dense(slots);
    const int64_t capacity = k_cache.size(0) * k_cache.size(1);
    for (int64_t i = 0; i < out.numel(); ++i) {
      const int64_t slot = data<const int64_t>(out)[i];
      check.require(slot < capacity, "slots", "slot ", slot, " is beyond the cache's ", capacity);
    }
    return out;
  }
};

void write_kv(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
              const Tensor& slots_in, const std::optional<Tensor>& k_scale,
              const std::optional<Tensor>& v_scale) {
  const Contract check("write_kv");
  const Write args{k, v, k_cache, v_cache, slots_in, k_scale, v_scale};
  args.verify(check);
  const Tensor slots = args.checked_slots(check);
  write(rows_of(k), k_cache, slots, k_scale);
  write(rows_of(v), v_cache, slots, v_scale);
}

// x [T, heads, dim] turned by cos and sin [T, dim].
Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  const int64_t heads = x.size(1), dim = x.size(2);
  const Tensor out = empty({x.size(0), heads, dim}, x.scalar_type());
  const Rows rows = rows_of(x);
  with_element(x.scalar_type(), [&](auto element) {
    using T = typename decltype(element)::type;
    parallel_rows(rows.count, rows.width, [&](int64_t t) {
      dispatch<RotateHeads>(data<const T>(rows.held) + t * rows.stride, data<const T>(cos) + t * dim,
                            data<const T>(sin) + t * dim, data<T>(out) + t * rows.width, heads, dim);
    });
  });
  return out;
}

Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  const Contract check("rotary");
  check.rank("x", x, 3);
  const Size t{"T", x.size(0)}, heads{"heads", x.size(1)}, dim{"head_dim", x.size(2)};
  check.tensor("x", x, kHigh, {t, heads, dim});
  check.require(dim.value() % 2 == 0, "x", "head_dim is ", dim.value(), ", must be even");
  check.tensor("cos", cos, {x.scalar_type()}, {t, exactly(1), dim});
  check.tensor("sin", sin, {x.scalar_type()}, {t, exactly(1), dim});
  return rotate(x, dense(cos), dense(sin));
}

Tensor rotary_write_kv(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos_in,
                       const Tensor& sin_in, const Tensor& k_cache, const Tensor& v_cache,
                       const Tensor& slots_in, const std::optional<Tensor>& k_scale,
                       const std::optional<Tensor>& v_scale) {
  const Contract check("rotary_write_kv");
  const Write args{k, v, k_cache, v_cache, slots_in, k_scale, v_scale};
  args.verify(check);
  check.rank("q", q, 3);
  const Size t{"T", k.size(0)}, heads{"heads", q.size(1)}, dim{"head_dim", k.size(2)};
  check.tensor("q", q, {k.scalar_type()}, {t, heads, dim});
  check.require(dim.value() % 2 == 0, "q", "head_dim is ", dim.value(), ", must be even");
  check.tensor("cos", cos_in, {k.scalar_type()}, {t, exactly(1), dim});
  check.tensor("sin", sin_in, {k.scalar_type()}, {t, exactly(1), dim});
  const Tensor cos = dense(cos_in), sin = dense(sin_in), slots = args.checked_slots(check);
  write(rows_of(rotate(k, cos, sin)), k_cache, slots, k_scale);
  write(rows_of(v), v_cache, slots, v_scale);
  return rotate(q, cos, sin);
}

}  // namespace
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("rotary", TORCH_BOX(&fp8serve::rotary));
  m.impl("write_kv", TORCH_BOX(&fp8serve::write_kv));
  m.impl("rotary_write_kv", TORCH_BOX(&fp8serve::rotary_write_kv));
}
