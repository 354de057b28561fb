// write_kv: new keys and values into their slots of the paged caches, cast on the way when the caches are
// FP8.
#include <torch/csrc/stable/library.h>

#include "check.h"
#include "cpu/isa.h"
#include "cpu/tensors.h"
#include "fp8.h"

namespace fp8serve {
namespace {

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
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<uint8_t>(encode<F>(load(x[i]) * scale));
  }
};

bool is_fp8(ScalarType dtype) {
  return dtype == ScalarType::Float8_e4m3fn || dtype == ScalarType::Float8_e5m2;
}

// x [T, row] into cache rows; a negative slot skips its token.
void write(const Tensor& x, const Tensor& cache, const Tensor& slots, const std::optional<Tensor>& scale,
           int64_t row) {
  const auto* slot = data<const int64_t>(slots);
  const float factor = scale ? *data<float>(*scale) : 1.0f;
  with_element(x.scalar_type(), [&](auto from) {
    const auto* in = data<const typename decltype(from)::type>(x);
    const auto each = [&](auto* base, const auto& convert) {
      for (int64_t t = 0; t < slots.numel(); ++t) {
        if (slot[t] >= 0) convert(in + t * row, base + slot[t] * row);
      }
    };
    if (is_fp8(cache.scalar_type())) {
      with_format(cache.scalar_type(), [&](auto format) {
        using F = typename decltype(format)::type;
        each(data<uint8_t>(cache), [&](auto* a, auto* b) { dispatch<EncodeRow<F>>(a, b, row, factor); });
      });
    } else {
      with_element(cache.scalar_type(), [&](auto to) {
        using U = typename decltype(to)::type;
        each(data<U>(cache), [&](auto* a, auto* b) { dispatch<ConvertRow>(a, b, row); });
      });
    }
  });
}

void write_kv(const Tensor& k_in, const Tensor& v_in, const Tensor& k_cache, const Tensor& v_cache,
              const Tensor& slots_in, const std::optional<Tensor>& k_scale,
              const std::optional<Tensor>& v_scale) {
  const Contract check("write_kv");
  const auto high = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
  const auto stored = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half, ScalarType::Float8_e4m3fn,
                       ScalarType::Float8_e5m2};
  check.rank("k", k_in, 3);
  const Size t{"T", k_in.size(0)}, heads{"kv_heads", k_in.size(1)}, dim{"head_dim", k_in.size(2)};
  check.tensor("k", k_in, high, {t, heads, dim});
  check.tensor("v", v_in, high, {t, heads, dim});
  check.rank("k_cache", k_cache, 4);
  const Size blocks{"blocks", k_cache.size(0)}, size{"block_size", k_cache.size(1)};
  check.tensor("k_cache", k_cache, stored, {blocks, size, heads, dim});
  check.tensor("v_cache", v_cache, {k_cache.scalar_type()}, {blocks, size, heads, dim});
  check.require(k_cache.is_contiguous(), "k_cache", "must be contiguous, because it is written in place");
  check.require(v_cache.is_contiguous(), "v_cache", "must be contiguous, because it is written in place");
  check.tensor("slots", slots_in, {ScalarType::Long}, {t});
  if (k_scale) check.tensor("k_scale", *k_scale, {ScalarType::Float}, {});
  if (v_scale) check.tensor("v_scale", *v_scale, {ScalarType::Float}, {});
  const Tensor k = dense(k_in), v = dense(v_in), slots = dense(slots_in);
  const int64_t capacity = blocks.value() * size.value();
  for (int64_t i = 0; i < slots.numel(); ++i) {
    const int64_t slot = data<const int64_t>(slots)[i];
    check.require(slot < capacity, "slots", "slot ", slot, " is beyond the cache's ", capacity);
  }
  write(k, k_cache, slots, k_scale, heads.value() * dim.value());
  write(v, v_cache, slots, v_scale, heads.value() * dim.value());
}

}  // namespace
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) { m.impl("write_kv", TORCH_BOX(&fp8serve::write_kv)); }
