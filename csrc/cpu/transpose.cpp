// quantize_transpose casts a matrix for both of its readers in one pass: to FP8 data and to their transpose.
// quantize_delayed is the same, or quantize, with the book-keeping of delayed scaling. transpose_fp8 turns
// FP8 data, transpose_half elements of two bytes. GEMM operands have the contracted dimension contiguous, so
// the backward pass of a linear layer reads x^T and w^T.
//
// Blocks of 128 rows x 256 columns: cast row by row into a buffer, copied to their place and, turned 16 x 16
// at a time, to the other matrix in pieces of two cache lines. That shape decides the speed
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

constexpr int64_t kTall = 128;           // rows of a block: two whole cache lines of the transpose
constexpr int64_t kWide = 256;           // its columns
constexpr int64_t kStride = kWide + 64;  // no power of two: rows must not share cache sets

// 16 x 16 bytes, turned by four rounds of interleaving row i with row i + 8.
using Bytes = uint8_t __attribute__((vector_size(16)));

struct Sixteen {
  Bytes row[16];
};

FP8_INLINE Sixteen interleaved(const Sixteen& in) {
  Sixteen out;
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    out.row[2 * i] = __builtin_shufflevector(in.row[i], in.row[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5,
                                             21, 6, 22, 7, 23);
    out.row[2 * i + 1] = __builtin_shufflevector(in.row[i], in.row[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12,
                                                 28, 13, 29, 14, 30, 15, 31);
  }
  return out;
}

FP8_INLINE void turn16(const uint8_t* from, uint8_t* out, int64_t stride) {
  Sixteen s;
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) std::memcpy(&s.row[i], from + i * kStride, 16);
  s = interleaved(interleaved(interleaved(interleaved(s))));
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) std::memcpy(out + i * stride, &s.row[i], 16);
}

// A block of FP8 data, turned.
FP8_INLINE void turn(const uint8_t* block, uint8_t* out, int64_t stride, int64_t rows, int64_t cols) {
  for (int64_t c = 0; c < cols; c += 16) {
    for (int64_t r = 0; r < rows; r += 16) {
      if (r + 16 <= rows && c + 16 <= cols) {
        turn16(block + r * kStride + c, out + c * stride + r, stride);
      } else {
        for (int64_t j = c; j < cols && j < c + 16; ++j) {
          for (int64_t i = r; i < rows && i < r + 16; ++i) out[j * stride + i] = block[i * kStride + j];
        }
      }
    }
  }
}

template <class F>
struct CastBlock {
  template <class T>
  static FP8_INLINE void run(const T* x, uint8_t* q, uint8_t* q_t, int64_t rows, int64_t cols, int64_t m,
                             int64_t k, float scale, float* amax) {
    alignas(64) uint8_t block[kTall * kStride];
    float seen = 0.0f;
    for (int64_t r = 0; r < rows; ++r) {
      const float row = amax_row(x + r * k, cols);
      seen = row > seen ? row : seen;
      cast_row<F>(x + r * k, block + r * kStride, cols, scale);
      std::memcpy(q + r * k, block + r * kStride, static_cast<size_t>(cols));
    }
    turn(block, q_t, m, rows, cols);
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
  static FP8_INLINE void run(const uint8_t* x, uint8_t* out, int64_t rows, int64_t cols, int64_t m,
                             int64_t k) {
    alignas(64) uint8_t block[kTall * kStride];
    for (int64_t r = 0; r < rows; ++r) std::memcpy(block + r * kStride, x + r * k, static_cast<size_t>(cols));
    turn(block, out, m, rows, cols);
  }
};

Tensor transpose_fp8(const Tensor& q_in) {
  const Contract check("transpose_fp8");
  check.rank("q", q_in, 2);
  const Size m{"M", q_in.size(0)}, k{"K", q_in.size(1)};
  check.tensor("q", q_in, {ScalarType::Float8_e4m3fn, ScalarType::Float8_e5m2}, {m, k});
  const Tensor q = dense(q_in), out = empty({k.value(), m.value()}, q.scalar_type());
  const int64_t rows = m.value(), cols = k.value();
  const int64_t down = (rows + kTall - 1) / kTall, across = (cols + kWide - 1) / kWide;
  parallel_tasks(down * across, [&](int64_t i) {
    const int64_t r = i / across * kTall, c = i % across * kWide;
    dispatch<TurnBlock>(data<const uint8_t>(q) + r * cols + c, data<uint8_t>(out) + c * rows + r,
                        std::min(kTall, rows - r), std::min(kWide, cols - c), rows, cols);
  });
  return out;
}

// 8 x 8 elements of two bytes, turned by three rounds of interleaving row i with row i + 4.
using Halves = uint16_t __attribute__((vector_size(16)));

struct Eight {
  Halves row[8];
};

FP8_INLINE Eight interleaved(const Eight& in) {
  Eight out;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    out.row[2 * i] = __builtin_shufflevector(in.row[i], in.row[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
    out.row[2 * i + 1] = __builtin_shufflevector(in.row[i], in.row[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
  }
  return out;
}

struct TurnHalves {
  static constexpr int64_t kWidth = kWide / 2;    // columns of a block
  static constexpr int64_t kPitch = kWidth + 16;  // no power of two, as kStride

  static FP8_INLINE void run(const uint16_t* x, uint16_t* out, int64_t rows, int64_t cols, int64_t m,
                             int64_t k) {
    alignas(64) uint16_t block[kTall * kPitch];
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(block + r * kPitch, x + r * k, static_cast<size_t>(cols) * sizeof(uint16_t));
    }
    for (int64_t c = 0; c < cols; c += 8) {
      for (int64_t r = 0; r < rows; r += 8) {
        if (r + 8 <= rows && c + 8 <= cols) {
          turn8(block + r * kPitch + c, out + c * m + r, m);
        } else {
          for (int64_t j = c; j < cols && j < c + 8; ++j) {
            for (int64_t i = r; i < rows && i < r + 8; ++i) out[j * m + i] = block[i * kPitch + j];
          }
        }
      }
    }
  }

 private:
  static FP8_INLINE void turn8(const uint16_t* from, uint16_t* out, int64_t stride) {
    Eight s;
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) std::memcpy(&s.row[i], from + i * kPitch, 16);
    s = interleaved(interleaved(interleaved(s)));
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) std::memcpy(out + i * stride, &s.row[i], 16);
  }
};

Tensor transpose_half(const Tensor& x_in) {
  const Contract check("transpose_half");
  check.rank("x", x_in, 2);
  const Size m{"M", x_in.size(0)}, k{"K", x_in.size(1)};
  check.tensor("x", x_in, {ScalarType::BFloat16, ScalarType::Half}, {m, k});
  const Tensor x = dense(x_in), out = empty({k.value(), m.value()}, x.scalar_type());
  const int64_t rows = m.value(), cols = k.value(), wide = TurnHalves::kWidth;
  const int64_t down = (rows + kTall - 1) / kTall, across = (cols + wide - 1) / wide;
  parallel_tasks(down * across, [&](int64_t i) {
    const int64_t r = i / across * kTall, c = i % across * wide;
    dispatch<TurnHalves>(data<const uint16_t>(x) + r * cols + c, data<uint16_t>(out) + c * rows + r,
                         std::min(kTall, rows - r), std::min(wide, cols - c), rows, cols);
  });
  return out;
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
