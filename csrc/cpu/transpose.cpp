// quantize_transpose casts a matrix to FP8 and returns it and its transpose, in one pass. quantize_delayed
// calls it, or quantize, and records the amax for delayed scaling. transpose_fp8 transposes FP8 data,
// transpose_half elements of two bytes. GEMM operands have the contracted dimension contiguous, so the
// backward pass of a linear layer reads x^T and w^T.
//
// A block of 128 rows of 256 bytes is cast row by row into a buffer, copied to the first matrix and
// transposed, a square at a time, to the second, in pieces of whole cache lines. That shape decides the speed
// (docs/performance-log.md).
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "check.h"
#include "cpu/cast_rows.h"
#include "cpu/features.h"
#include "cpu/parts.h"
#include "cpu/tensors.h"
#include "fp8.h"

namespace fp8serve {
namespace {

constexpr int64_t kBlockRows = 128;  // rows of a block: two whole cache lines of the transpose, or four
constexpr int64_t kRowBytes = 256;   // bytes of a row of a block

// A square of rows of 16 bytes: 16 x 16 elements of one byte, or 8 x 8 of two.
template <class E>
struct Square {
  static constexpr int64_t kSide = 16 / sizeof(E);
  using Row [[gnu::vector_size(16)]] = E;
  Row row[kSide];
};

// Interleaves row i with row i + kSide / 2. Doing so log2(kSide) times transposes the square.
FP8_INLINE Square<uint8_t> interleave(const Square<uint8_t>& in) {
  Square<uint8_t> out;
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    out.row[2 * i] = __builtin_shufflevector(in.row[i], in.row[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5,
                                             21, 6, 22, 7, 23);
    out.row[2 * i + 1] = __builtin_shufflevector(in.row[i], in.row[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12,
                                                 28, 13, 29, 14, 30, 15, 31);
  }
  return out;
}
FP8_INLINE Square<uint16_t> interleave(const Square<uint16_t>& in) {
  Square<uint16_t> out;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    out.row[2 * i] = __builtin_shufflevector(in.row[i], in.row[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
    out.row[2 * i + 1] = __builtin_shufflevector(in.row[i], in.row[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
  }
  return out;
}

// A block of kBlockRows rows of kColumns elements. Rows are kStride elements apart, which is not a power of
// two, so that they do not share cache sets.
template <class E>
struct Block {
  static constexpr int64_t kColumns = kRowBytes / sizeof(E), kStride = kColumns + (sizeof(E) == 1 ? 64 : 16);
  alignas(64) E data[kBlockRows * kStride];

  FP8_INLINE E* row(int64_t r) { return data + r * kStride; }

  // Writes the transpose of the first `rows` x `cols`, whose rows are `stride` elements apart.
  FP8_INLINE void transpose(E* out, int64_t stride, int64_t rows, int64_t cols) const {
    constexpr int64_t kSide = Square<E>::kSide;
    for (int64_t c = 0; c < cols; c += kSide) {
      for (int64_t r = 0; r < rows; r += kSide) {
        if (r + kSide <= rows && c + kSide <= cols) {
          transpose_square(data + r * kStride + c, out + c * stride + r, stride);
        } else {
          for (int64_t j = c; j < cols && j < c + kSide; ++j) {
            for (int64_t i = r; i < rows && i < r + kSide; ++i) out[j * stride + i] = data[i * kStride + j];
          }
        }
      }
    }
  }

 private:
  static FP8_INLINE void transpose_square(const E* from, E* out, int64_t stride) {
    constexpr int kSide = Square<E>::kSide;
    Square<E> s;
#pragma GCC unroll 16
    for (int i = 0; i < kSide; ++i) std::memcpy(&s.row[i], from + i * kStride, 16);
#pragma GCC unroll 4
    for (int side = 1; side < kSide; side *= 2) s = interleave(s);
#pragma GCC unroll 16
    for (int i = 0; i < kSide; ++i) std::memcpy(out + i * stride, &s.row[i], 16);
  }
};

template <class F>
struct CastBlock {
  template <class T>
  static FP8_INLINE void run(const T* x, uint8_t* q, uint8_t* q_t, int64_t rows, int64_t cols, int64_t m,
                             int64_t k, float scale, float* amax) {
    Block<uint8_t> block;
    float largest = 0.0f;
    for (int64_t r = 0; r < rows; ++r) {
      const float row = amax_row(x + r * k, cols);
      largest = row > largest ? row : largest;
      cast_row<F>(x + r * k, block.row(r), cols, scale);
      std::memcpy(q + r * k, block.row(r), static_cast<size_t>(cols));
    }
    block.transpose(q_t, m, rows, cols);
    *amax = largest;
  }
};

std::tuple<Tensor, Tensor, Tensor> quantize_transpose(const Tensor& x_in, const Tensor& scale,
                                                      ScalarType dtype) {
  const Contract check("quantize_transpose");
  check.rank("x", x_in, 2);
  const Size m{"M", x_in.size(0)}, k{"K", x_in.size(1)};
  check.tensor("x", x_in, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half}, {m, k});
  check.tensor("scale", scale, {ScalarType::Float}, {});
  check.require(dtype == ScalarType::Float8_e4m3fn || dtype == ScalarType::Float8_e5m2, "dtype", "is ",
                torch::headeronly::toString(dtype), ", must be Float8_e4m3fn or Float8_e5m2");
  const Tensor x = dense(x_in), q = empty({m.value(), k.value()}, dtype),
               q_t = empty({k.value(), m.value()}, dtype);
  const int64_t rows = m.value(), cols = k.value();
  constexpr int64_t kColumns = Block<uint8_t>::kColumns;
  const int64_t row_blocks = (rows + kBlockRows - 1) / kBlockRows,
                column_blocks = (cols + kColumns - 1) / kColumns;
  SharedAmax amax;
  with_format(dtype, [&](auto format) {
    with_element(x.scalar_type(), [&](auto element) {
      using F = typename decltype(format)::type;
      using T = typename decltype(element)::type;
      parallel_tasks(row_blocks, [&](int64_t i) {
        for (int64_t j = 0; j < column_blocks; ++j) {
          const int64_t r = i * kBlockRows, c = j * kColumns;
          float largest = 0.0f;
          dispatch<CastBlock<F>>(data<const T>(x) + r * cols + c, data<uint8_t>(q) + r * cols + c,
                                 data<uint8_t>(q_t) + c * rows + r, std::min(kBlockRows, rows - r),
                                 std::min(kColumns, cols - c), rows, cols, *data<float>(scale), &largest);
          amax.raise(largest);
        }
      });
    });
  });
  return {q, q_t, scalar(amax.value())};
}

std::tuple<Tensor, Tensor, Tensor> quantize_delayed(const Tensor& x, const Tensor& scale,
                                                    const std::optional<Tensor>& history, ScalarType dtype,
                                                    bool with_transpose, bool infinity_is_nan) {
  const Contract check("quantize_delayed");
  check.rank("x", x, 2);
  if (history) {
    check.cpu("history", *history);
    check.dtype("history", *history, {ScalarType::Float});
    check.rank("history", *history, 1);
    check.require(history->size(0) > 0, "history", "is empty, must hold at least the staging slot");
  }
  Tensor q, q_t, amax;
  if (with_transpose) {
    std::tie(q, q_t, amax) = quantize_transpose(x, scale, dtype);
  } else {
    std::tie(q, amax) = quantize(x, scale, dtype);
    q_t = empty({0, 0}, dtype);
  }
  const float largest = *data<float>(amax);
  if (history && largest > *data<float>(*history)) *data<float>(*history) = largest;
  return {q, q_t, scalar(inverse_of(*data<float>(scale), largest, infinity_is_nan))};
}

struct TransposeBlock {
  template <class E>
  static FP8_INLINE void run(const E* x, E* out, int64_t rows, int64_t cols, int64_t m, int64_t k) {
    Block<E> block;
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(block.row(r), x + r * k, static_cast<size_t>(cols) * sizeof(E));
    }
    block.transpose(out, m, rows, cols);
  }
};

// Returns the transpose of x [rows, cols], whose elements have the size of E.
template <class E>
Tensor transpose_elements(const Tensor& x_in, int64_t rows, int64_t cols) {
  const Tensor x = dense(x_in), out = empty({cols, rows}, x.scalar_type());
  constexpr int64_t kColumns = Block<E>::kColumns;
  const int64_t row_blocks = (rows + kBlockRows - 1) / kBlockRows,
                column_blocks = (cols + kColumns - 1) / kColumns;
  parallel_tasks(row_blocks * column_blocks, [&](int64_t i) {
    const int64_t r = i / column_blocks * kBlockRows, c = i % column_blocks * kColumns;
    dispatch<TransposeBlock>(data<const E>(x) + r * cols + c, data<E>(out) + c * rows + r,
                             std::min(kBlockRows, rows - r), std::min(kColumns, cols - c), rows, cols);
  });
  return out;
}

Tensor transpose_fp8(const Tensor& q) {
  const Contract check("transpose_fp8");
  check.rank("q", q, 2);
  const Size m{"M", q.size(0)}, k{"K", q.size(1)};
  check.tensor("q", q, {ScalarType::Float8_e4m3fn, ScalarType::Float8_e5m2}, {m, k});
  return transpose_elements<uint8_t>(q, m.value(), k.value());
}

Tensor transpose_half(const Tensor& x) {
  const Contract check("transpose_half");
  check.rank("x", x, 2);
  const Size m{"M", x.size(0)}, k{"K", x.size(1)};
  check.tensor("x", x, {ScalarType::BFloat16, ScalarType::Half}, {m, k});
  return transpose_elements<uint16_t>(x, m.value(), k.value());
}

}  // namespace
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("quantize_transpose", TORCH_BOX(&fp8serve::quantize_transpose));
  fp8serve::report<fp8serve::kCasting<fp8serve::Numerics::exact>>("quantize_transpose");
  m.impl("quantize_delayed", TORCH_BOX(&fp8serve::quantize_delayed));
  fp8serve::report<fp8serve::kCasting<fp8serve::Numerics::exact>>("quantize_delayed");
  m.impl("transpose_half", TORCH_BOX(&fp8serve::transpose_half));
  fp8serve::report<fp8serve::kVector<fp8serve::Numerics::exact>>("transpose_half");
  m.impl("transpose_fp8", TORCH_BOX(&fp8serve::transpose_fp8));
  fp8serve::report<fp8serve::kVector<fp8serve::Numerics::exact>>("transpose_fp8");
}
