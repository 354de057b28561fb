// Rotary embedding of new queries and keys, and the writing of keys and values to the paged caches: what the
// kernel of rotary_write_kv (write_kv.cu) and the product that does the same (gemm_skinny.cu) work on.
#pragma once

#include <optional>

#include "cuda/rows.h"

namespace fp8serve {

struct Rotary {
  Heads q, k, v;
  const void *cos, *sin;  // [tokens, dim]
  void *out, *k_cache, *v_cache;
  const float *k_scale, *v_scale;  // null for 1
  const int64_t* slots;            // [tokens]; tokens with slots outside of [0, capacity) are not cached
  int64_t capacity;
  int dim;

  __host__ __device__ int heads() const { return q.count + k.count + v.count; }
  __host__ __device__ uint32_t pieces_of_head() const { return (dim / 2 + kChunk - 1) / kChunk; }
  __device__ __forceinline__ bool is_cached(int64_t slot) const { return slot >= 0 && slot < capacity; }
};

// The arguments of an op that rotates heads and writes to the caches.
struct RotaryArguments {
  const Tensor &cos, &sin, &k_cache, &v_cache, &slots;
  const std::optional<Tensor>&k_scale, &v_scale;
};

// The checked arguments. `rotary` has everything but q, k, v and out.
struct RotaryTarget {
  Tensor cos, sin, slots;  // contiguous
  ScalarType cache;
  Rotary rotary;
};

// Checks the arguments for heads of `element` elements.
RotaryTarget rotary_target(const DeviceContract& check, const RotaryArguments& in, ScalarType element,
                           Size tokens, Size kv_heads, Size dim);

// Rotates q [tokens, heads, dim] into `out`, rotates and writes k, and writes v. All have one element type.
void rotate_and_write(const RotaryTarget& to, const Tensor& q, const Tensor& k, const Tensor& v,
                      const Tensor& out, const OnDevice& device);

}  // namespace fp8serve
