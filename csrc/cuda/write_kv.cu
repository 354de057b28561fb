// write_kv: writes new keys and values to their slots of the paged caches, and casts them if the caches are
// FP8. rotary_write_kv: rotates queries and keys before.
//
// One launch writes both. The slots are on the device, so the kernels check them: they skip tokens whose slot
// is negative (padding) or beyond the cache.
#include <torch/csrc/stable/library.h>

#include "cuda/rotary.h"

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

// A block writes the keys or the values of one token. U: the element type of the cache, or its format if
// kFp8.
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

constexpr int kRotaryThreads = 128;

// Writes eight pairs of a head to the cache. head: where the head begins there, in elements.
template <class U, bool kFp8, bool kAligned>
__device__ __forceinline__ void write_cache(const Pairs& x, void* cache, int64_t head, int64_t begin,
                                            int64_t half, const float* scale_in) {
  if constexpr (kFp8) {
    const float scale = scale_in == nullptr ? 1.0f : *scale_in;
    uint8_t* to = static_cast<uint8_t*>(cache) + head;
    store_chunk<kAligned>(encode_chunk<U>(x.first, scale), to, begin, half);
    store_chunk<kAligned>(encode_chunk<U>(x.second, scale), to + half, begin, half);
  } else {
    store_pairs<kAligned>(x, static_cast<U*>(cache) + head, begin, half);
  }
}

// A thread handles eight pairs of a head of a token. Heads are numbered: those of q, then those of k, then
// those of v.
template <class T, class U, bool kFp8, bool kAligned>
__global__ void __launch_bounds__(kRotaryThreads) rotate_and_write_rows(const __grid_constant__ Rotary r) {
  after_earlier_kernels();
  const int64_t token = blockIdx.x, half = r.dim / 2;
  const uint32_t piece = blockIdx.y * kRotaryThreads + threadIdx.x, per_head = r.pieces_of_head();
  int head = static_cast<int>(piece / per_head);
  const int64_t begin = static_cast<int64_t>(piece % per_head) * kChunk;
  if (head >= r.heads()) return;
  const Pairs cos = load_pairs<kAligned>(static_cast<const T*>(r.cos) + token * r.dim, begin, half),
              sin = load_pairs<kAligned>(static_cast<const T*>(r.sin) + token * r.dim, begin, half);
  const auto load = [&](const Heads& heads) {
    const T* from = static_cast<const T*>(heads.from) + token * heads.token_stride + head * r.dim;
    return load_pairs<kAligned>(from, begin, half);
  };
  if (head < r.q.count) {
    T* to = static_cast<T*>(r.out) + (token * r.q.count + head) * r.dim;
    store_pairs<kAligned>(rotated<T>(load(r.q), cos, sin), to, begin, half);
    return;
  }
  const int64_t slot = r.slots[token];
  if (!r.is_cached(slot)) return;
  head -= r.q.count;
  if (head < r.k.count) {
    const Pairs x = rotated<T>(load(r.k), cos, sin);
    write_cache<U, kFp8, kAligned>(x, r.k_cache, (slot * r.k.count + head) * r.dim, begin, half, r.k_scale);
  } else {
    head -= r.k.count;
    write_cache<U, kFp8, kAligned>(load(r.v), r.v_cache, (slot * r.v.count + head) * r.dim, begin, half,
                                   r.v_scale);
  }
}

// Calls f(Type<element>, Type<element or format of the cache>, bool_constant<whether it is a format>).
template <class F>
void with_cache(ScalarType element, ScalarType cache, const F& f) {
  with_element(element, [&](auto elem) {
    if (is_fp8(cache)) {
      with_format(cache, [&](auto format) { f(elem, format, std::true_type{}); });
    } else {
      with_element(cache, [&](auto target) { f(elem, target, std::false_type{}); });
    }
  });
}

void run(const Write& w, ScalarType from, ScalarType to, int64_t tokens, bool fast, Stream stream) {
  const dim3 grid(static_cast<unsigned>(tokens), 2);
  with_cache(from, to, [&](auto elem, auto target, auto fp8) {
    using T = typename decltype(elem)::type;
    using U = typename decltype(target)::type;
    launch_early(fast ? write_rows<T, U, fp8.value, true> : write_rows<T, U, fp8.value, false>, grid,
                 kThreads, 0, stream, w);
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

Tensor rotary_write_kv(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos,
                       const Tensor& sin, const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots,
                       const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale) {
  const DeviceContract check("rotary_write_kv", q);
  check.rank("q", q, 3);
  check.rank("k", k, 3);
  const Size t{"T", q.size(0)}, heads{"heads", q.size(1)}, dim{"D", q.size(2)},
      kv_heads{"kv_heads", k.size(1)};
  const auto same = {q.scalar_type()};
  check.tensor("q", q, kHigh, {t, heads, dim});
  check.tensor("k", k, same, {t, kv_heads, dim});
  check.tensor("v", v, same, {t, kv_heads, dim});
  check.require(dim.value() % 2 == 0, "q", "head_dim is ", dim.value(), ", must be even");
  const RotaryTarget to = rotary_target(check, {cos, sin, k_cache, v_cache, slots, k_scale, v_scale},
                                        q.scalar_type(), t, kv_heads, dim);
  const OnDevice device(q);
  Tensor out = empty(q, {t.value(), heads.value(), dim.value()}, q.scalar_type());
  if (out.numel() > 0) rotate_and_write(to, q, k, v, out, device);
  return out;
}

}  // namespace

RotaryTarget rotary_target(const DeviceContract& check, const RotaryArguments& in, ScalarType element,
                           Size tokens, Size kv_heads, Size dim) {
  check.rank("k_cache", in.k_cache, 4);
  const Size blocks{"blocks", in.k_cache.size(0)}, size{"block_size", in.k_cache.size(1)};
  check.tensor("cos", in.cos, {element}, {tokens, exactly(1), dim});
  check.tensor("sin", in.sin, {element}, {tokens, exactly(1), dim});
  check.tensor("k_cache", in.k_cache, kStored, {blocks, size, kv_heads, dim});
  check.tensor("v_cache", in.v_cache, {in.k_cache.scalar_type()}, {blocks, size, kv_heads, dim});
  check.require(in.k_cache.is_contiguous(), "k_cache", "must be contiguous, because it is written in place");
  check.require(in.v_cache.is_contiguous(), "v_cache", "must be contiguous, because it is written in place");
  check.tensor("slots", in.slots, {ScalarType::Long}, {tokens});
  const OnDevice device(in.k_cache);  // for the copies
  RotaryTarget to{.cos = dense(in.cos),
                  .sin = dense(in.sin),
                  .slots = dense(in.slots),
                  .cache = in.k_cache.scalar_type(),
                  .rotary = {}};
  to.rotary = {.q = {},
               .k = {},
               .v = {},
               .cos = to.cos.data_ptr(),
               .sin = to.sin.data_ptr(),
               .out = nullptr,
               .k_cache = in.k_cache.data_ptr(),
               .v_cache = in.v_cache.data_ptr(),
               .k_scale = scale_of(check, "k_scale", in.k_scale),
               .v_scale = scale_of(check, "v_scale", in.v_scale),
               .slots = data<const int64_t>(to.slots),
               .capacity = blocks.value() * size.value(),
               .dim = static_cast<int>(dim.value())};
  return to;
}

void rotate_and_write(const RotaryTarget& to, const Tensor& q, const Tensor& k, const Tensor& v,
                      const Tensor& out, const OnDevice& device) {
  const HeadsOf from_q(q), from_k(k), from_v(v);
  Rotary r = to.rotary;
  r.q = from_q.heads, r.k = from_k.heads, r.v = from_v.heads, r.out = out.data_ptr();
  const bool fast = fast_pairs(r.dim, {r.q, r.k, r.v}, {r.cos, r.sin, r.k_cache, r.v_cache});
  const int64_t pieces = r.heads() * r.pieces_of_head();
  const dim3 grid(static_cast<unsigned>(q.size(0)), static_cast<unsigned>(ceil_over(pieces, kRotaryThreads)));
  with_cache(q.scalar_type(), to.cache, [&](auto elem, auto target, auto fp8) {
    using T = typename decltype(elem)::type;
    using U = typename decltype(target)::type;
    launch_early(
        fast ? rotate_and_write_rows<T, U, fp8.value, true> : rotate_and_write_rows<T, U, fp8.value, false>,
        grid, kRotaryThreads, 0, device.stream(), r);
  });
}

}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(FP8SERVE_OPS, FP8SERVE_DEVICE_KEY, m) {
  m.impl("write_kv", TORCH_BOX(&fp8serve::write_kv));
  m.impl("rotary_write_kv", TORCH_BOX(&fp8serve::rotary_write_kv));
}
