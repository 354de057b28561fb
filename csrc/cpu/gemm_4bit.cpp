// pack_4bit brings a weight into the order of four_bit.py; mm_4bit multiplies by one, packed or not, and
// grouped_mm_4bit rows sorted by expert by those of their experts; widen_4bit makes BF16 of a row, for levels
// that read rows.
#include "cpu/gemm_4bit.h"

#include <torch/csrc/stable/library.h>

#include "cpu/experts.h"
#include "cpu/gemm_arguments.h"

namespace fp8serve::gemm {
namespace {

constexpr auto kScaleTypes = {ScalarType::Float8_e4m3fn, ScalarType::Float8_e8m0fnu};
constexpr uint8_t kZeroDistance = 254;

Kind kind_of_scales(const Tensor& scales) { return is_mx(scales) ? Kind::mxfp4 : Kind::nvfp4; }

// Every second code, from the first or the second on, of a run in the lower half of the result.
FP8_INLINE uint32_t halve(uint32_t codes) {
  codes &= 0x0f0f0f0f;
  codes = (codes | codes >> 4) & 0x00ff00ff;
  return (codes | codes >> 8) & 0xffff;
}
// The reverse: the codes of a run in the lower half of `codes` at every second place.
FP8_INLINE uint32_t spread(uint32_t codes) {
  codes = (codes | codes << 8) & 0x00ff00ff;
  return (codes | codes << 4) & 0x0f0f0f0f;
}
FP8_INLINE uint32_t packed_run(uint32_t run) { return halve(run) | halve(run >> 4) << 16; }
FP8_INLINE uint32_t unpacked_run(uint32_t run) { return spread(run & 0xffff) | spread(run >> 16) << 4; }

uint32_t load_run(const uint8_t* p) {
  uint32_t run;
  std::memcpy(&run, p, sizeof run);
  return run;
}

// How a block is packed: its distance, and its codes as (codes ^ flips) & keeps | sets.
struct PackedScale {
  uint8_t distance;
  uint32_t flips = 0, keeps = ~0u, sets = 0;
};

PackedScale pack_scale(Kind kind, uint8_t code, uint8_t row) {
  if (kind == Kind::mxfp4) {
    const int distance = row - code;
    return distance > kMaxShift<E4M3> ? PackedScale{0, 0, 0} : PackedScale{static_cast<uint8_t>(distance)};
  }
  const int magnitude = code & 0x7f;
  if (magnitude == 0) return {kZeroDistance, 0, 0};
  if (magnitude == 0x7f) return {kNanDistance, 0, 0, 0x22222222};
  const auto bits = std::bit_cast<uint32_t>(decode<E4M3>(static_cast<uint8_t>(magnitude)));
  const int distance = ((127 + 9) << 3) - static_cast<int>(bits >> 20);
  return {static_cast<uint8_t>(distance), (code & 0x80) != 0 ? 0x88888888 : 0};
}

float value_of_distance(Kind kind, uint8_t distance) {
  if (kind == Kind::mxfp4) return std::bit_cast<float>((127 - distance) << 23);
  if (distance == kNanDistance) return std::bit_cast<float>(0x7fc00000);
  return std::bit_cast<float>((((127 + 9) << 3) - distance) << 20);
}

// Packs row c of 16, of k values.
void pack_row(const uint8_t* codes, const uint8_t* scales, Kind kind, int64_t k, int64_t c, char* packed,
              uint8_t* distances) {
  const int64_t block = block_of(kind), blocks = k / block;
  uint8_t row = 0;
  if (kind == Kind::mxfp4) {
    LargestCodes::run(scales, 1, blocks, &row);
    distances[c] = row;
    distances += kGroup;
  }
  for (int64_t b = 0; b < blocks; ++b) {
    const PackedScale scale = pack_scale(kind, scales[b], row);
    distances[b * kGroup + c] = scale.distance;
    for (int64_t i = b * block / kRun; i < (b + 1) * block / kRun; ++i) {
      const uint32_t run = ((load_run(codes + 4 * i) ^ scale.flips) & scale.keeps) | scale.sets;
      const uint32_t bits = packed_run(run);
      std::memcpy(packed + (i * kGroup + c) * 4, &bits, sizeof bits);
    }
  }
}

// The values of E2M1 codes times the scale of their block, k of them in blocks of `block`.
struct Widen4Bit {
  static FP8_INLINE uint32_t value(uint32_t code, float factor) {
    const auto magnitude = static_cast<int32_t>(code & 7);
    const float normal = std::bit_cast<float>((magnitude << 22) + (126 << 23));
    const float value = (magnitude < 2 ? static_cast<float>(magnitude) * 0.5f : normal) * factor;
    return (std::bit_cast<uint32_t>(value) ^ (code & 8) << 28) >> 16;
  }
  static FP8_INLINE void run(const uint8_t* __restrict codes, const float* __restrict factors, int64_t block,
                             int64_t k, uint16_t* __restrict out) {
    for (int64_t begin = 0; begin < k; begin += block) {
      const float factor = factors[begin / block];
      for (int64_t i = begin / 2; i < (begin + block) / 2; ++i) {
        out[2 * i] = static_cast<uint16_t>(value(codes[i], factor));
        out[2 * i + 1] = static_cast<uint16_t>(value(codes[i] >> 4, factor));
      }
    }
  }
};

void pack_4bit(const Tensor& codes, const Tensor& scales, const Tensor& out_codes, const Tensor& out_scales) {
  const Contract check("pack_4bit");
  check.rank("codes", codes, 2);
  check.dtype("scales", scales, kScaleTypes);
  const Kind kind = kind_of_scales(scales);
  const int64_t n = codes.size(0), k = 2 * codes.size(1), extra = kind == Kind::mxfp4 ? 1 : 0;
  check.require(n % kGroup == 0 && codes.numel() > 0, "codes", "is [", n, ", ", codes.size(1),
                "], must have a multiple of 16 rows");
  check.require(k % block_of(kind) == 0, "codes", "is ", k, " values wide, must be a multiple of ",
                block_of(kind));
  const Size groups{"N / 16", n / kGroup}, blocks{"blocks", k / block_of(kind)};
  check.tensor("codes", codes, {ScalarType::Byte}, {{"N", n}, {"K / 2", k / 2}});
  check.tensor("scales", scales, kScaleTypes, {{"N", n}, blocks});
  check.tensor("out_codes", out_codes, {ScalarType::Byte}, {groups, {"K / 8", k / kRun}, {"a run", 64}});
  check.tensor("out_scales", out_scales, {scales.scalar_type()},
               {groups, {"blocks", extra + blocks.value()}, {"rows", kGroup}});
  check.require(out_codes.is_contiguous() && out_scales.is_contiguous(), "out_codes and out_scales",
                "must be contiguous");
  const Tensor held = dense(codes), held_scales = dense(scales);
  parallel_tasks(n / kGroup, [&](int64_t group) {
    for (int64_t c = 0; c < kGroup; ++c) {
      const int64_t row = group * kGroup + c;
      pack_row(data<const uint8_t>(held) + row * k / 2,
               data<const uint8_t>(held_scales) + row * blocks.value(), kind, k, c,
               data<char>(out_codes) + group * kGroup * k / 2,
               data<uint8_t>(out_scales) + group * (extra + blocks.value()) * kGroup);
    }
  });
}

// Checks a tensor of one weight, or of the weights of all experts.
template <class... Sizes>
void check_weight(const Contract& check, const char* name, const Tensor& x,
                  std::initializer_list<ScalarType> types, const std::optional<Size>& experts,
                  const Sizes&... sizes) {
  experts ? check.tensor(name, x, types, {*experts, sizes...}) : check.tensor(name, x, types, {sizes...});
}

std::optional<Tensor> dense_or_none(const std::optional<Tensor>& x) {
  return x ? std::optional(dense(*x)) : std::nullopt;
}

// A weight, or the weights of all experts, checked and dense.
struct Weights {
  Kind kind;
  bool packed;
  int64_t n, k;
  Tensor codes, scales;
  std::optional<Tensor> global_scale, bias;
  bool global_by_row;
  RowScales rows = {};  // of MXFP4

  int64_t blocks() const { return k / block_of(kind); }
  int64_t scales_of_row() const { return blocks() + (packed && kind == Kind::mxfp4 ? 1 : 0); }

  // Finds the scales of the rows of these experts, one after the other.
  void find_row_scales(const std::vector<int64_t>& experts) {
    if (kind != Kind::mxfp4) return;
    const auto* bytes = data<const uint8_t>(scales);
    if (!packed) return compute_row_scales(bytes, blocks(), experts, n, rows);
    rows.resize(static_cast<int64_t>(experts.size()) * n);
    size_t i = 0;
    for (const int64_t expert : experts) {
      for (int64_t row = expert * n; row < (expert + 1) * n; ++row, ++i) {
        rows.codes[i] = bytes[row / kGroup * scales_of_row() * kGroup + row % kGroup];
        rows.values[i] = value_of_code(rows.codes[i]);
      }
    }
  }

  // The rows of x from `begin` to `end` times the weight of an expert, the `index`-th of find_row_scales().
  Problem problem(const Tensor& x, int64_t expert, int64_t index, int64_t begin, int64_t end,
                  const Tensor& out) const {
    const auto* bytes = data<const uint8_t>(scales) + expert * n * scales_of_row();
    Operand b{.values = data<const char>(codes) + expert * n * k / 2,
              .kind = kind,
              .k = k,
              .packed = packed,
              .mx_codes = bytes,
              .mx_blocks = blocks(),
              .distances = bytes};
    if (kind == Kind::mxfp4) {
      b.mx_rows = rows.codes.data() + index * n;
      b.scale = rows.values.data() + index * n;
    } else if (global_scale) {
      b.scale = data<const float>(*global_scale) + expert * (global_by_row ? n : 1);
      b.scale_rows = global_by_row ? 1 : std::max<int64_t>(n, 1);
    }
    const int64_t bias_bytes = bias && bias->scalar_type() == ScalarType::Float ? 4 : 2;
    return {.a = {data<const char>(x) + begin * k * bytes_of(Kind::bf16), Kind::bf16, k},
            .b = b,
            .m = end - begin,
            .n = n,
            .k = k,
            .bias_type = bias ? bias->scalar_type() : ScalarType::BFloat16,
            .out_type = ScalarType::BFloat16,
            .bias = bias ? data<const char>(*bias) + expert * n * bias_bytes : nullptr,
            .residual = nullptr,
            .out = data<char>(out) + begin * n * bytes_of(Kind::bf16)};
  }
};

// Checks x [M, K] and the weight or, if `experts` is given, the weights of all experts.
Weights weights_of(const Contract& check, const Tensor& x, const Tensor& codes, const Tensor& scales,
                   const std::optional<Tensor>& global_scale, const std::optional<Tensor>& bias,
                   const std::optional<Size>& experts) {
  check.rank("x", x, 2);
  check.dtype("scales", scales, kScaleTypes);
  const int64_t first = experts ? 1 : 0;  // the dimension of rows, or of groups of them
  const Kind kind = kind_of_scales(scales);
  const bool packed = codes.dim() == first + 3;
  if (!packed) check.rank("codes", codes, first + 2);
  const Size m{"M", x.size(0)}, k{"K", x.size(1)}, n{"N", codes.size(first) * (packed ? kGroup : 1)};
  check.tensor("x", x, kBf16, {m, k});
  check.require(k.value() % block_of(kind) == 0, "x", "has rows of ", k.value(),
                " values, must be a multiple of ", block_of(kind));
  const Size blocks{"blocks", k.value() / block_of(kind)}, groups{"N / 16", n.value() / kGroup};
  if (packed) {
    const int64_t extra = kind == Kind::mxfp4 ? 1 : 0;
    check_weight(check, "codes", codes, {ScalarType::Byte}, experts, groups, Size{"K / 8", k.value() / kRun},
                 Size{"a run", 64});
    check_weight(check, "scales", scales, kScaleTypes, experts, groups,
                 Size{"blocks", extra + blocks.value()}, Size{"rows", kGroup});
  } else {
    check_weight(check, "codes", codes, {ScalarType::Byte}, experts, n, Size{"K / 2", k.value() / 2});
    check_weight(check, "scales", scales, kScaleTypes, experts, n, blocks);
  }
  if (bias) check_weight(check, "bias", *bias, kHigh, experts, n);
  const bool by_row = global_scale && global_scale->dim() > first;
  if (global_scale) {
    check.require(kind == Kind::nvfp4, "global_scale", "is for E4M3 scales, not for E8M0");
    if (by_row) {
      check_weight(check, "global_scale", *global_scale, {ScalarType::Float}, experts, n);
    } else {
      check_weight(check, "global_scale", *global_scale, {ScalarType::Float}, experts);
    }
  }
  return {kind,
          packed,
          n.value(),
          k.value(),
          dense(codes),
          dense(scales),
          dense_or_none(global_scale),
          dense_or_none(bias),
          by_row};
}

Tensor mm_4bit(const Tensor& x_in, const Tensor& codes, const Tensor& scales,
               const std::optional<Tensor>& global_scale, const std::optional<Tensor>& bias,
               const std::optional<Tensor>& x_scale_in) {
  const Contract check("mm_4bit");
  Weights weights = weights_of(check, x_in, codes, scales, global_scale, bias, std::nullopt);
  const Tensor x = dense(x_in);
  const auto x_scale = dense_or_none(x_scale_in);
  Tensor out = empty({x.size(0), weights.n}, ScalarType::BFloat16);
  weights.find_row_scales({0});
  Problem p = weights.problem(x, 0, 0, 0, x.size(0), out);
  if (x_scale) {
    attach_scale(check, "x_scale_inv", *x_scale, {"M", p.m}, {"K", p.k}, p.a);
    check_beside_mx(check, "x_scale_inv", p.a.scale_blocks, "[] or [rows, 1]");
  }
  if (out.numel() > 0) is_far(p) ? run_far(p) : run(p);
  return out;
}

Tensor grouped_mm_4bit(const Tensor& x_in, const Tensor& codes, const Tensor& scales,
                       const std::optional<Tensor>& global_scale, const Tensor& offsets,
                       const std::optional<Tensor>& bias) {
  const Contract check("grouped_mm_4bit");
  check.require(codes.dim() > 0, "codes", "has no dimension, must have one for each expert");
  const Size count{"E", codes.size(0)};
  Weights weights = weights_of(check, x_in, codes, scales, global_scale, bias, count);
  const Tensor x = dense(x_in);
  const Experts experts = experts_of(check, offsets, count, x.size(0));
  Tensor out = empty({x.size(0), weights.n}, ScalarType::BFloat16);
  if (out.numel() == 0) return out;
  const std::vector<int64_t> used = experts.with_rows();
  weights.find_row_scales(used);
  std::vector<Problem> problems;
  for (size_t i = 0; i < used.size(); ++i)
    problems.push_back(weights.problem(x, used[i], static_cast<int64_t>(i), experts.begin(used[i]),
                                       experts.end(used[i]), out));
  run(problems.data(), static_cast<int64_t>(problems.size()));
  return out;
}

}  // namespace

void widen_4bit(const Operand& x, int64_t row, int64_t column, int64_t k, uint16_t* out) {
  const int64_t block = block_of(x.kind), blocks = k / block;
  float factors[kBlock / kNvfp4Block];
  uint8_t unpacked[kBlock / 2];
  const auto* codes = reinterpret_cast<const uint8_t*>(x.at(row, column));
  if (x.packed) {
    const uint8_t* distances = distances_of(x, row, column) + row % kGroup;
    for (int64_t b = 0; b < blocks; ++b) factors[b] = value_of_distance(x.kind, distances[b * kGroup]);
    const char* runs = x.block(row - row % kGroup, column) + row % kGroup * 4;
    for (int64_t i = 0; i < k / kRun; ++i) {
      const uint32_t run = unpacked_run(load_run(reinterpret_cast<const uint8_t*>(runs) + i * kGroup * 4));
      std::memcpy(unpacked + 4 * i, &run, sizeof run);
    }
    codes = unpacked;
  } else {
    const uint8_t* scales = x.mx_codes + row * x.mx_blocks + column / block;
    for (int64_t b = 0; b < blocks; ++b) {
      const int shift = x.kind == Kind::mxfp4 ? x.mx_rows[row] - scales[b] : 0;
      factors[b] = x.kind == Kind::nvfp4     ? kDecode<E4M3>.value[scales[b]]
                   : shift > kMaxShift<E4M3> ? 0.0f
                                             : value_of_distance(x.kind, static_cast<uint8_t>(shift));
    }
  }
  dispatch<Widen4Bit>(codes, static_cast<const float*>(factors), block, k, out);
}

}  // namespace fp8serve::gemm

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("pack_4bit", TORCH_BOX(&fp8serve::gemm::pack_4bit));
  fp8serve::report<fp8serve::kPlain>("pack_4bit");
  m.impl("mm_4bit", TORCH_BOX(&fp8serve::gemm::mm_4bit));
  m.impl("grouped_mm_4bit", TORCH_BOX(&fp8serve::gemm::grouped_mm_4bit));
  for (const char* op : {"mm_4bit", "grouped_mm_4bit"}) fp8serve::report(op, fp8serve::gemm::bf16_variant);
}
