// pack_4bit brings a weight into the order of four_bit.py; mm_4bit multiplies by one, packed or not;
// widen_4bit makes BF16 of a row, for levels that read rows.
#include "cpu/gemm_4bit.h"

#include <torch/csrc/stable/library.h>

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

// Attaches the weight's scales: of the blocks, and outside the sum those of the rows or the global one.
void attach_4bit_scales(const Contract& check, const Tensor& scales,
                        const std::optional<Tensor>& global_scale, Size n, Size k, Operand& out,
                        RowScales& rows) {
  const bool mx = out.kind == Kind::mxfp4;
  const int64_t blocks = k.value() / block_of(out.kind);
  const auto* bytes = data<const uint8_t>(scales);
  out.distances = bytes;
  out.mx_codes = bytes;
  out.mx_blocks = blocks;
  if (mx) {
    check.require(!global_scale, "global_scale", "is for E4M3 scales, not for E8M0");
    rows.resize(n.value());
    if (!out.packed) compute_row_scales(bytes, blocks, {0}, n.value(), rows);
    for (int64_t i = 0; i < n.value() && out.packed; ++i) {
      rows.codes[static_cast<size_t>(i)] = bytes[i / kGroup * (1 + blocks) * kGroup + i % kGroup];
      rows.values[static_cast<size_t>(i)] = value_of_code(rows.codes[static_cast<size_t>(i)]);
    }
    out.mx_rows = rows.codes.data();
    out.scale = rows.values.data();
  } else if (global_scale) {
    check.cpu("global_scale", *global_scale);
    check.dtype("global_scale", *global_scale, {ScalarType::Float});
    out.scale = data<const float>(*global_scale);
    out.scale_rows = global_scale->dim() == 0 ? std::max<int64_t>(n.value(), 1) : 1;
    if (global_scale->dim() != 0) check.shape("global_scale", *global_scale, {n});
  }
}

Tensor mm_4bit(const Tensor& x, const Tensor& codes, const Tensor& scales,
               const std::optional<Tensor>& global_scale, const std::optional<Tensor>& bias,
               const std::optional<Tensor>& x_scale) {
  const Contract check("mm_4bit");
  check.rank("x", x, 2);
  check.dtype("scales", scales, kScaleTypes);
  const Kind kind = kind_of_scales(scales);
  const bool packed = codes.dim() == 3;
  if (!packed) check.rank("codes", codes, 2);
  const Size m{"M", x.size(0)}, k{"K", x.size(1)}, n{"N", codes.size(0) * (packed ? kGroup : 1)};
  check.tensor("x", x, kBf16, {m, k});
  check.require(k.value() % block_of(kind) == 0, "x", "has rows of ", k.value(),
                " values, must be a multiple of ", block_of(kind));
  const Size blocks{"blocks", k.value() / block_of(kind)}, groups{"N / 16", n.value() / kGroup};
  if (packed) {
    check.tensor("codes", codes, {ScalarType::Byte}, {groups, {"K / 8", k.value() / kRun}, {"a run", 64}});
    const int64_t extra = kind == Kind::mxfp4 ? 1 : 0;
    check.tensor("scales", scales, kScaleTypes,
                 {groups, {"blocks", extra + blocks.value()}, {"rows", kGroup}});
  } else {
    check.tensor("codes", codes, {ScalarType::Byte}, {n, {"K / 2", k.value() / 2}});
    check.tensor("scales", scales, kScaleTypes, {n, blocks});
  }
  if (bias) check.tensor("bias", *bias, kHigh, {n});
  const Tensor a = dense(x), b = dense(codes), b_scales = dense(scales);
  const auto global = global_scale ? std::optional(dense(*global_scale)) : std::nullopt;
  const auto held_bias = bias ? std::optional(dense(*bias)) : std::nullopt;
  const auto held_x_scale = x_scale ? std::optional(dense(*x_scale)) : std::nullopt;
  Tensor out = empty({m.value(), n.value()}, ScalarType::BFloat16);
  Problem p{.a = {data<const char>(a), Kind::bf16, k.value()},
            .b = {.values = data<const char>(b), .kind = kind, .k = k.value(), .packed = packed},
            .m = m.value(),
            .n = n.value(),
            .k = k.value(),
            .bias_type = held_bias ? held_bias->scalar_type() : ScalarType::BFloat16,
            .out_type = ScalarType::BFloat16,
            .bias = held_bias ? held_bias->data_ptr() : nullptr,
            .residual = nullptr,
            .out = out.data_ptr()};
  RowScales rows;
  attach_4bit_scales(check, b_scales, global, n, k, p.b, rows);
  if (held_x_scale) {
    attach_scale(check, "x_scale_inv", *held_x_scale, m, k, p.a);
    check_beside_mx(check, "x_scale_inv", p.a.scale_blocks, "[] or [rows, 1]");
  }
  if (out.numel() > 0) is_far(p) ? run_far(p) : run(p);
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
  fp8serve::report("mm_4bit",
                   []() -> const fp8serve::Variant& { return fp8serve::gemm::best_level().variant; });
}
