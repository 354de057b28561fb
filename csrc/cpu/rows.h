// Rows of matrices, shared out to threads, and the rounding of an op whose results have the type T.
#pragma once

#include "cpu/tensors.h"

namespace fp8serve {

constexpr int64_t kRowGrain = 1 << 14;             // elements a task handles
constexpr int64_t kMinParallelElements = 1 << 16;  // fewer are processed before another thread wakes up

// Rows that are `stride` elements apart, such as a slice of the output of a fused projection, which is read
// without a copy.
struct Rows {
  Tensor tensor;
  int64_t count, width, stride;
};
inline Rows rows_of(const Tensor& x) {
  int64_t inner = 1;
  bool packed = x.dim() > 1 && x.size(0) > 0;
  for (int64_t d = x.dim() - 1; d > 0; --d) {
    packed = packed && (x.stride(d) == inner || x.size(d) == 1);
    inner *= x.size(d);
  }
  const Tensor tensor = packed ? x : dense(x);
  return {tensor, x.size(0), inner, packed ? x.stride(0) : inner};
}

// Calls f(row) for every row on several threads, in tasks of about kRowGrain elements.
template <class F>
void parallel_rows(int64_t rows, int64_t width, const F& f) {
  const int64_t grain = rows * width < kMinParallelElements ? kMinParallelElements : kRowGrain;
  const int64_t per_task = std::max<int64_t>(1, grain / std::max<int64_t>(1, width));
  parallel_tasks((rows + per_task - 1) / per_task, [&](int64_t task) {
    for (int64_t r = task * per_task; r < std::min(rows, (task + 1) * per_task); ++r) f(r);
  });
}

// Returns x rounded to T, as an op with outputs of type T would store it.
template <class T>
FP8_INLINE float rounded(float x) {
  T out;
  store(x, &out);
  return load(out);
}

}  // namespace fp8serve
