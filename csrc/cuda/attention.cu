// paged_attention: causal attention of new tokens over paged caches of FP32, BF16, FP16 or FP8, with
// grouped heads.
//
// A row is one query token of one head. A block handles 16 neighbouring rows of a sequence that share a kv
// head (row r is token r / group, so the heads of a group read their keys once). It walks the keys in
// tiles, which it converts to FP32 in shared memory. Keys are divided into segments of 512 at absolute
// positions. Every segment starts a new softmax, and the segments are merged into the rows' result in
// order. Either one block walks all segments (prefill), or each segment has a block of its own and
// `merge_segments` merges them (decoding, few rows): the operations and their order are the same. So a
// row's result depends, to the last bit, on its own query and context alone: not on the batch, and not on
// how a prompt was split.
//
// This kernel computes in FP32 without tensor cores and supports every type and every width up to 512.
// attention_tensor.cu has faster kernels for BF16 queries.
#include <torch/csrc/stable/library.h>

#include "cuda/attention.h"

namespace fp8serve {
namespace attention {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 16;
constexpr int kSegment = 512;
constexpr int kColumns = 128;                       // threads across head_dim when values are summed
constexpr int kHalf = kRows * kColumns / kThreads;  // rows whose values a thread sums: 8
constexpr int kMaxDim = 512;

// An FP8 cache's element.
template <class F>
struct Code {
  uint8_t bits;
};

// Eight elements, loaded at once: one access of 8 or 16 bytes, or two of 16.
template <class C>
struct alignas(sizeof(C) == 1 ? 8 : 16) Eight {
  C element[kChunk];
};

// --- shared memory

template <int kWide>  // head_dim in units of 128: 1, 2 or 4
struct Shared {
  static constexpr int kKeys = 64 / kWide, kDim = kWide * kColumns;
  float q[kRows][kDim];
  float k[kKeys][kDim + 4];  // padded: a warp reads 32 keys at the same dimension
  float v[kKeys][kDim];
  float weight[kRows][kKeys];
  float maximum[kRows], sum[kRows], correction[kRows];
};

template <class C>
__device__ __forceinline__ float decoded(C x) {
  return load(x);
}
template <class F>
__device__ __forceinline__ float decoded(Code<F> x) {
  return half_to_float(static_cast<uint16_t>(decode_pair<is_e5m2<F>>(x.bits) & 0xffff));
}

// Loads keys [begin, begin + kKeys) of one of the caches into `tile` as FP32, with zeros from key `end` on.
// Threads load eight elements at once if the heads are aligned.
template <class C, int kKeys, int kPitch>
__device__ __forceinline__ void gather(const Work& w, const void* cache, const Rows& rows, int begin, int end,
                                       float (*tile)[kPitch]) {
  const int chunks = (w.dim + kChunk - 1) / kChunk;
  const int* table = w.tables + static_cast<int64_t>(rows.sequence) * w.max_blocks;
  for (int i = static_cast<int>(threadIdx.x); i < kKeys * chunks; i += kThreads) {
    const int key = begin + i / chunks, at = i % chunks * kChunk;
    float* to = &tile[i / chunks][at];
    if (key >= end) {
      for (int e = 0; e < kChunk; ++e) to[e] = 0.0f;
      continue;
    }
    const int64_t slot = static_cast<int64_t>(table[key / w.block_size]) * w.block_size + key % w.block_size;
    const C* from = static_cast<const C*>(cache) + (slot * w.kv_heads + blockIdx.y) * w.dim + at;
    if (w.whole) {
      const Eight<C> eight = *reinterpret_cast<const Eight<C>*>(from);
      for (int e = 0; e < kChunk; ++e) to[e] = decoded(eight.element[e]);
    } else {
      for (int e = 0; e < kChunk; ++e) to[e] = at + e < w.dim ? decoded(from[e]) : 0.0f;
    }
  }
}

// --- one tile of keys

// weight[r][key] = q[r] . k[key], after the soft cap; minus infinity for keys that the row must not see.
template <int kWide>
__device__ __forceinline__ void score(const Work& w, const Rows& rows, Shared<kWide>& shared, int begin) {
  constexpr int kKeys = Shared<kWide>::kKeys, kEach = kRows * kKeys / kThreads;
  const int key = static_cast<int>(threadIdx.x) % kKeys, top = static_cast<int>(threadIdx.x) / kKeys * kEach;
  float dot[kEach] = {};
  for (int d = 0; d < w.dim; d += 4) {
    const float4 k = *reinterpret_cast<const float4*>(&shared.k[key][d]);
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
      const float4 q = *reinterpret_cast<const float4*>(&shared.q[top + r][d]);
      dot[r] = fmaf(q.x, k.x, dot[r]);
      dot[r] = fmaf(q.y, k.y, dot[r]);
      dot[r] = fmaf(q.z, k.z, dot[r]);
      dot[r] = fmaf(q.w, k.w, dot[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    const int behind = position_of(w, rows, top + r) - begin - key;
    const bool seen = top + r < rows.count && behind >= 0 && behind < w.window;
    const float score = w.softcap == 0.0f ? dot[r] : w.softcap * tanhf(dot[r] / w.softcap);
    shared.weight[top + r][key] = seen ? score : -INFINITY;
  }
}

__device__ __forceinline__ float lanes_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

// Turns scores into weights. Each warp handles two rows. Masked keys get a weight of exactly 0 and leave
// maximum and sum unchanged.
template <int kWide>
__device__ __forceinline__ void soften(Shared<kWide>& shared) {
  constexpr int kKeys = Shared<kWide>::kKeys;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int r = static_cast<int>(threadIdx.x) / 32; r < kRows; r += kThreads / 32) {
    float top = -INFINITY;
    for (int key = lane; key < kKeys; key += 32) top = fmaxf(top, shared.weight[r][key]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
    const float before = shared.maximum[r], now = fmaxf(before, top);
    float sum = 0.0f;
    for (int key = lane; key < kKeys; key += 32) {
      const float score = shared.weight[r][key];
      const float weight = score == -INFINITY ? 0.0f : expf(score - now);
      shared.weight[r][key] = weight;
      sum += weight;
    }
    sum = lanes_sum(sum);
    __syncwarp();  // every lane has read shared.maximum[r]
    if (lane == 0) {
      const float correction = before == -INFINITY ? 0.0f : expf(before - now);
      shared.maximum[r] = now;
      shared.sum[r] = fmaf(shared.sum[r], correction, sum);
      shared.correction[r] = correction;
    }
  }
}

template <int kWide>
using Sums = float[kWide][kHalf];

// sums = sums * correction + weight x v. Weights of 0 are skipped, because the value of a key that the row
// does not see may be NaN.
template <int kWide>
__device__ __forceinline__ void gather_values(Sums<kWide>& sums, const Shared<kWide>& shared) {
  const int column = static_cast<int>(threadIdx.x) % kColumns,
            top = static_cast<int>(threadIdx.x) / kColumns * kHalf;
#pragma unroll
  for (int r = 0; r < kHalf; ++r) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) sums[i][r] *= shared.correction[top + r];
  }
  for (int key = 0; key < Shared<kWide>::kKeys; ++key) {
#pragma unroll
    for (int r = 0; r < kHalf; ++r) {
      const float weight = shared.weight[top + r][key];
      if (weight == 0.0f) continue;
#pragma unroll
      for (int i = 0; i < kWide; ++i)
        sums[i][r] = fmaf(weight, shared.v[key][column + i * kColumns], sums[i][r]);
    }
  }
}

// --- segments

// How two parts of a softmax are merged: the maximum of both, and the factors of their sums.
struct Merge {
  float maximum, old_weight, new_weight;
};
__device__ __forceinline__ Merge merge(float old_maximum, float new_maximum) {
  const float maximum = fmaxf(old_maximum, new_maximum);
  return {maximum, old_maximum == -INFINITY ? 0.0f : expf(old_maximum - maximum),
          new_maximum == -INFINITY ? 0.0f : expf(new_maximum - maximum)};
}
__device__ __forceinline__ float merged(const Merge& m, float old_value, float new_value) {
  return fmaf(new_value, m.new_weight, __fmul_rn(old_value, m.old_weight));
}

// A head's sink is merged as one more part: a key with the sink's logit and no value. Returns the new sum
// and the factor of the values.
struct Sunk {
  float sum, value_weight;
};
__device__ __forceinline__ Sunk with_sink(const Work& w, int64_t head, float maximum, float sum) {
  if (w.sinks == nullptr) return {sum, 1.0f};
  const Merge m = merge(maximum, w.sinks[head % w.heads]);
  return {merged(m, sum, 1.0f), m.old_weight};
}

// Attends to one segment, keys [begin, end): writes the maximum and the sum of the 16 rows to shared memory
// and the weighted values of the thread's rows to `sums`. Tiles that no row sees are skipped.
template <class C, int kWide>
__device__ __forceinline__ void walk_segment(const Work& w, const Rows& rows, Shared<kWide>& shared,
                                             Sums<kWide>& sums, int begin, int end) {
  constexpr int kKeys = Shared<kWide>::kKeys, kDim = Shared<kWide>::kDim;
  if (threadIdx.x < kRows) shared.maximum[threadIdx.x] = -INFINITY, shared.sum[threadIdx.x] = 0.0f;
  for (int i = 0; i < kWide; ++i) {
    for (int r = 0; r < kHalf; ++r) sums[i][r] = 0.0f;
  }
  for (int at = max(begin, first_key(w, rows) / kKeys * kKeys); at < end; at += kKeys) {
    __syncthreads();  // no thread reads the previous tile any more
    gather<C, kKeys, kDim + 4>(w, w.k, rows, at, end, shared.k);
    gather<C, kKeys, kDim>(w, w.v, rows, at, end, shared.v);
    __syncthreads();
    score(w, rows, shared, at);
    __syncthreads();
    soften(shared);
    __syncthreads();
    gather_values(sums, shared);
  }
}

template <int kWide>
__device__ __forceinline__ void load_queries(const Work& w, const Rows& rows, Shared<kWide>& shared) {
  constexpr int kDim = Shared<kWide>::kDim;
  const float scale = w.softmax_scale * factor(w.k_scale);
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kDim; i += kThreads) {
    const int r = i / kDim, d = i % kDim;
    const bool real = r < rows.count && d < w.dim;
    shared.q[r][d] = real ? load(w.q, head_of(w, rows, r) * w.dim + d, w.query) * scale : 0.0f;
  }
}

// Calls f(row of the tile, row of the thread, dimension, dimension / 128) for each of the thread's sums
// whose row and dimension exist.
template <int kWide, class F>
__device__ __forceinline__ void for_sums(const Work& w, const Rows& rows, const F& f) {
  const int column = static_cast<int>(threadIdx.x) % kColumns,
            top = static_cast<int>(threadIdx.x) / kColumns * kHalf;
#pragma unroll
  for (int r = 0; r < kHalf; ++r) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      const int d = column + i * kColumns;
      if (top + r < rows.count && d < w.dim) f(top + r, r, d, i);
    }
  }
}

// Attends to all segments in order, merges them and stores the result.
template <class C, int kWide>
__device__ __forceinline__ void walk_all(const Work& w, const Rows& rows, Shared<kWide>& shared, int end) {
  const int top = static_cast<int>(threadIdx.x) / kColumns * kHalf;
  Sums<kWide> total = {}, part;
  float maximum[kHalf], sum[kHalf] = {};
#pragma unroll
  for (int r = 0; r < kHalf; ++r) maximum[r] = -INFINITY;
  for (int begin = first_key(w, rows) / kSegment * kSegment; begin < end; begin += kSegment) {
    walk_segment<C>(w, rows, shared, part, begin, min(end, begin + kSegment));
#pragma unroll
    for (int r = 0; r < kHalf; ++r) {
      const Merge m = merge(maximum[r], shared.maximum[top + r]);
      maximum[r] = m.maximum;
      sum[r] = merged(m, sum[r], shared.sum[top + r]);
#pragma unroll
      for (int i = 0; i < kWide; ++i) total[i][r] = merged(m, total[i][r], part[i][r]);
    }
    __syncthreads();
  }
  const float scale = factor(w.v_scale);
  for_sums<kWide>(w, rows, [&](int row, int r, int d, int i) {
    const int64_t head = head_of(w, rows, row);
    const Sunk sunk = with_sink(w, head, maximum[r], sum[r]);
    store(quotient(total[i][r] * sunk.value_weight, sunk.sum) * scale, w.out, head * w.dim + d, w.query);
  });
}

template <class C, int kWide>
__global__ void __launch_bounds__(kThreads, 1) attend(const __grid_constant__ Work w) {
  after_earlier_kernels();
  auto& shared = *reinterpret_cast<Shared<kWide>*>(dynamic_shared());
  const Rows rows = rows_of<kRows>(w, static_cast<int>(blockIdx.x));
  if (rows.count == 0) return;
  const int end = position_of(w, rows, rows.count - 1) + 1;  // keys that the last row sees
  load_queries(w, rows, shared);
  if (w.values == nullptr) return walk_all<C>(w, rows, shared, end);
  const int segment = static_cast<int>(blockIdx.z), begin = segment * kSegment;
  if (begin >= end || begin + kSegment <= first_key(w, rows)) return;
  const int64_t base = segment * rows_in_all(w);
  Sums<kWide> sums;
  walk_segment<C>(w, rows, shared, sums, begin, min(end, begin + kSegment));
  for_sums<kWide>(w, rows, [&](int row, int r, int d, int i) {
    const int64_t at = base + head_of(w, rows, row);
    w.values[at * w.dim + d] = sums[i][r];
    if (d == 0) w.maxima[at] = shared.maximum[row], w.sums[at] = shared.sum[row];
  });
}

// A block merges the segments of one token of one head, in order.
__global__ void __launch_bounds__(kColumns) merge_segments(const __grid_constant__ Work w) {
  after_earlier_kernels();
  const int token = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
  const int end = keys_of(w, token);
  const int64_t all = rows_in_all(w);
  const int64_t row = static_cast<int64_t>(token) * w.heads + head;
  const float scale = factor(w.v_scale);
  for (int d = static_cast<int>(threadIdx.x); d < w.dim; d += kColumns) {
    float maximum = -INFINITY, sum = 0.0f, value = 0.0f;
    for (int segment = max(end - w.window, 0) / kSegment; segment * kSegment < end; ++segment) {
      const int64_t at = segment * all + row;
      const Merge m = merge(maximum, w.maxima[at]);
      maximum = m.maximum;
      sum = merged(m, sum, w.sums[at]);
      value = merged(m, value, w.values[at * w.dim + d]);
    }
    const Sunk sunk = with_sink(w, row, maximum, sum);
    store(quotient(value * sunk.value_weight, sunk.sum) * scale, w.out, row * w.dim + d, w.query);
  }
}

// --- op

template <class F>
void with_cache(ScalarType dtype, const F& f) {
  if (dtype == ScalarType::Float8_e4m3fn) return f(Type<Code<E4M3>>{});
  if (dtype == ScalarType::Float8_e5m2) return f(Type<Code<E5M2>>{});
  with_element(dtype, f);
}

template <class F>
void with_width(int dim, const F& f) {
  if (dim <= kColumns) return f(std::integral_constant<int, 1>{});
  if (dim <= 2 * kColumns) return f(std::integral_constant<int, 2>{});
  f(std::integral_constant<int, 4>{});
}

// Returns whether each segment gets a block of its own, which is faster if there are too few rows to fill
// the device. The result is the same.
bool spread(const Work& w, int64_t tiles, const OnDevice& device) {
  return w.segments > 1 && tiles * w.kv_heads < 2 * device.multiprocessors();
}

void run(const Call& call, const OnDevice& device, const Tensor& allocator) {
  Work w = call.work;
  const int64_t tiles = tiles_of(w, call.tokens, kRows);
  const bool apart = spread(w, tiles, device);
  std::optional<Tensor> parts;
  if (apart) parts = make_parts(w, call.tokens, allocator);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(w.kv_heads),
                  apart ? static_cast<unsigned>(w.segments) : 1);
  with_cache(call.cache, [&](auto element) {
    with_width(w.dim, [&](auto wide) {
      launch_early(attend<typename decltype(element)::type, wide.value>, grid, kThreads,
                   static_cast<int>(sizeof(Shared<wide.value>)), device.stream(), w);
    });
  });
  if (!apart) return;
  launch_early(merge_segments, dim3(static_cast<unsigned>(call.tokens), static_cast<unsigned>(w.heads)),
               kColumns, 0, device.stream(), w);
}

const float* scale_of(const DeviceContract& check, const char* name, const std::optional<Tensor>& scale) {
  if (!scale) return nullptr;
  check.tensor(name, *scale, {ScalarType::Float}, {});
  return data<const float>(*scale);
}

Tensor paged_attention(const Tensor& q_in, const Tensor& k_cache, const Tensor& v_cache,
                       const Tensor& block_tables, const Tensor& context_lens, const Tensor& query_starts,
                       const std::optional<Tensor>& k_scale_inv, const std::optional<Tensor>& v_scale_inv,
                       double softmax_scale, std::optional<int64_t> window, std::optional<double> softcap,
                       const std::optional<Tensor>& sinks) {
  const DeviceContract check("paged_attention", q_in);
  check.rank("q", q_in, 3);
  const Size t{"T", q_in.size(0)}, heads{"heads", q_in.size(1)}, dim{"head_dim", q_in.size(2)};
  check.tensor("q", q_in, kHigh, {t, heads, dim});
  check.require(dim.value() <= kMaxDim, "q", "head_dim is ", dim.value(), ", must be at most ", kMaxDim);
  check.rank("k_cache", k_cache, 4);
  const Size blocks{"blocks", k_cache.size(0)}, size{"block_size", k_cache.size(1)},
      kv_heads{"kv_heads", k_cache.size(2)};
  check.tensor("k_cache", k_cache, kStored, {blocks, size, kv_heads, dim});
  check.tensor("v_cache", v_cache, {k_cache.scalar_type()}, {blocks, size, kv_heads, dim});
  check.require(kv_heads.value() > 0 && heads.value() % kv_heads.value() == 0, "q", "has ", heads.value(),
                " heads, must be a multiple of the cache's ", kv_heads.value());
  check.rank("context_lens", context_lens, 1);
  const Size sequences{"S", context_lens.size(0)};
  check.tensor("context_lens", context_lens, {ScalarType::Int}, {sequences});
  check.rank("block_tables", block_tables, 2);
  check.tensor("block_tables", block_tables, {ScalarType::Int},
               {sequences, {"max_blocks", block_tables.size(1)}});
  check.tensor("query_starts", query_starts, {ScalarType::Int}, {{"S + 1", sequences.value() + 1}});
  check.require(window.value_or(1) > 0, "window", "is ", window.value_or(1), ", must be positive");
  check.require(softcap.value_or(1) > 0, "softcap", "is ", softcap.value_or(1), ", must be positive");
  if (sinks) check.tensor("sinks", *sinks, {ScalarType::Float}, {heads});
  const OnDevice device(q_in);
  const Tensor q = dense(q_in), k = dense(k_cache), v = dense(v_cache);
  const Tensor joining = sinks ? dense(*sinks) : q;  // not read if there are no sinks
  const Tensor tables = dense(block_tables), lengths = dense(context_lens), starts = dense(query_starts);
  Tensor out = empty(q, {t.value(), heads.value(), dim.value()}, q.scalar_type());
  if (out.numel() == 0) return out;
  const Work work{
      .q = q.data_ptr(),
      .k = k.data_ptr(),
      .v = v.data_ptr(),
      .out = out.data_ptr(),
      .query = number_of(q.scalar_type()),
      .tables = data<const int>(tables),
      .lengths = data<const int>(lengths),
      .starts = data<const int>(starts),
      .k_scale = scale_of(check, "k_scale_inv", k_scale_inv),
      .v_scale = scale_of(check, "v_scale_inv", v_scale_inv),
      .softmax_scale = static_cast<float>(softmax_scale),
      .whole = dim.value() % kChunk == 0 && aligned(k.data_ptr(), 16) && aligned(v.data_ptr(), 16),
      .sequences = static_cast<int>(sequences.value()),
      .max_blocks = static_cast<int>(block_tables.size(1)),
      .block_size = static_cast<int>(size.value()),
      .heads = static_cast<int>(heads.value()),
      .kv_heads = static_cast<int>(kv_heads.value()),
      .dim = static_cast<int>(dim.value()),
      .segments = static_cast<int>(ceil_over(block_tables.size(1) * size.value(), kSegment)),
      .group = static_cast<int>(heads.value() / kv_heads.value()),
      .window = static_cast<int>(std::min<int64_t>(window.value_or(kNoWindow), kNoWindow)),
      .softcap = static_cast<float>(softcap.value_or(0)),
      .sinks = sinks ? data<const float>(joining) : nullptr};
  const Call call{work, t.value(), k_cache.scalar_type(), blocks.value() * size.value()};
  if (!attend_on_tensor_cores(call, device, q)) run(call, device, q);
  return out;
}

}  // namespace
}  // namespace attention
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(FP8SERVE_OPS, FP8SERVE_DEVICE_KEY, m) {
  m.impl("paged_attention", TORCH_BOX(&fp8serve::attention::paged_attention));
}
