// quantize_transpose casts a matrix for both of its readers in one pass: to FP8 data and to their transpose.
// quantize_delayed is the same, or quantize, with the book-keeping of delayed scaling. transpose_fp8 turns
// FP8 data, transpose_half elements of two bytes. GEMM operands have the contracted dimension contiguous, so
// the backward pass of a linear layer reads x^T and w^T.
//
// Blocks of 128 rows of 256 bytes: cast row by row into a buffer, copied to their place and, turned a square
// at a time, to the other matrix in pieces of whole cache lines. That shape decides the speed
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

constexpr int64_t kTall = 128;   // rows of a block: two whole cache lines of the transpose, or four
constexpr int64_t kBroad = 256;  // bytes of its rows

// A square of rows of 16 bytes: 16 x 16 elements of one byte, or 8 x 8 of two.
template <class E>
struct Square {
  static constexpr int64_t kSide = 16 / sizeof(E);
  using Row [[gnu::vector_size(16)]] = E;
  Row row[kSide];
};

// Row i interleaved with row i + kSide / 2. log2(kSide) times, that turns the square.
FP8_INLINE Square<uint8_t> interleaved(const Square<uint8_t>& in) {
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
FP8_INLINE Square<uint16_t> interleaved(const Square<uint16_t>& in) {
  Square<uint16_t> out;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    out.row[2 * i] = __builtin_shufflevector(in.row[i], in.row[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
    out.row[2 * i + 1] = __builtin_shufflevector(in.row[i], in.row[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
  }
  return out;
}

// A block: kTall rows of kWide elements, kStride apart, which is no power of two: rows must not share cache
// sets.
template <class E>
struct Block {
  static constexpr int64_t kWide = kBroad / sizeof(E), kStride = kWide + (sizeof(E) == 1 ? 64 : 16);
  alignas(64) E data[kTall * kStride];

  FP8_INLINE E* row(int64_t r) { return data + r * kStride; }

  // The first `rows` x `cols`, turned; `stride`: of the transpose's rows.
  FP8_INLINE void turn(E* out, int64_t stride, int64_t rows, int64_t cols) const {
    constexpr int64_t kSide = Square<E>::kSide;
    for (int64_t c = 0; c < cols; c += kSide) {
      for (int64_t r = 0; r < rows; r += kSide) {
        if (r + kSide <= rows && c + kSide <= cols) {
          turn_square(data + r * kStride + c, out + c * stride + r, stride);
        } else {
          for (int64_t j = c; j < cols && j < c + kSide; ++j) {
            for (int64_t i = r; i < rows && i < r + kSide; ++i) out[j * stride + i] = data[i * kStride + j];
          }
        }
      }
    }
  }

 private:
  static FP8_INLINE void turn_square(const E* from, E* out, int64_t stride) {
    constexpr int kSide = Square<E>::kSide;
    Square<E> s;
#pragma GCC unroll 16
    for (int i = 0; i < kSide; ++i) std::memcpy(&s.row[i], from + i * kStride, 16);
#pragma GCC unroll 4
    for (int side = 1; side < kSide; side *= 2) s = interleaved(s);
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
    float seen = 0.0f;
    for (int64_t r = 0; r < rows; ++r) {
      const float row = amax_row(x + r * k, cols);
      seen = row > seen ? row : seen;
      cast_row<F>(x + r * k, block.row(r), cols, scale);
      std::memcpy(q + r * k, block.row(r), static_cast<size_t>(cols));
    }
    block.turn(q_t, m, rows, cols);
    *amax = seen;
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
  constexpr int64_t kWide = Block<uint8_t>::kWide;
  const int64_t down = (rows + kTall - 1) / kTall, across = (cols + kWide - 1) / kWide;
  SharedAmax amax;
  with_format(dtype, [&](auto format) {
    with_element(x.scalar_type(), [&](auto element) {
      using F = typename decltype(format)::type;
      using T = typename decltype(element)::type;
      parallel_tasks(down, [&](int64_t i) {
        for (int64_t j = 0; j < across; ++j) {
          const int64_t r = i * kTall, c = j * kWide;
          float seen = 0.0f;
          dispatch<CastBlock<F>>(data<const T>(x) + r * cols + c, data<uint8_t>(q) + r * cols + c,
                                 data<uint8_t>(q_t) + c * rows + r, std::min(kTall, rows - r),
                                 std::min(kWide, cols - c), rows, cols, *data<float>(scale), &seen);
          amax.raise(seen);
        }
      });
    });
  });
  return {q, q_t, scalar(amax.value())};
}

std::tuple<Tensor, Tensor, Tensor> quantize_delayed(const Tensor& x, const Tensor& scale,
                                                    const std::optional<Tensor>& history, ScalarType dtype,
                                                    bool turned, bool infinity_is_nan) {
  const Contract check("quantize_delayed");
  check.rank("x", x, 2);
  if (history) {
    check.cpu("history", *history);
    check.dtype("history", *history, {ScalarType::Float});
    check.rank("history", *history, 1);
    check.require(history->size(0) > 0, "history", "is empty, must hold at least the staging slot");
  }
  Tensor q, q_t, amax;
  if (turned) {
    std::tie(q, q_t, amax) = quantize_transpose(x, scale, dtype);
  } else {
    std::tie(q, amax) = quantize(x, scale, dtype);
    q_t = empty({0, 0}, dtype);
  }
  const float seen = *data<float>(amax);
  if (history && seen > *data<float>(*history)) *data<float>(*history) = seen;
  return {q, q_t, scalar(inverse_of(*data<float>(scale), seen, infinity_is_nan))};
}

struct TurnBlock {
  template <class E>
  static FP8_INLINE void run(const E* x, E* out, int64_t rows, int64_t cols, int64_t m, int64_t k) {
    Block<E> block;
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(block.row(r), x + r * k, static_cast<size_t>(cols) * sizeof(E));
    }
    block.turn(out, m, rows, cols);
  }
};

// x [rows, cols] as [cols, rows], of elements of E's size.
template <class E>
Tensor transposed(const Tensor& x_in, int64_t rows, int64_t cols) {
  const Tensor x = dense(x_in), out = empty({cols, rows}, x.scalar_type());
  constexpr int64_t kWide = Block<E>::kWide;
  const int64_t down = (rows + kTall - 1) / kTall, across = (cols + kWide - 1) / kWide;
  parallel_tasks(down * across, [&](int64_t i) {
    const int64_t r = i / across * kTall, c = i % across * kWide;
    dispatch<TurnBlock>(data<const E>(x) + r * cols + c, data<E>(out) + c * rows + r,
                        std::min(kTall, rows - r), std::min(kWide, cols - c), rows, cols);
  });
  return out;
}

Tensor transpose_fp8(const Tensor& q) {
  const Contract check("transpose_fp8");
  check.rank("q", q, 2);
  const Size m{"M", q.size(0)}, k{"K", q.size(1)};
  check.tensor("q", q, {ScalarType::Float8_e4m3fn, ScalarType::Float8_e5m2}, {m, k});
  return transposed<uint8_t>(q, m.value(), k.value());
}

Tensor transpose_half(const Tensor& x) {
  const Contract check("transpose_half");
  check.rank("x", x, 2);
  const Size m{"M", x.size(0)}, k{"K", x.size(1)};
  check.tensor("x", x, {ScalarType::BFloat16, ScalarType::Half}, {m, k});
  return transposed<uint16_t>(x, m.value(), k.value());
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
