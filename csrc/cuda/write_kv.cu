// write_kv: writes new keys and values to their slots of the paged caches, and casts them if the caches are
// FP8.
//
// One launch writes both; a block writes the keys or the values of one token. The slots are on the device, so
// the kernel checks them: it skips tokens whose slot is negative (padding) or beyond the cache.
#include <torch/csrc/stable/library.h>

#include "cuda/cast.h"

namespace fp8serve {
namespace {

constexpr int kThreads = 128;

struct Side {
  const void* from;
  void* cache;
  const float* scale;  // null for 1
};

struct Write {
  Side side[2];  // keys, values
  const int64_t* slots;
  int64_t row, capacity;  // elements of a token; slots in the cache
};

// U: the element type of the cache, or its format if kFp8.
template <class T, class U, bool kFp8, bool kAligned>
__global__ void __launch_bounds__(kThreads) write_rows(const __grid_constant__ Write w) {
  after_earlier_kernels();
  const int64_t slot = w.slots[blockIdx.x];
  if (slot < 0 || slot >= w.capacity) return;
  const Side& side = w.side[blockIdx.y];
  const T* from = static_cast<const T*>(side.from) + blockIdx.x * w.row;
  const float scale = side.scale == nullptr ? 1.0f : *side.scale;
  for (int64_t at = static_cast<int64_t>(threadIdx.x) * kChunk; at < w.row; at += kThreads * kChunk) {
    const Chunk x = load_chunk<kAligned>(from, at, w.row);
    if constexpr (kFp8) {
      store_chunk<kAligned>(encode_chunk<U>(x, scale), static_cast<uint8_t*>(side.cache) + slot * w.row, at,
                            w.row);
    } else {
      store_high<kAligned>(x, static_cast<U*>(side.cache) + slot * w.row, at, w.row);
    }
  }
}

void run(const Write& w, ScalarType from, ScalarType to, int64_t tokens, bool fast, Stream stream) {
  const dim3 grid(static_cast<unsigned>(tokens), 2);
  const auto go = [&](auto elem, auto target, auto fp8) {
    using T = typename decltype(elem)::type;
    using U = typename decltype(target)::type;
    launch_early(fast ? write_rows<T, U, fp8.value, true> : write_rows<T, U, fp8.value, false>, grid,
                 kThreads, 0, stream, w);
  };
  with_element(from, [&](auto elem) {
    if (is_fp8(to)) {
      with_format(to, [&](auto format) { go(elem, format, std::true_type{}); });
    } else {
      with_element(to, [&](auto target) { go(elem, target, std::false_type{}); });
    }
  });
}

const float* scale_of(const DeviceContract& check, const char* name, const std::optional<Tensor>& scale) {
  if (!scale) return nullptr;
  check.tensor(name, *scale, {ScalarType::Float}, {});
  return data<const float>(*scale);
}

void write_kv(const Tensor& k_in, const Tensor& v_in, const Tensor& k_cache, const Tensor& v_cache,
              const Tensor& slots_in, const std::optional<Tensor>& k_scale,
              const std::optional<Tensor>& v_scale) {
  const DeviceContract check("write_kv", k_in);
  check.rank("k", k_in, 3);
  const Size t{"T", k_in.size(0)}, heads{"kv_heads", k_in.size(1)}, dim{"head_dim", k_in.size(2)};
  check.tensor("k", k_in, kHigh, {t, heads, dim});
  check.tensor("v", v_in, {k_in.scalar_type()}, {t, heads, dim});
  check.rank("k_cache", k_cache, 4);
  const Size blocks{"blocks", k_cache.size(0)}, size{"block_size", k_cache.size(1)};
  check.tensor("k_cache", k_cache, kStored, {blocks, size, heads, dim});
  check.tensor("v_cache", v_cache, {k_cache.scalar_type()}, {blocks, size, heads, dim});
  check.require(k_cache.is_contiguous(), "k_cache", "must be contiguous, because it is written in place");
  check.require(v_cache.is_contiguous(), "v_cache", "must be contiguous, because it is written in place");
  check.tensor("slots", slots_in, {ScalarType::Long}, {t});
  const OnDevice device(k_in);
  const Tensor k = dense(k_in), v = dense(v_in), slots = dense(slots_in);
  const int64_t row = heads.value() * dim.value();
  const Write w{.side = {{k.data_ptr(), k_cache.data_ptr(), scale_of(check, "k_scale", k_scale)},
                         {v.data_ptr(), v_cache.data_ptr(), scale_of(check, "v_scale", v_scale)}},
                .slots = data<const int64_t>(slots),
                .row = row,
                .capacity = blocks.value() * size.value()};
  bool fast = row % kChunk == 0;
  for (const Tensor* x : {&k, &v, &k_cache, &v_cache}) fast = fast && aligned(x->data_ptr(), 16);
  if (k.numel() > 0) run(w, k.scalar_type(), k_cache.scalar_type(), t.value(), fast, device.stream());
}

}  // namespace
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(FP8SERVE_OPS, FP8SERVE_DEVICE_KEY, m) {
  m.impl("write_kv", TORCH_BOX(&fp8serve::write_kv));
}
