// Transposes and pads FP8 data, one byte per element, and transposes elements of two bytes. Memory-bound:
// every byte is read once and written once.
#include <torch/csrc/stable/library.h>

#include "cuda/layout.h"
#include "cuda/square.h"

namespace fp8serve {
namespace {

constexpr int kThreads = kSquareThreads;

// Transposes `from` [k, rows], whose rows are `pitch` bytes apart, to `to` [rows, padded], with zeros from
// column k on. A block handles 128 x 128 elements.
template <bool kAligned>
__global__ void __launch_bounds__(kThreads)
    transpose(const uint8_t* from, int64_t pitch, uint8_t* to, int64_t rows, int64_t k, int64_t padded) {
  __shared__ __align__(16) Square square;
  const int64_t k0 = static_cast<int64_t>(blockIdx.x) * kSquare,
                r0 = static_cast<int64_t>(blockIdx.y) * kSquare;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int line = static_cast<int>(threadIdx.x) / 8 + 32 * i,
              column = static_cast<int>(threadIdx.x) % 8 * 16;
    const uint8_t* source = from + (k0 + line) * pitch + r0 + column;
    uint4 bytes = {0, 0, 0, 0};
    if (k0 + line < k) {
      if (kAligned && r0 + column < rows) {
        bytes = *reinterpret_cast<const uint4*>(source);
      } else if (!kAligned) {
        uint32_t word[4] = {0, 0, 0, 0};
        for (int b = 0; b < 16; ++b) {
          if (r0 + column + b < rows) word[b / 4] |= static_cast<uint32_t>(source[b]) << (8 * (b % 4));
        }
        bytes = {word[0], word[1], word[2], word[3]};
      }
    }
    square.at<uint4>(line, column) = bytes;
  }
  __syncthreads();
  square.for_columns([&](int row, int first, const uint4& bytes) {
    if (r0 + row < rows && k0 + first < padded) {
      *reinterpret_cast<uint4*>(to + (r0 + row) * padded + k0 + first) = bytes;
    }
  });
}

// Transposes `from` [k, rows] to `to` [rows, k], with two bytes per element. A thread transposes 8 x 8
// elements in registers. A warp handles 32 x 64, so it reads whole lines of 128 bytes and writes 64 bytes
// of a row at once; a block handles 64 x 256.
constexpr int kEight = 8, kDeep = 64, kBroad = 256;

template <bool kAligned>
__global__ void __launch_bounds__(kThreads)
    transpose_halves(const uint16_t* from, uint16_t* to, int64_t rows, int64_t k) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t k0 = static_cast<int64_t>(blockIdx.x) * kDeep + warp % 2 * 32 + lane % 4 * kEight;
  const int64_t r0 = static_cast<int64_t>(blockIdx.y) * kBroad + warp / 2 * 64 + lane / 4 * kEight;
  if (k0 >= k || r0 >= rows) return;
  uint32_t line[kEight][kEight / 2];  // two elements of a row of `from` in each word
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    const uint16_t* source = from + (k0 + i) * rows + r0;
    if (kAligned) {
      const uint4 words = *reinterpret_cast<const uint4*>(source);
      line[i][0] = words.x, line[i][1] = words.y, line[i][2] = words.z, line[i][3] = words.w;
    } else {
#pragma unroll
      for (int j = 0; j < kEight / 2; ++j) {
        const bool is_row = k0 + i < k;
        const uint32_t low = is_row && r0 + 2 * j < rows ? source[2 * j] : 0;
        const uint32_t high = is_row && r0 + 2 * j + 1 < rows ? source[2 * j + 1] : 0;
        line[i][j] = low | high << 16;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kEight; ++r) {
    uint32_t word[kEight / 2];
#pragma unroll
    for (int j = 0; j < kEight / 2; ++j) {
      const uint32_t low = line[2 * j][r / 2], high = line[2 * j + 1][r / 2];
      word[j] = r % 2 == 0 ? (low & 0xffff) | high << 16 : low >> 16 | (high & 0xffff0000u);
    }
    uint16_t* target = to + (r0 + r) * k + k0;
    if (kAligned) {
      *reinterpret_cast<uint4*>(target) = {word[0], word[1], word[2], word[3]};
    } else {
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        if (r0 + r < rows && k0 + i < k) target[i] = static_cast<uint16_t>(word[i / 2] >> (16 * (i % 2)));
      }
    }
  }
}

// Copies a matrix with any strides to `to` [rows, padded], with zeros from column k on. Its speed does not
// matter: sizes that are no multiple of 16 are rare, and small. One block per row.
__global__ void __launch_bounds__(kThreads) gather(const uint8_t* from, int64_t row_stride, int64_t k_stride,
                                                   uint8_t* to, int64_t k, int64_t padded) {
  const int64_t row = blockIdx.x;
  for (int64_t column = threadIdx.x; column < padded; column += blockDim.x) {
    to[row * padded + column] =
        column < k ? from[row * row_stride + column * k_stride] : static_cast<uint8_t>(0);
  }
}

// Transposes q [k, rows], whose rows are contiguous and `pitch` bytes apart, to `to` [rows, padded]. k is
// at most padded.
void launch_transpose(const Tensor& q, const Tensor& to, int64_t rows, int64_t k, int64_t pitch,
                      const OnDevice& device) {
  const int64_t padded = to.size(1);
  const bool fast = aligned(q.data_ptr(), 16) && pitch % 16 == 0 && rows % 16 == 0;
  const dim3 grid(static_cast<unsigned>(ceil_over(padded, kSquare)),
                  static_cast<unsigned>(ceil_over(rows, kSquare)));
  launch(fast ? transpose<true> : transpose<false>, grid, kThreads, 0, device.stream(), data<uint8_t>(q),
         pitch, data<uint8_t>(to), rows, k, padded);
}

// Copies a matrix with any two strides to `to`, padded with zeros.
void launch_gather(const void* from, int64_t row_stride, int64_t k_stride, const Tensor& to, int64_t k,
                   const OnDevice& device) {
  const auto threads = static_cast<int>(std::min<int64_t>(ceil_over(to.size(1), 32) * 32, kThreads));
  launch(gather, static_cast<unsigned>(to.size(0)), threads, 0, device.stream(),
         static_cast<const uint8_t*>(from), row_stride, k_stride, data<uint8_t>(to), k, to.size(1));
}

Tensor transpose_fp8(const Tensor& q) {
  const DeviceContract check("transpose_fp8", q);
  check.rank("q", q, 2);
  check.tensor("q", q, kFp8, {{"M", q.size(0)}, {"K", q.size(1)}});
  return transposed(dense(q), OnDevice(q));
}

__global__ void __launch_bounds__(kThreads) repeat(const float* value, float* out, int64_t count) {
  after_earlier_kernels();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at < count) out[at] = *value;
}

Tensor transpose_half(const Tensor& x_in) {
  const DeviceContract check("transpose_half", x_in);
  check.rank("x", x_in, 2);
  check.tensor("x", x_in, {ScalarType::BFloat16, ScalarType::Half},
               {{"M", x_in.size(0)}, {"K", x_in.size(1)}});
  const OnDevice device(x_in);
  const Tensor x = dense(x_in), out = empty(x, {x.size(1), x.size(0)}, x.scalar_type());
  if (out.numel() == 0) return out;
  const int64_t k = x.size(0), rows = x.size(1);
  const bool fast = aligned(x.data_ptr(), 16) && k % kEight == 0 && rows % kEight == 0;
  const dim3 grid(static_cast<unsigned>(ceil_over(k, kDeep)), static_cast<unsigned>(ceil_over(rows, kBroad)));
  launch(fast ? transpose_halves<true> : transpose_halves<false>, grid, kThreads, 0, device.stream(),
         data<uint16_t>(x), data<uint16_t>(out), rows, k);
  return out;
}

}  // namespace

Tensor transposed(const Tensor& q, const OnDevice& device) {
  const Tensor out = empty(q, {q.size(1), q.size(0)}, q.scalar_type());
  if (out.numel() == 0) return out;
  if (q.size(0) % 16 == 0) {
    launch_transpose(q, out, q.size(1), q.size(0), q.size(1), device);
  } else {
    launch_gather(q.data_ptr(), 1, q.size(1), out, q.size(0), device);
  }
  return out;
}

Tensor k_contiguous(const Tensor& q, const OnDevice& device) {
  const int64_t rows = q.size(0), k = q.size(1), padded = ceil_over(k, 16) * 16;
  if (q.is_contiguous() && padded == k && aligned(q.data_ptr(), 16)) return q;
  Tensor out = empty(q, {rows, padded}, q.scalar_type());
  if (out.numel() == 0) return out;
  const int64_t row_stride = q.stride(0), k_stride = q.stride(1);
  if (row_stride == 1 && k_stride >= rows) {
    launch_transpose(q, out, rows, k, k_stride, device);
  } else {
    launch_gather(q.data_ptr(), row_stride, k_stride, out, k, device);
  }
  return out;
}

Tensor rows_padded(const Tensor& matrices, const OnDevice& device) {
  const Tensor held = dense(matrices);
  const int64_t width = held.scalar_type() == ScalarType::BFloat16 ? 2 : 1;
  const int64_t bytes = width * held.size(held.dim() - 1), padded = ceil_over(bytes, 16) * 16;
  if (bytes == 0 || (padded == bytes && aligned(held.data_ptr(), 16))) return held;
  Tensor out = empty(held, {width * held.numel() / bytes, padded}, ScalarType::Byte);
  if (out.numel() == 0) return out;
  launch_gather(held.data_ptr(), bytes, 1, out, bytes, device);
  return out;
}

Tensor scales_of_rows(const Tensor& scale, int64_t rows, const OnDevice& device) {
  if (scale.numel() != 1) return scale;
  Tensor out = empty(scale, {rows, 1}, ScalarType::Float);
  launch_early(repeat, static_cast<unsigned>(ceil_over(rows, kThreads)), kThreads, 0, device.stream(),
               data<float>(scale), data<float>(out), rows);
  return out;
}

}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(FP8SERVE_OPS, FP8SERVE_DEVICE_KEY, m) {
  m.impl("transpose_fp8", TORCH_BOX(&fp8serve::transpose_fp8));
  m.impl("transpose_half", TORCH_BOX(&fp8serve::transpose_half));
}
