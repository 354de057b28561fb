// Matrices as rows, and the arithmetic of norms, gated activations and rotary embeddings. The fused ops
// (elementwise.cu) and the plain ones (activations.cu) share this code, so a model gives the same bits with
// either.
#pragma once

#include "cuda/cast.h"

namespace fp8serve {

// A matrix whose rows are contiguous: [count, width] with `stride` elements from row to row.
struct Rows {
  Tensor held;  // the matrix, or a contiguous copy
  int64_t count, width, stride;
};

inline Rows rows_of(const Tensor& x) {
  const bool usable = x.is_contiguous() || (x.stride(1) == 1 && x.stride(0) >= x.size(1));
  const Tensor held = usable ? x : dense(x);
  return {held, held.size(0), held.size(1), std::max<int64_t>(held.stride(0), held.size(1))};
}
// Rows as an argument of a kernel.
template <class T>
struct Matrix {
  const T* at;
  int64_t stride;
};

template <class T>
Matrix<T> matrix(const Rows& rows) {
  return {data<T>(rows.held), rows.stride};
}

inline bool fast_rows(const Rows& r) {
  return r.width % kChunk == 0 && r.stride % kChunk == 0 && aligned(r.held.data_ptr(), 16);
}

// [tokens, heads, dim] whose heads are contiguous; a slice of a fused projection's output qualifies.
struct Heads {
  const void* from;
  int64_t token_stride;
  int count;
};
struct HeadsOf {
  Tensor held;  // the tensor, or a contiguous copy
  Heads heads;
  explicit HeadsOf(const Tensor& x) : held(usable(x) ? x : dense(x)) {
    heads = {held.data_ptr(), held.stride(0), static_cast<int>(held.size(1))};
  }
  static bool usable(const Tensor& x) { return x.stride(2) == 1 && x.stride(1) == x.size(2); }
};

// Calls f(Type<format>, Type<element>, bool_constant<fast>).
template <class F>
void with_types(ScalarType format, ScalarType element, bool fast, const F& f) {
  with_format(format, [&](auto fmt) {
    with_element(element,
                 [&](auto elem) { fast ? f(fmt, elem, std::true_type{}) : f(fmt, elem, std::false_type{}); });
  });
}

// Returns whether `heads` and `others` allow a thread to access eight pairs of a head of `dim` elements at
// once.
inline bool fast_pairs(int64_t dim, std::initializer_list<Heads> heads,
                       std::initializer_list<const void*> others) {
  bool fast = dim % (2 * kChunk) == 0;
  for (const Heads& h : heads) fast = fast && h.token_stride % kChunk == 0 && aligned(h.from, 16);
  for (const void* at : others) fast = fast && aligned(at, 16);
  return fast;
}

// Returns how many threads share a row of n elements: a warp for the heads of a QK norm, else a block. The
// order of a norm's sum depends on this number, so all ops use this function.
constexpr int kRowThreads = 256;
__host__ __device__ inline int row_threads(int64_t n) { return n <= 512 ? 32 : kRowThreads; }

// Returns the number of blocks that loop over all chunks of a matrix: at most as many as are resident at
// once.
inline unsigned blocks_for(const Rows& rows, const OnDevice& device) {
  const int64_t chunks = rows.count * ceil_over(rows.width, kChunk);
  return static_cast<unsigned>(
      std::min<int64_t>(ceil_over(chunks, kRowThreads), 8 * device.multiprocessors()));
}

// Calls f(first element of the chunk) for this thread's chunks of a row of n elements. Chunks are counted
// in 32 bits (a row of more would not fit any GPU), because the compiler unrolls the loop and divides to
// get the number of iterations.
template <class F>
__device__ __forceinline__ void for_chunks(int64_t n, const F& f) {
  const auto chunks = static_cast<uint32_t>((n + kChunk - 1) / kChunk);
  for (uint32_t c = threadIdx.x; c < chunks; c += blockDim.x) f(static_cast<int64_t>(c) * kChunk);
}

// Walks in equal steps over pieces that are numbered row by row, `per_row` in each row. The constructor
// divides, once and in 32 bits: a 64-bit division for each piece would cost more than the work on the
// piece.
class Steps {
 public:
  __device__ __forceinline__ Steps(uint32_t first, uint32_t step, uint32_t per_row)
      : row_(first / per_row),
        column_(first % per_row),
        down_(step / per_row),
        across_(step % per_row),
        per_row_(per_row) {}
  __device__ __forceinline__ int64_t row() const { return row_; }
  __device__ __forceinline__ uint32_t column() const { return column_; }
  __device__ __forceinline__ void next() {
    row_ += down_, column_ += across_;
    if (column_ >= per_row_) column_ -= per_row_, ++row_;
  }

 private:
  int64_t row_;
  uint32_t column_, down_, across_, per_row_;
};

// Calls f(row, first element of the chunk) for this thread's chunks of a [rows, n] matrix, which all
// blocks, of kRowThreads threads each, share.
template <class F>
__device__ __forceinline__ void for_all_chunks(int64_t rows, int64_t n, const F& f) {
  Steps at(blockIdx.x * kRowThreads + threadIdx.x, gridDim.x * kRowThreads,
           static_cast<uint32_t>((n + kChunk - 1) / kChunk));
  for (; at.row() < rows; at.next()) f(at.row(), static_cast<int64_t>(at.column()) * kChunk);
}

__device__ __forceinline__ float sum_of_squares(const Chunk& x, float sum) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) sum = fmaf(x.value[i], x.value[i], sum);
  return sum;
}

__device__ __forceinline__ float norm_factor(float squares, int64_t n, float eps) {
  return 1.0f / sqrtf(squares / static_cast<float>(n) + eps);
}

// Returns 1 / sqrt(mean of squares + eps) of the row that this block handles; `memory` holds 32 floats.
template <bool kAligned, class T>
__device__ __forceinline__ float row_factor(const T* x, int64_t n, float eps, float* memory) {
  float sum = 0.0f;
  for_chunks(n, [&](int64_t at) { sum = sum_of_squares(load_chunk<kAligned>(x, at, n), sum); });
  return norm_factor(block_sum(sum, memory), n, eps);
}

// Returns x * factor, rounded, times the weight, rounded.
template <class T>
__device__ __forceinline__ Chunk normed(Chunk x, const Chunk& weight, float factor) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    x.value[i] = rounded<T>(weight.value[i] * rounded<T>(x.value[i] * factor));
  }
  return x;
}

// Returns silu(gate), rounded, times up, rounded.
template <class T>
__device__ __forceinline__ float gated(float gate, float up) {
  return rounded<T>(rounded<T>(gate / (1.0f + expf(-gate))) * up);
}
template <class T>
__device__ __forceinline__ Chunk gated(Chunk gate, const Chunk& up) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) gate.value[i] = gated<T>(gate.value[i], up.value[i]);
  return gate;
}

// The gradients of gated() for gate and up, not rounded.
struct GatedGradients {
  Chunk gate, up;
};
template <class T>
__device__ __forceinline__ GatedGradients gated_gradients(const Chunk& grad, const Chunk& gate,
                                                          const Chunk& up) {
  GatedGradients out;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const float sigmoid = 1.0f / (1.0f + expf(-gate.value[i]));
    out.up.value[i] = grad.value[i] * rounded<T>(gate.value[i] * sigmoid);
    out.gate.value[i] = grad.value[i] * up.value[i] * (sigmoid * (1.0f + gate.value[i] * (1.0f - sigmoid)));
  }
  return out;
}

// Eight pairs of a head's elements. The elements of a pair are half a head apart and are rotated together.
struct Pairs {
  Chunk first, second;
};

// Returns the pairs [begin, begin + 8) of a head with `half` pairs; zeros past its end.
template <bool kAligned, class T>
__device__ __forceinline__ Pairs load_pairs(const T* head, int64_t begin, int64_t half) {
  return {load_chunk<kAligned>(head, begin, half), load_chunk<kAligned>(head + half, begin, half)};
}

template <bool kAligned, class T>
__device__ __forceinline__ void store_pairs(const Pairs& x, T* head, int64_t begin, int64_t half) {
  store_high<kAligned>(x.first, head, begin, half);
  store_high<kAligned>(x.second, head + half, begin, half);
}

// Returns along * cos + across * sin, rounded after each operation. __fmul_rn and __fadd_rn are needed in
// FP32, where `rounded` does nothing: the compiler would otherwise fuse a product and the sum.
template <class T>
__device__ __forceinline__ float turned(float along, float across, float cos, float sin) {
  return rounded<T>(__fadd_rn(rounded<T>(__fmul_rn(along, cos)), rounded<T>(__fmul_rn(across, sin))));
}

// Returns x * cos + rotate(x) * sin.
template <class T>
__device__ __forceinline__ Pairs rotated(const Pairs& x, const Pairs& cos, const Pairs& sin) {
  Pairs out;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const float first = x.first.value[i], second = x.second.value[i];
    out.first.value[i] = turned<T>(first, -second, cos.first.value[i], sin.first.value[i]);
    out.second.value[i] = turned<T>(second, first, cos.second.value[i], sin.second.value[i]);
  }
  return out;
}

}  // namespace fp8serve
