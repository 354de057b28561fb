// scaled_mm: FP8 [M, K] x FP8 [N, K] -> [M, N] in FP32, BF16 or FP16, any mix of formats and scale
// granularities; scaled_mm_quantize: the same with FP8 output and its amax.
//
// This file checks the arguments and tries the kernels (gemm.h) in order of speed:
//
//   rows                        Ada, sm_120                 Hopper, sm_100
//   1..16   (E4M3 x E4M3)       skinny                      skinny
//   17..64  (E4M3 x E4M3)       skinny                      CUTLASS or skinny, by the table of tiles
//   more, or E5M2               sm_120: CUTLASS, else mma   CUTLASS, else mma
//
// The mma kernel takes every product. The CUTLASS kernels do not take
//
//   types and tiles that are not compiled (gemm_sm90.cu, gemm_sm100.cu, gemm_sm120.cu), such as FP16 and E5M2
//     output
//   rows of the output that are not a multiple of 16 bytes
//   pairs of scale granularities that no recipe uses
//   what CUTLASS itself refuses: on sm_120, block scales with K or N not a multiple of 128
//   operands for which the driver cannot encode a TMA descriptor
//
// cuBLASLt multiplies where the table of tiles says that it is faster (gemm_torch.h). scaled_mm_by runs the
// kernel that the caller names, for tests and for measuring the table of tiles.
//
// In the invariant mode (`by_rows` is off) the formats alone choose the kernel, and a row has the same bits
// however many are computed: E4M3 x E4M3 and BF16 take the skinny kernel up to 64 rows and the tall kernel,
// which adds in the same order, for more; other formats take the mma kernel.
//
// gemm_kernels switches kernels off; if none of ours is left, cuBLASLt multiplies, and if it is off or does
// not take the product, the reference.
#include <torch/csrc/stable/library.h>

#include <array>
#include <limits>
#include <string>

#include "cuda/chips.h"
#include "cuda/gemm.h"
#include "cuda/gemm_bf16.h"
#include "cuda/gemm_skinny.h"
#include "cuda/gemm_switches.h"
#include "cuda/gemm_tiles.h"
#include "cuda/gemm_torch.h"
#include "cuda/layout.h"
#include "watch.h"

namespace fp8serve {
namespace {

[[maybe_unused]] bool gemm_cutlass(const Gemm& g, TileChoice choice, const OnDevice& device,
                                   const Tensor& allocator) {
  [[maybe_unused]] const int chip = device.capability();
  if (!aligned(g.a_scale.data, 16) || !aligned(g.b_scale.data, 16))
    return false;  // a view may begin anywhere
  [[maybe_unused]] const bool inside = g.a_scale.inside() || g.b_scale.inside();
#define FP8SERVE_ANSWER(arch) \
  (inside ? gemm_##arch##_inside : gemm_##arch##_outside)(g, choice, device, allocator)
#ifdef FP8SERVE_HAVE_sm90
  if (runs_on(chip, 90, false)) return FP8SERVE_ANSWER(sm90);
#endif
#ifdef FP8SERVE_HAVE_sm100
  if (runs_on(chip, 100, FP8SERVE_HAVE_sm100 == 2)) return FP8SERVE_ANSWER(sm100);
#endif
#ifdef FP8SERVE_HAVE_sm120
  if (runs_on(chip, 120, FP8SERVE_HAVE_sm120 == 2)) return FP8SERVE_ANSWER(sm120);
#endif
  (void)choice, (void)allocator;
  return false;
}

bool is_on(Tile tile) { return gemm_switches.on(static_cast<GemmKernel>(1 + static_cast<int>(tile))); }
static_assert(kGemmKernels[1 + static_cast<int>(Tile::thin32)] == "thin32");

Scales scales_of(const Gemm& g) {
  if (g.a_scale.inside() || g.b_scale.inside()) return Scales::block;
  if (g.a_scale.one() != g.b_scale.one()) return Scales::mixed;
  return g.a_scale.one() ? Scales::tensor : Scales::row;
}

TileChoice looked_up(const Gemm& g, const OnDevice& device) {
  const int chip = family_of(device.capability());
  return tile_for(chip, scales_of(g), g.m, g.n, g.k, device.multiprocessors());
}

// Tries the tile of the table, then that of the shape, then all others. Returns false if none takes the
// product.
bool gemm_first_tile(const Gemm& g, TileChoice best, const OnDevice& device, const Tensor& allocator) {
  const int chip = family_of(device.capability());
  const TileChoice by_shape = tile_by_shape(chip, g.m, g.n, device.multiprocessors());
  for (const Tile tile : {best.tile, by_shape.tile, Tile::medium, Tile::large, Tile::small}) {
    if (tile == Tile::cublaslt || tile == Tile::skinny || !is_on(tile)) continue;
    if (gemm_cutlass(g, {tile, best.swizzle}, device, allocator)) return true;
  }
  return false;
}

bool decoding(const Gemm& g) { return g.m <= kSkinnyRows && !g.a_e5m2 && !g.b_e5m2; }

// Returns false if cuBLASLt is off or does not take the product.
bool gemm_cublaslt_if_on(const Product& p, const OnDevice& device) {
  const auto kernel = cublaslt_for(p);
  if (!kernel || !gemm_switches.on(*kernel)) return false;
  gemm_cublaslt(p, device);
  return true;
}

bool skinny_takes(const Gemm& g) { return decoding(g) && gemm_switches.on(GemmKernel::skinny); }

// Returns whether the skinny kernel is tried first. Without an FP8 warp instruction (Hopper, sm_100) it
// multiplies in FP16: from 17 rows on it is first only if the table chooses it.
bool skinny_is_first(const Gemm& g, const OnDevice& device) {
  if (is_invariant()) return decoding(g);
  if (!skinny_takes(g)) return false;
  const int chip = family_of(device.capability());
  return g.m <= 16 || (chip != 90 && chip != 100) || looked_up(g, device).tile == Tile::skinny;
}

bool tall_is_first(const Gemm& g) { return is_invariant() && g.m > kSkinnyRows && !g.a_e5m2 && !g.b_e5m2; }

// Returns false if no kernel that is on takes the product.
bool run(const Gemm& g, const OnDevice& device, const Product& p) {
  if (skinny_is_first(g, device)) return gemm_skinny(g, device), true;
  if (is_invariant()) return (tall_is_first(g) ? gemm_tall : gemm_mma)(g, device), true;
  const TileChoice best = looked_up(g, device);
  if (best.tile == Tile::cublaslt && gemm_cublaslt_if_on(p, device)) return true;
  if (gemm_first_tile(g, best, device, p.out)) return true;
  if (skinny_takes(g)) return gemm_skinny(g, device), true;
  if (gemm_switches.on(GemmKernel::mma)) return gemm_mma(g, device), true;
  return gemm_cublaslt_if_on(p, device);
}

// Runs the kernel of that name. Returns false if there is none, or it does not take the product.
bool run_by(const std::string& kernel, int swizzle, const Gemm& g, const OnDevice& device, const Product& p) {
  if (kernel == "mma") return gemm_mma(g, device), true;
  if (kernel == "tall") return !g.a_e5m2 && !g.b_e5m2 && (gemm_tall(g, device), true);
  if (kernel == "skinny") return decoding(g) && (gemm_skinny(g, device), true);
  if (kernel == "cublaslt") return cublaslt_for(p).has_value() && (gemm_cublaslt(p, device), true);
  constexpr std::array kTiles = {"large", "medium", "small", "thin128", "thin64", "thin32"};  // Tile's order
  for (size_t i = 0; i < kTiles.size(); ++i) {
    if (kernel == kTiles[i]) return gemm_cutlass(g, {static_cast<Tile>(i), swizzle}, device, p.out);
  }
  return false;
}

// --- contract
// ---------------------------------------------------------------------------------------------------

Scale scale_of(const DeviceContract& check, const char* name, const Tensor& scale, Size rows, Size k) {
  check.here(name, scale);
  check.dtype(name, scale, {ScalarType::Float});
  Scale out{.data = data<const float>(scale)};
  if (scale.numel() == 1 && (scale.dim() == 0 || scale.dim() == 2)) return out;
  check.rank(name, scale, 2);
  const Size tiles = ceil_div(rows, kScaleBlock), blocks = ceil_div(k, kScaleBlock);
  const bool by_row = scale.size(0) == rows.value();
  if (!by_row) check.shape(name, scale, {tiles, blocks});
  if (by_row && scale.size(1) != 1) check.shape(name, scale, {rows, blocks});
  if (k.value() == 0 && scale.numel() == 0) return Scale{};  // an empty sum: nothing to scale
  out.shift = by_row ? 0 : 7;
  out.blocks = by_row && scale.size(1) == 1 ? 0 : static_cast<int>(blocks.value());
  return out;
}

void check_sizes(const DeviceContract& check, std::initializer_list<Size> sizes) {
  for (const Size& size : sizes) {
    check.require(size.value() < std::numeric_limits<int>::max() - kScaleBlock, size.name, "is ",
                  size.value(), ", must fit 32 bits");
  }
}

void check_high(const DeviceContract& check, ScalarType out_dtype) {
  check.require(std::find(kHigh.begin(), kHigh.end(), out_dtype) != kHigh.end(), "out_dtype", "is ",
                torch::headeronly::toString(out_dtype), ", must be Float, BFloat16 or Half");
}

struct Operands {
  const Tensor &a, &b, &a_scale, &b_scale;
  const std::optional<Tensor>& bias;
};

// Checks the operands, allocates the output [M, N] and calls multiply(Gemm, device, Product) unless the
// output is empty. Returns the output.
template <class Multiply>
Tensor with_gemm(const DeviceContract& check, const Operands& in, ScalarType out_dtype,
                 const Multiply& multiply) {
  check.rank("a", in.a, 2);
  const Size m{"M", in.a.size(0)}, k{"K", in.a.size(1)};
  check.tensor("a", in.a, kFp8, {m, k});
  check.rank("b", in.b, 2);
  const Size n{"N", in.b.size(0)};
  check.tensor("b", in.b, kFp8, {n, k});
  if (in.bias) check.tensor("bias", *in.bias, kHigh, {n});
  check_sizes(check, {m, n, k});
  const OnDevice device(in.a);
  const Tensor a_scale = dense(in.a_scale), b_scale = dense(in.b_scale);
  const Tensor bias = in.bias ? dense(*in.bias) : a_scale;
  const Scale a_by = scale_of(check, "a_scale_inv", a_scale, m, k),
              b_by = scale_of(check, "b_scale_inv", b_scale, n, k);
  Tensor out = empty(in.a, {m.value(), n.value()}, out_dtype);
  if (out.numel() == 0) return out;
  const Tensor a = k_contiguous(in.a, device), b = k_contiguous(in.b, device);
  multiply(Gemm{.a = data<const uint8_t>(a),
                .b = data<const uint8_t>(b),
                .a_e5m2 = a.scalar_type() == ScalarType::Float8_e5m2,
                .b_e5m2 = b.scalar_type() == ScalarType::Float8_e5m2,
                .m = static_cast<int>(m.value()),
                .n = static_cast<int>(n.value()),
                .k = static_cast<int>(a.size(1)),
                .a_scale = a_by,
                .b_scale = b_by,
                .bias = in.bias ? bias.data_ptr() : nullptr,
                .bias_type = number_of(bias.scalar_type()),
                .out_type = number_of(out_dtype),
                .out = out.data_ptr()},
           device, Product{a, b, a_scale, b_scale, in.bias ? std::optional(bias) : std::nullopt, out});
  return out;
}

Tensor scaled_mm(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                 const std::optional<Tensor>& bias, ScalarType out_dtype) {
  const DeviceContract check("scaled_mm", a);
  check_high(check, out_dtype);
  return with_gemm(check, {a, b, a_scale, b_scale, bias}, out_dtype,
                   [](const Gemm& g, const OnDevice& device, const Product& p) {
                     if (!run(g, device, p)) gemm_reference(p);
                   });
}

// Marks b as not written by the preceding kernel, unless b is a copy of `weights` that this op has made.
Gemm with_stored(Gemm g, const Tensor& weights) {
  g.stored = g.b == weights.data_ptr() && gemm_switches.on(GemmKernel::early_weights);
  return g;
}

// The arguments of an op whose input is x: the product multiplies the watched cast of its norm. Without a
// weight the input is FP8.
struct NormArguments {
  const std::optional<Tensor>& weight;
  std::optional<double> eps;
  const std::optional<Tensor>&scale, &seen, &saturated, &rows;
};

// The left operand of a product with stored weights.
class StoredInput {
 public:
  StoredInput(const DeviceContract& check, const Tensor& a, const NormArguments& norm)
      : q(norm.weight ? empty_cast(check, a, norm) : a), x_(a), norm_(norm) {
    const bool is_padded = a.size(1) % 16 != 0;  // with_gemm copies q before multiply() is called
    if (norm.weight && is_padded && a.numel() > 0) cast(OnDevice(a)), is_cast_ = true;
  }
  // Returns the norm that the skinny kernel shall cast itself. Otherwise casts it, if there is one.
  std::optional<Normed> norm_or_cast(const Gemm& g, const OnDevice& device) const {
    if (!norm_.weight || is_cast_) return std::nullopt;
    const Rows rows = rows_of(x_);
    const Tensor& weight = *norm_.weight;
    if (gemm_switches.on(GemmKernel::normed) && x_.scalar_type() == ScalarType::BFloat16 &&
        rows.held.data_ptr() == x_.data_ptr() && fast_rows(rows) && weight.is_contiguous() &&
        aligned(weight.data_ptr(), 16) && !g.b_scale.inside() && skinny_is_first(g, device) &&
        skinny_takes_norm(g, device)) {
      return Normed{.x = data<BF16>(x_),
                    .stride = rows.stride,
                    .weight = data<BF16>(weight),
                    .eps = static_cast<float>(*norm_.eps),
                    .scale = data<float>(*norm_.scale),
                    .out = counters(*norm_.seen, *norm_.saturated, norm_.rows)};
    }
    cast(device);
    return std::nullopt;
  }

  const Tensor q;  // FP8; without a value before norm_or_cast()

 private:
  static Tensor empty_cast(const DeviceContract& check, const Tensor& x, const NormArguments& norm) {
    check.require(norm.eps && norm.scale && norm.seen && norm.saturated, "norm_weight",
                  "needs eps, norm_scale, norm_amax and norm_saturated");
    check_watched(check, x, norm.weight, norm.eps, *norm.scale, *norm.seen, *norm.saturated, norm.rows);
    return empty(x, {x.size(0), x.size(1)}, ScalarType::Float8_e4m3fn);
  }
  void cast(const OnDevice& device) const {
    cast_norm(x_, *norm_.weight, *norm_.eps, *norm_.scale, q,
              counters(*norm_.seen, *norm_.saturated, norm_.rows), device);
  }
  const Tensor& x_;
  const NormArguments norm_;
  bool is_cast_ = false;
};

// Multiplies without doing more than the product.
void multiply_stored(const Gemm& g, const std::optional<Normed>& norm, const OnDevice& device,
                     const Product& p) {
  if (norm) return gemm_skinny_normed(g, *norm, device);
  if (!run(g, device, p)) gemm_reference(p);
}

Tensor stored_mm(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                 const std::optional<Tensor>& bias, ScalarType out_dtype,
                 const std::optional<Tensor>& norm_weight, const std::optional<double>& eps,
                 const std::optional<Tensor>& norm_scale, const std::optional<Tensor>& norm_seen,
                 const std::optional<Tensor>& norm_saturated, const std::optional<Tensor>& norm_rows) {
  const DeviceContract check("stored_mm", a);
  check_high(check, out_dtype);
  check.rank("a", a, 2);
  const StoredInput input(check, a, {norm_weight, eps, norm_scale, norm_seen, norm_saturated, norm_rows});
  return with_gemm(check, {input.q, b, a_scale, b_scale, bias}, out_dtype,
                   [&](const Gemm& plain, const OnDevice& device, const Product& p) {
                     const Gemm g = with_stored(plain, b);
                     multiply_stored(g, input.norm_or_cast(g, device), device, p);
                   });
}

// Returns whether the skinny kernel multiplies and can do more with the product than store it.
bool can_fuse_output(const Gemm& g, const OnDevice& device) {
  return g.m <= kFusedRows && !g.a_scale.inside() && !g.b_scale.inside() && skinny_is_first(g, device);
}

// stored_mm with the joined weights of gate and up, then the watched cast of silu(gate) * up: in one launch
// if the skinny kernel multiplies.
Tensor stored_gated_mm(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                       const std::optional<Tensor>& bias, const Tensor& scale, const Tensor& seen,
                       const Tensor& saturated, const std::optional<Tensor>& rows,
                       const std::optional<Tensor>& norm_weight, const std::optional<double>& eps,
                       const std::optional<Tensor>& norm_scale, const std::optional<Tensor>& norm_seen,
                       const std::optional<Tensor>& norm_saturated, const std::optional<Tensor>& norm_rows) {
  const DeviceContract check("stored_gated_mm", a);
  check.rank("a", a, 2);
  check.rank("b", b, 2);
  check.require(b.size(0) % 2 == 0, "b", "has ", b.size(0), " rows, must be an even number");
  check.tensor("scale", scale, {ScalarType::Float}, {});
  check.tensor("seen", seen, {ScalarType::Float}, {});
  check.tensor("saturated", saturated, {ScalarType::Long}, {});
  if (rows) check.tensor("rows", *rows, {ScalarType::Long}, {});
  const StoredInput input(check, a, {norm_weight, eps, norm_scale, norm_seen, norm_saturated, norm_rows});
  const int64_t width = b.size(0) / 2;
  const Tensor q = empty(a, {a.size(0), width}, ScalarType::Float8_e4m3fn);
  const CastCounters out = counters(seen, saturated, rows);
  bool done = q.numel() == 0;
  const auto multiply = [&](Gemm g, const OnDevice& device, const Product& p) {
    g = with_stored(g, b);
    const std::optional<Normed> norm = input.norm_or_cast(g, device);
    if (g.n % 16 == 0 && can_fuse_output(g, device) && gemm_switches.on(GemmKernel::gated)) {
      const GatedCast to{data<uint8_t>(q), data<const float>(scale), out};
      gemm_skinny_gated(g, norm ? &*norm : nullptr, to, device);
      done = true;
    } else {
      multiply_stored(g, norm, device, p);
    }
  };
  Tensor y = with_gemm(check, {input.q, b, a_scale, b_scale, bias}, ScalarType::BFloat16, multiply);
  if (!done) {
    cast_gated(torch::stable::narrow(y, 1, 0, width), torch::stable::narrow(y, 1, width, width), scale, q,
               out, OnDevice(a));
  }
  return q;
}

// stored_mm with the joined weights of queries, keys and values, then rotary_write_kv: in one launch if the
// skinny kernel multiplies and the caches are BF16 or E4M3.
Tensor stored_rotary_mm(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                        const std::optional<Tensor>& bias, const Tensor& cos, const Tensor& sin,
                        const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots,
                        const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                        const std::optional<Tensor>& norm_weight, const std::optional<double>& eps,
                        const std::optional<Tensor>& norm_scale, const std::optional<Tensor>& norm_seen,
                        const std::optional<Tensor>& norm_saturated, const std::optional<Tensor>& norm_rows) {
  const DeviceContract check("stored_rotary_mm", a);
  check.rank("a", a, 2);
  check.rank("b", b, 2);
  check.rank("k_cache", k_cache, 4);
  const Size t{"T", a.size(0)}, kv_heads{"kv_heads", k_cache.size(2)}, dim{"D", k_cache.size(3)};
  const int64_t q_width = b.size(0) - 2 * kv_heads.value() * dim.value();
  check.require(dim.value() > 0 && dim.value() % 2 == 0, "k_cache", "has heads of ", dim.value(),
                ", must be an even number");
  check.require(
      q_width > 0 && q_width % dim.value() == 0, "b", "has ", b.size(0),
      " rows, must be those of whole heads of queries, and of the caches' heads of keys and values");
  const RotaryTarget to = rotary_target(check, {cos, sin, k_cache, v_cache, slots, k_scale, v_scale},
                                        ScalarType::BFloat16, t, kv_heads, dim);
  const StoredInput input(check, a, {norm_weight, eps, norm_scale, norm_seen, norm_saturated, norm_rows});
  const int64_t heads = q_width / dim.value(), kv = kv_heads.value();
  const Tensor q = empty(a, {t.value(), heads, dim.value()}, ScalarType::BFloat16);
  const bool fits =
      dim.value() % 16 == 0 && (to.cache == ScalarType::BFloat16 || to.cache == ScalarType::Float8_e4m3fn);
  bool done = q.numel() == 0;
  const auto multiply = [&](Gemm g, const OnDevice& device, const Product& p) {
    g = with_stored(g, b);
    const std::optional<Normed> norm = input.norm_or_cast(g, device);
    if (fits && can_fuse_output(g, device) && gemm_switches.on(GemmKernel::rotary)) {
      Rotary r = to.rotary;
      r.q.count = static_cast<int>(heads);
      r.k.count = r.v.count = static_cast<int>(kv);
      r.out = q.data_ptr();
      gemm_skinny_rotary(g, norm ? &*norm : nullptr, r, is_fp8(to.cache), device);
      done = true;
    } else {
      multiply_stored(g, norm, device, p);
    }
  };
  const Tensor y = with_gemm(check, {input.q, b, a_scale, b_scale, bias}, ScalarType::BFloat16, multiply);
  if (!done) {
    Tensor all = torch::stable::view(y, {t.value(), heads + 2 * kv, dim.value()});
    const auto part = [&](int64_t first, int64_t count) {
      return torch::stable::narrow(all, 1, first, count);
    };
    rotate_and_write(to, part(0, heads), part(heads, kv), part(heads + kv, kv), q, OnDevice(a));
  }
  return q;
}

// scaled_mm by the kernel called `kernel`, even if that is switched off: "skinny", "tall", "mma", "cublaslt",
// or CUTLASS's "large", "medium", "small", "thin128", "thin64", "thin32".
Tensor scaled_mm_by(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                    const std::optional<Tensor>& bias, ScalarType out_dtype, std::string kernel,
                    int64_t swizzle) {
  const DeviceContract check("scaled_mm_by", a);
  check_high(check, out_dtype);
  check.require(swizzle >= 1 && swizzle <= 64, "swizzle", "is ", swizzle, ", must be 1 to 64");
  return with_gemm(check, {a, b, a_scale, b_scale, bias}, out_dtype,
                   [&](const Gemm& g, const OnDevice& device, const Product& p) {
                     check.require(run_by(kernel, static_cast<int>(swizzle), g, device, p), "kernel", "is ",
                                   kernel, ", which does not multiply this here");
                   });
}

// Returns which kernels are off, joined by "+". `off` lists kernels, joined by "+", to be switched off, and
// all others are switched on; "none" switches all on, and "" changes nothing. `here` is any tensor on a GPU;
// the switches apply to all GPUs of the process.
std::string gemm_kernels(const Tensor& here, std::string off) {
  const DeviceContract check("gemm_kernels", here);
  if (!off.empty()) {
    check.require(gemm_switches.turn_off(off == "none" ? "" : off), "off", "is '", off,
                  "', must be names of kernels joined by +, none, or empty to ask");
  }
  return gemm_switches.off();
}

// Returns the product times out_scale [], cast to FP8, and the product's amax []. The kernel that multiplies
// also casts. If no kernel takes the product, a second op casts an FP32 product.
std::tuple<Tensor, Tensor> scaled_mm_quantize(const Tensor& a, const Tensor& b, const Tensor& a_scale,
                                              const Tensor& b_scale, const std::optional<Tensor>& bias,
                                              const Tensor& out_scale, ScalarType out_dtype) {
  const DeviceContract check("scaled_mm_quantize", a);
  check.require(is_fp8(out_dtype), "out_dtype", "is ", torch::headeronly::toString(out_dtype),
                ", must be Float8_e4m3fn or Float8_e5m2");
  check.tensor("out_scale", out_scale, {ScalarType::Float}, {});
  check.rank("a", a, 2);
  check.rank("b", b, 2);
  const OnDevice here(a);
  Tensor amax = empty(a, {}, ScalarType::Float);
  const AmaxScratch scratch = a.size(0) == 0 || b.size(0) == 0 ? AmaxScratch{} : amax_scratch_of(here, a);
  if (scratch.maxima == nullptr) set_zero(amax.data_ptr(), sizeof(float), here.stream());
  bool done = true;
  Tensor q = with_gemm(check, {a, b, a_scale, b_scale, bias}, out_dtype,
                       [&](Gemm g, const OnDevice& device, const Product& p) {
                         g.out_scale = data<const float>(out_scale);
                         g.amax = data<float>(amax);
                         g.scratch = scratch;
                         g.out_e5m2 = out_dtype == ScalarType::Float8_e5m2;
                         done = run(g, device, p);
                       });
  if (done) return {q, amax};
  return quantized(scaled_mm(a, b, a_scale, b_scale, bias, ScalarType::Float), out_scale, out_dtype);
}

// BF16 [M, K] x BF16 [N, K]: the head of a model, and its layers where FP8 is off.
Tensor mm(const Tensor& a_in, const Tensor& b_in, const std::optional<Tensor>& bias_in,
          ScalarType out_dtype) {
  const DeviceContract check("mm", a_in);
  check.rank("a", a_in, 2);
  const Size m{"M", a_in.size(0)}, k{"K", a_in.size(1)};
  check.tensor("a", a_in, {ScalarType::BFloat16}, {m, k});
  check.rank("b", b_in, 2);
  const Size n{"N", b_in.size(0)};
  check.tensor("b", b_in, {ScalarType::BFloat16}, {n, k});
  if (bias_in) check.tensor("bias", *bias_in, kHigh, {n});
  check_high(check, out_dtype);
  check_sizes(check, {m, n, Size{"2 K", 2 * k.value()}});
  const OnDevice device(a_in);
  Tensor out = empty(a_in, {m.value(), n.value()}, out_dtype);
  if (out.numel() == 0) return out;
  const Tensor a = rows_padded(a_in, device), b = rows_padded(b_in, device);
  const Tensor bias = bias_in ? dense(*bias_in) : a_in;
  const Gemm g{.a = data<const uint8_t>(a),
               .b = data<const uint8_t>(b),
               .a_e5m2 = false,
               .b_e5m2 = false,
               .m = static_cast<int>(m.value()),
               .n = static_cast<int>(n.value()),
               .k = static_cast<int>(ceil_over(2 * k.value(), 16) * 16),
               .a_scale = {},
               .b_scale = {},
               .bias = bias_in ? bias.data_ptr() : nullptr,
               .bias_type = number_of(bias.scalar_type()),
               .out_type = number_of(out_dtype),
               .out = out.data_ptr()};
  (g.m <= kSkinnyRows ? gemm_skinny_bf16 : is_invariant() ? gemm_tall_bf16 : gemm_mma_bf16)(g, device);
  return out;
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(256) add_to(T* out, const T* residual, int64_t n) {
  after_earlier_kernels();
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x) * kChunk;
  if (at >= n) return;
  const Chunk a = load_chunk<kAligned>(static_cast<const T*>(out), at, n),
              b = load_chunk<kAligned>(residual, at, n);
  store_high<kAligned>(Chunk{a.value[0] + b.value[0], a.value[1] + b.value[1], a.value[2] + b.value[2],
                             a.value[3] + b.value[3], a.value[4] + b.value[4], a.value[5] + b.value[5],
                             a.value[6] + b.value[6], a.value[7] + b.value[7]},
                       out, at, n);
}

void add(const Tensor& out, const Tensor& residual, const OnDevice& device) {
  const int64_t n = out.numel();
  const bool fast = n % kChunk == 0 && aligned(out.data_ptr(), 16) && aligned(residual.data_ptr(), 16);
  with_element(out.scalar_type(), [&](auto element) {
    using T = typename decltype(element)::type;
    launch_early(fast ? add_to<T, true> : add_to<T, false>, static_cast<unsigned>(ceil_over(n, 256 * kChunk)),
                 256, 0, device.stream(), data<T>(out), data<T>(residual), n);
  });
}

// BF16 activations that the product has to cast.
struct Uncast {
  const Tensor &x, &scale;
  CastCounters out;
};

// Returns residual + product, where the product is rounded to the residual's type before the addition. The
// skinny and the tall kernel add the residual themselves; after any other kernel a second launch adds it.
// With `from`, in.a is uninitialised: it receives the cast of from->x unless the skinny kernel casts as it
// loads.
Tensor product_onto(const DeviceContract& check, const Operands& in, const Tensor& residual_in,
                    const Uncast* from = nullptr) {
  check.rank("a", in.a, 2);
  check.rank("b", in.b, 2);
  check.tensor("residual", residual_in, kHigh, {{"M", in.a.size(0)}, {"N", in.b.size(0)}});
  const Tensor residual = dense(residual_in);
  return with_gemm(check, in, residual.scalar_type(), [&](Gemm g, const OnDevice& device, const Product& p) {
    g = with_stored(g, in.b);
    const bool skinny = skinny_is_first(g, device), adds = skinny || tall_is_first(g);
    if (adds) g.residual = residual.data_ptr();
    if (skinny && from != nullptr && !g.b_scale.inside()) {
      return gemm_skinny_casting(g, {data<BF16>(from->x), data<float>(from->scale), from->out}, device);
    }
    if (from != nullptr) cast_plain(from->x, from->scale, in.a, from->out, device);
    if (!run(g, device, p)) gemm_reference(p);
    if (!adds) add(p.out, residual, device);
  });
}

Tensor scaled_mm_add(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                     const std::optional<Tensor>& bias, const Tensor& residual) {
  return product_onto(DeviceContract("scaled_mm_add", a), {a, b, a_scale, b_scale, bias}, residual);
}

// quantize_watched(x), then scaled_mm_add: in one launch if the skinny kernel multiplies.
Tensor watched_mm_add(const Tensor& x_in, const Tensor& scale, const Tensor& seen, const Tensor& saturated,
                      const std::optional<Tensor>& rows, const Tensor& b, const Tensor& scale_inv,
                      const Tensor& b_scale, const std::optional<Tensor>& bias, const Tensor& residual) {
  const DeviceContract check("watched_mm_add", x_in);
  check_watched(check, x_in, std::nullopt, std::nullopt, scale, seen, saturated, rows);
  check.tensor("scale_inv", scale_inv, {ScalarType::Float}, {});
  const Tensor x = dense(x_in);
  const bool here =
      x.scalar_type() == ScalarType::BFloat16 && x.size(1) % 16 == 0 && aligned(x.data_ptr(), 16);
  if (!here) {
    const Tensor q = quantize_watched(x, std::nullopt, std::nullopt, scale, seen, saturated, rows);
    return scaled_mm_add(q, b, scale_inv, b_scale, bias, residual);
  }
  const Tensor q = empty(x, {x.size(0), x.size(1)}, ScalarType::Float8_e4m3fn);
  const Uncast from{x, scale, counters(seen, saturated, rows)};
  return product_onto(check, {q, b, scale_inv, b_scale, bias}, residual, &from);
}

}  // namespace
}  // namespace fp8serve

// `doctor` searches the library's file for this text, because a torch without CUDA cannot load the library.
#ifdef FP8SERVE_ARCHITECTURES
#define FP8SERVE_QUOTED(words) #words
#define FP8SERVE_TEXT(words) FP8SERVE_QUOTED(words)
extern "C" __attribute__((visibility("default"), used)) const char fp8serve_cuda_architectures[] =
    "fp8serve-cuda-architectures=" FP8SERVE_TEXT(FP8SERVE_ARCHITECTURES) ";"
    "fp8serve-cuda-runtime=" FP8SERVE_TEXT(FP8SERVE_RUNTIME) ";";
#endif

STABLE_TORCH_LIBRARY_IMPL(FP8SERVE_OPS, FP8SERVE_DEVICE_KEY, m) {
  m.impl("scaled_mm", TORCH_BOX(&fp8serve::scaled_mm));
  m.impl("stored_mm", TORCH_BOX(&fp8serve::stored_mm));
  m.impl("stored_gated_mm", TORCH_BOX(&fp8serve::stored_gated_mm));
  m.impl("stored_rotary_mm", TORCH_BOX(&fp8serve::stored_rotary_mm));
  m.impl("scaled_mm_by", TORCH_BOX(&fp8serve::scaled_mm_by));
  m.impl("gemm_kernels", TORCH_BOX(&fp8serve::gemm_kernels));
  m.impl("scaled_mm_quantize", TORCH_BOX(&fp8serve::scaled_mm_quantize));
  m.impl("scaled_mm_add", TORCH_BOX(&fp8serve::scaled_mm_add));
  m.impl("watched_mm_add", TORCH_BOX(&fp8serve::watched_mm_add));
  m.impl("mm", TORCH_BOX(&fp8serve::mm));
}
