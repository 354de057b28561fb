// cast_nvfp4: high precision in, values of NVFP4 in BF16 out, rounded to nearest or stochastically; rotate:
// the random Hadamard transform of blocks of 16 (fp8serve/fp8/ops/nvfp4.py has the definitions).
//
// A value is E2M1 times the E4M3 scale of its block, which BF16 holds exactly. Random bits come from a
// counter, so a row's do not depend on the thread that casts it.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <tuple>

#include "check.h"
#include "cpu/cast_rows.h"
#include "cpu/features.h"
#include "cpu/rows.h"
#include "cpu/scratch.h"
#include "cpu/tensors.h"
#include "fp8.h"

namespace fp8serve {
namespace {

constexpr int64_t kNvBlock = 16;
constexpr float kMax = 6.0f, kMaxScaled = 448.0f * 6.0f, kMinScale = 0x1p-9f, kLargest = 0x1.fffffep127f;
constexpr uint16_t kNan = 0x7fc0;

struct Seed {
  bool is_set;
  uint32_t key[2], stream;
};

// Philox4x32-10: the words of `count` counters from `first` on, word w of counter i in words[w * count + i].
struct Philox {
  static FP8_INLINE void run(Seed seed, uint64_t first, int64_t count, uint32_t* __restrict words) {
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t counter = first + static_cast<uint64_t>(i);
      uint32_t w0 = static_cast<uint32_t>(counter), w1 = static_cast<uint32_t>(counter >> 32);
      uint32_t w2 = seed.stream, w3 = 0, k0 = seed.key[0], k1 = seed.key[1];
      for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t{0xD2511F53} * w0, b = uint64_t{0xCD9E8D57} * w2;
        w0 = static_cast<uint32_t>(b >> 32) ^ w1 ^ k0;
        w1 = static_cast<uint32_t>(b);
        w2 = static_cast<uint32_t>(a >> 32) ^ w3 ^ k1;
        w3 = static_cast<uint32_t>(a);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
      }
      words[i] = w0;
      words[count + i] = w1;
      words[2 * count + i] = w2;
      words[3 * count + i] = w3;
    }
  }
};

// The amaxes of a row's blocks as bits; unlike those of other casts, NaN counts and is above infinity.
struct BlockAmaxes {
  template <class T>
  static FP8_INLINE void run(const T* x, int64_t n, int32_t* largest) {
    for (int64_t begin = 0; begin < n; begin += kNvBlock) {
      int32_t amax = largest[begin / kNvBlock];
      const int64_t end = begin + kNvBlock < n ? begin + kNvBlock : n;
      for (int64_t i = begin; i < end; ++i) {
        const int32_t bits = std::bit_cast<int32_t>(load(x[i])) & kMagnitude;
        amax = bits > amax ? bits : amax;
      }
      largest[begin / kNvBlock] = amax;
    }
  }
};

// The quantizing scale of a tensor or row with this amax.
FP8_INLINE float tensor_scale(float amax) {
  if (!(amax > 0.0f) || std::bit_cast<int32_t>(amax) >= kInfinity) return 1.0f;
  const float scale = kMaxScaled / amax;
  return scale < kLargest ? scale : kLargest;
}

struct BlockScales {
  // scales[b]: what multiplies codes, NaN for a block with NaN; factors[b]: what multiplies elements
  static FP8_INLINE void run(const int32_t* largest, int64_t blocks, float scale, float* __restrict scales,
                             float* __restrict factors) {
    const float inverse = 1.0f / scale, per_max = scale * (1.0f / kMax);
    for (int64_t b = 0; b < blocks; ++b) {
      const float ideal = std::bit_cast<float>(largest[b]) * per_max;
      const float low = ideal < kMinScale ? kMinScale : ideal;
      const float value = kDecode<E4M3>.value[encode<E4M3>(low) & 0x7f];
      const float factor = 1.0f / (value * inverse);
      scales[b] = value;
      factors[b] = factor < kLargest ? factor : kLargest;
    }
  }
};

// The values of a block: y = x * factor is rounded in units of 0.5, 1 or 2, the distance of codes near it.
template <bool stochastic>
struct RoundRow {
  template <class T>
  static FP8_INLINE void run(const T* __restrict x, int64_t n, const float* scales, const float* factors,
                             const uint32_t* __restrict words, uint16_t* __restrict out) {
    for (int64_t begin = 0; begin < n; begin += kNvBlock) {
      const float scale = scales[begin / kNvBlock], factor = factors[begin / kNvBlock];
      const int64_t count = n - begin < kNvBlock ? n - begin : kNvBlock;
      if (scale != scale) {
        for (int64_t i = 0; i < count; ++i) out[begin + i] = kNan;
      } else if (count == kNvBlock) {
        round_block(x + begin, kNvBlock, scale, factor, words + begin, out + begin);
      } else {
        round_block(x + begin, count, scale, factor, words + begin, out + begin);
      }
    }
  }

  template <class T>
  static FP8_INLINE void round_block(const T* __restrict x, int64_t count, float scale, float factor,
                                     const uint32_t* __restrict words, uint16_t* __restrict out) {
    for (int64_t i = 0; i < count; ++i) {
      const float y = load(x[i]) * factor;
      const int32_t bits = std::bit_cast<int32_t>(y), mag_bits = bits & kMagnitude;
      const int32_t max_bits = std::bit_cast<int32_t>(kMax);
      const float mag = std::bit_cast<float>(mag_bits < max_bits ? mag_bits : max_bits);
      const float unit = mag < 2.0f ? 0.5f : (mag < 4.0f ? 1.0f : 2.0f);
      const float per_unit = mag < 2.0f ? 2.0f : (mag < 4.0f ? 1.0f : 0.5f);
      const float units = mag * per_unit;
      float rounded;
      if constexpr (stochastic) {
        const float below = static_cast<float>(static_cast<int32_t>(units));
        const float random = static_cast<float>(static_cast<int32_t>(words[i] >> 8)) * 0x1p-24f;
        rounded = below + (random < units - below ? 1.0f : 0.0f);
      } else {
        constexpr float magic = 0x1.8p23f;  // rounds to an integer, ties to even
        rounded = (units + magic) - magic;
      }
      const int32_t value = std::bit_cast<int32_t>(rounded * unit * scale);
      out[i] = static_cast<uint16_t>((value | (bits & ~kMagnitude)) >> 16);
    }
  }
};

struct RowAmax {
  template <class T>
  static FP8_INLINE void run(const T* x, int64_t n, float* amax) {
    *amax = amax_row(x, n);
  }
};

template <class T>
float row_amax(const T* x, int64_t n) {
  float amax;
  dispatch<RowAmax>(x, n, &amax);
  return amax;
}

template <class T>
float amax_of(const T* x, int64_t rows, int64_t cols) {
  SharedAmax amax;
  parallel_rows(rows, cols, [&](int64_t r) { amax.raise(row_amax(x + r * cols, cols)); });
  return amax.value();
}

Seed seed_of(const Contract& check, const std::optional<Tensor>& seed, int64_t stream) {
  if (!seed) return {false, {0, 0}, 0};
  check.cpu("seed", *seed);
  check.tensor("seed", *seed, {ScalarType::Long}, {});
  const auto bits = static_cast<uint64_t>(*data<const int64_t>(*seed));
  return {
      true, {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)}, static_cast<uint32_t>(stream)};
}

std::tuple<Tensor, Tensor> cast_nvfp4(const Tensor& x_in, bool by_row, int64_t block_rows,
                                      const std::optional<Tensor>& seed_in, int64_t stream) {
  const Contract check("cast_nvfp4");
  check.cpu("x", x_in);
  check.rank("x", x_in, 2);
  check.dtype("x", x_in, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half});
  check.require(block_rows == 1 || block_rows == 16, "block_rows", "is ", block_rows, ", must be 1 or 16");
  const Seed seed = seed_of(check, seed_in, stream);
  const Tensor x = dense(x_in);
  const int64_t rows = x.size(0), cols = x.size(1), blocks = (cols + kNvBlock - 1) / kNvBlock;
  const int64_t width = blocks * kNvBlock;  // random bits are drawn for whole blocks
  Tensor q = empty({rows, cols}, ScalarType::BFloat16);
  Tensor scale_inv = by_row ? empty({rows, 1}, ScalarType::Float) : empty({}, ScalarType::Float);
  const auto inverse_of_amax = [](float amax) {
    return std::bit_cast<int32_t>(amax) >= kInfinity ? std::bit_cast<float>(0x7fc00000)
                                                     : 1.0f / tensor_scale(amax);
  };
  with_element(x.scalar_type(), [&](auto element) {
    using T = typename decltype(element)::type;
    const auto* in = data<const T>(x);
    const float shared_amax = by_row ? 0.0f : amax_of(in, rows, cols);
    if (!by_row) *data<float>(scale_inv) = inverse_of_amax(shared_amax);
    parallel_rows((rows + block_rows - 1) / block_rows, cols * block_rows, [&](int64_t group) {
      thread_local Scratch amaxes, floats, random;
      auto* block_amaxes = amaxes.get<int32_t>(blocks + 1);
      auto* scales = floats.get<float>(2 * blocks + 1);
      const int64_t begin = group * block_rows, end = std::min(rows, begin + block_rows);
      std::fill_n(block_amaxes, blocks, 0);
      for (int64_t r = begin; r < end; ++r) dispatch<BlockAmaxes>(in + r * cols, cols, block_amaxes);
      const uint32_t* words = nullptr;
      for (int64_t r = begin; r < end; ++r) {
        if (r == begin || by_row) {
          const float amax = by_row ? row_amax(in + r * cols, cols) : shared_amax;
          if (by_row) data<float>(scale_inv)[r] = inverse_of_amax(amax);
          dispatch<BlockScales>(static_cast<const int32_t*>(block_amaxes), blocks, tensor_scale(amax), scales,
                                scales + blocks);
        }
        const auto* row_scales = static_cast<const float*>(scales);
        if (seed.is_set) {
          auto* drawn = random.get<uint32_t>(width + 1);
          dispatch<Philox>(seed, static_cast<uint64_t>(r * (width / 4)), width / 4, drawn);
          words = drawn;
        }
        uint16_t* out = data<uint16_t>(q) + r * cols;
        seed.is_set
            ? dispatch<RoundRow<true>>(in + r * cols, cols, row_scales, row_scales + blocks, words, out)
            : dispatch<RoundRow<false>>(in + r * cols, cols, row_scales, row_scales + blocks, words, out);
      }
    });
  });
  return {q, scale_inv};
}

// Up to 16 rows times the signs of Transformer Engine's transform, Hadamard's matrix in Sylvester's order,
// and 1/4: a butterfly over rows, 16 columns at a time.
struct RotateRows {
  template <class T>
  static FP8_INLINE void run(const T* x, int64_t rows, int64_t cols, uint16_t* out) {
    int64_t begin = 0;
    for (; begin + kNvBlock <= cols; begin += kNvBlock) rotate(x + begin, rows, cols, kNvBlock, out + begin);
    if (begin < cols) rotate(x + begin, rows, cols, cols - begin, out + begin);
  }

  template <class T>
  static FP8_INLINE void rotate(const T* x, int64_t rows, int64_t stride, int64_t lanes, uint16_t* out) {
    constexpr float signs[kNvBlock] = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};
    float v[kNvBlock][kNvBlock] = {};
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < lanes; ++c) v[r][c] = load(x[r * stride + c]);
    }
    for (int r = 0; r < kNvBlock; ++r) {
      for (int c = 0; c < kNvBlock; ++c) v[r][c] *= signs[r];
    }
    for (int step = 1; step < kNvBlock; step *= 2) {
      for (int r = 0; r < kNvBlock; ++r) {
        if ((r & step) != 0) continue;
        for (int c = 0; c < kNvBlock; ++c) {
          const float first = v[r][c], second = v[r + step][c];
          v[r][c] = first + second;
          v[r + step][c] = first - second;
        }
      }
    }
    for (int r = 0; r < kNvBlock; ++r) {
      for (int64_t c = 0; c < lanes; ++c) {
        BF16 value;
        store(v[r][c] * 0.25f, &value);
        out[r * stride + c] = value.bits;
      }
    }
  }
};

Tensor rotate(const Tensor& x_in) {
  const Contract check("rotate");
  check.cpu("x", x_in);
  check.rank("x", x_in, 2);
  check.dtype("x", x_in, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half});
  const Tensor x = dense(x_in);
  const int64_t rows = x.size(0), cols = x.size(1), groups = (rows + kNvBlock - 1) / kNvBlock;
  Tensor out = empty({groups * kNvBlock, cols}, ScalarType::BFloat16);
  with_element(x.scalar_type(), [&](auto element) {
    const auto* in = data<const typename decltype(element)::type>(x);
    parallel_rows(groups, kNvBlock * cols, [&](int64_t group) {
      const int64_t begin = group * kNvBlock, count = std::min(kNvBlock, rows - begin);
      dispatch<RotateRows>(in + begin * cols, count, cols, data<uint16_t>(out) + begin * cols);
    });
  });
  return out;
}

}  // namespace
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("cast_nvfp4", TORCH_BOX(&fp8serve::cast_nvfp4));
  m.impl("rotate", TORCH_BOX(&fp8serve::rotate));
  fp8serve::report<fp8serve::kVector<fp8serve::Numerics::exact>>("cast_nvfp4");
  fp8serve::report<fp8serve::kVector<fp8serve::Numerics::exact>>("rotate");
}
