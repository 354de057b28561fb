// write_kv: writes new keys and values into their slots of the paged caches and casts them if the caches are
// FP8; rotary: rotates heads by their positions; rotary_write_kv: both.
#include <torch/csrc/stable/library.h>

#include "check.h"
#include "cpu/cast_rows.h"
#include "cpu/elementwise.h"
#include "cpu/features.h"
#include "cpu/rows.h"
#include "cpu/scratch.h"
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

struct RotateHeads {
  template <class T>
  static FP8_INLINE void run(const T* x, const T* cos, const T* sin, T* out, int64_t heads, int64_t dim) {
    rotate_heads(x, cos, sin, out, heads, dim);
  }
};

bool is_fp8(ScalarType dtype) {
  return dtype == ScalarType::Float8_e4m3fn || dtype == ScalarType::Float8_e5m2;
}

// Writes rows of T into cache rows, except for tokens with a negative slot. source(t) returns token t's row.
template <class T, class Source>
void write(int64_t width, const Tensor& cache, const Tensor& slots, const std::optional<Tensor>& scale,
           const Source& source) {
  const auto* slot = data<const int64_t>(slots);
  const float factor = scale ? *data<float>(*scale) : 1.0f;
  const auto write_tokens = [&](auto* base, const auto& convert) {
    parallel_rows(slots.numel(), width, [&](int64_t t) {
      if (slot[t] >= 0) convert(source(t), base + slot[t] * width);
    });
  };
  if (is_fp8(cache.scalar_type())) {
    with_format(cache.scalar_type(), [&](auto format) {
      using F = typename decltype(format)::type;
      write_tokens(data<uint8_t>(cache),
                   [&](const T* x, auto* out) { dispatch<EncodeRow<F>>(x, out, width, factor); });
    });
  } else {
    with_element(cache.scalar_type(), [&](auto to) {
      using U = typename decltype(to)::type;
      write_tokens(data<U>(cache), [&](const T* x, auto* out) { dispatch<ConvertRow>(x, out, width); });
    });
  }
}

void write_rows(const Tensor& x, const Tensor& cache, const Tensor& slots,
                const std::optional<Tensor>& scale) {
  const Rows rows = rows_of(x);
  with_element(x.scalar_type(), [&](auto element) {
    using T = typename decltype(element)::type;
    write<T>(rows.width, cache, slots, scale,
             [&](int64_t t) { return data<const T>(rows.tensor) + t * rows.stride; });
  });
}

// The contract of both ops for keys, values, caches, slots and scales.
struct Write {
  const Tensor &k, &v, &k_cache, &v_cache, &slots;
  const std::optional<Tensor>&k_scale, &v_scale;

  void verify(const Contract& check) const {
    const auto cache_types = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half,
                              ScalarType::Float8_e4m3fn, ScalarType::Float8_e5m2};
    check.rank("k", k, 3);
    const Size t{"T", k.size(0)}, heads{"kv_heads", k.size(1)}, dim{"head_dim", k.size(2)};
    check.tensor("k", k, kHigh, {t, heads, dim});
    check.tensor("v", v, kHigh, {t, heads, dim});
    check.rank("k_cache", k_cache, 4);
    const Size blocks{"blocks", k_cache.size(0)}, size{"block_size", k_cache.size(1)};
    check.tensor("k_cache", k_cache, cache_types, {blocks, size, heads, dim});
    check.tensor("v_cache", v_cache, {k_cache.scalar_type()}, {blocks, size, heads, dim});
    check.require(k_cache.is_contiguous(), "k_cache", "must be contiguous, because it is written in place");
    check.require(v_cache.is_contiguous(), "v_cache", "must be contiguous, because it is written in place");
    check.tensor("slots", slots, {ScalarType::Long}, {t});
    if (k_scale) check.tensor("k_scale", *k_scale, {ScalarType::Float}, {});
    if (v_scale) check.tensor("v_scale", *v_scale, {ScalarType::Float}, {});
  }

  // Returns the dense slots after checking that none is beyond the cache.
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
  write_rows(k, k_cache, slots, k_scale);
  write_rows(v, v_cache, slots, v_scale);
}

// The rows of x [T, heads, dim], and their rotation by cos and sin [T, dim].
struct Rotation {
  Rows rows;
  int64_t heads, dim;
  Tensor cos, sin;
  Rotation(const Tensor& x, const Tensor& cos_in, const Tensor& sin_in)
      : rows(rows_of(x)), heads(x.size(1)), dim(x.size(2)), cos(dense(cos_in)), sin(dense(sin_in)) {}

  template <class T>
  void row(int64_t t, T* out) const {
    dispatch<RotateHeads>(data<const T>(rows.tensor) + t * rows.stride, data<const T>(cos) + t * dim,
                          data<const T>(sin) + t * dim, out, heads, dim);
  }
};

Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  const Rotation rotation(x, cos, sin);
  const int64_t width = rotation.rows.width;
  const Tensor out = empty({x.size(0), rotation.heads, rotation.dim}, x.scalar_type());
  with_element(x.scalar_type(), [&](auto element) {
    using T = typename decltype(element)::type;
    parallel_rows(rotation.rows.count, width, [&](int64_t t) { rotation.row(t, data<T>(out) + t * width); });
  });
  return out;
}

// Rotates x and writes it into the cache, one row at a time, so that there is no rotated copy of x.
void rotate_into(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& cache,
                 const Tensor& slots, const std::optional<Tensor>& scale) {
  const Rotation rotation(x, cos, sin);
  with_element(x.scalar_type(), [&](auto element) {
    using T = typename decltype(element)::type;
    write<T>(rotation.rows.width, cache, slots, scale, [&](int64_t t) {
      thread_local Scratch scratch;
      T* row = scratch.get<T>(rotation.rows.width);
      rotation.row(t, row);
      return row;
    });
  });
}

Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  const Contract check("rotary");
  check.rank("x", x, 3);
  const Size t{"T", x.size(0)}, heads{"heads", x.size(1)}, dim{"head_dim", x.size(2)};
  check.tensor("x", x, kHigh, {t, heads, dim});
  check.require(dim.value() % 2 == 0, "x", "head_dim is ", dim.value(), ", must be even");
  check.tensor("cos", cos, {x.scalar_type()}, {t, exactly(1), dim});
  check.tensor("sin", sin, {x.scalar_type()}, {t, exactly(1), dim});
  return rotate(x, cos, sin);
}

Tensor rotary_write_kv(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos,
                       const Tensor& sin, const Tensor& k_cache, const Tensor& v_cache,
                       const Tensor& slots_in, const std::optional<Tensor>& k_scale,
                       const std::optional<Tensor>& v_scale) {
  const Contract check("rotary_write_kv");
  const Write args{k, v, k_cache, v_cache, slots_in, k_scale, v_scale};
  args.verify(check);
  check.rank("q", q, 3);
  const Size t{"T", k.size(0)}, heads{"heads", q.size(1)}, dim{"head_dim", k.size(2)};
  check.tensor("q", q, {k.scalar_type()}, {t, heads, dim});
  check.require(dim.value() % 2 == 0, "q", "head_dim is ", dim.value(), ", must be even");
  check.tensor("cos", cos, {k.scalar_type()}, {t, exactly(1), dim});
  check.tensor("sin", sin, {k.scalar_type()}, {t, exactly(1), dim});
  const Tensor slots = args.checked_slots(check);
  rotate_into(k, cos, sin, k_cache, slots, k_scale);
  write_rows(v, v_cache, slots, v_scale);
  return rotate(q, cos, sin);
}

}  // namespace
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("rotary", TORCH_BOX(&fp8serve::rotary));
  fp8serve::report<fp8serve::kVector<fp8serve::Numerics::exact>>("rotary");
  m.impl("write_kv", TORCH_BOX(&fp8serve::write_kv));
  fp8serve::report<fp8serve::kCasting<fp8serve::Numerics::exact>>("write_kv");
  m.impl("rotary_write_kv", TORCH_BOX(&fp8serve::rotary_write_kv));
  fp8serve::report<fp8serve::kCasting<fp8serve::Numerics::exact>>("rotary_write_kv");
}
