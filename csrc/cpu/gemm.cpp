// scaled_mm: FP8 [M, K] x FP8 [N, K] -> [M, N] in FP32, BF16 or FP16, any mix of formats and scale
// granularities.
//
// Both operands have K contiguous, which is how weights lie in a checkpoint: they are read as they are,
// memory-mapped or not, and nothing is packed beforehand. Work is cut into tasks of rows x columns; a task
//  1. unpacks its rows of `a` into a panel that stays in the second-level cache,
//  2. for every 16 columns unpacks `b` into a panel that stays in the first-level cache, runs the tiles over
//  it, and
//     with 1 or 2 rows (decoding) skips that panel: the weights are converted in registers, at memory
//     speed,
//  3. scales, adds the bias, rounds and stores.
// gemm.h says in which order a sum is taken and why the cut into tasks cannot change a bit of it.
#include "cpu/gemm.h"

#include <torch/csrc/stable/library.h>

#include <vector>

#include "check.h"
#include "cpu/isa.h"
#include "cpu/tensors.h"
#include "fp8.h"

namespace fp8serve {
namespace gemm {
namespace {

constexpr int64_t kRowsPerTask = 256;      // 512 KiB of BF16 for a block of K: half a second-level cache
constexpr int64_t kResident = 512 * 1024;  // bytes of `a` that are unpacked whole, once, for all tasks

int64_t ceil_to(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

const Level& level() {
  switch (isa()) {
    case Isa::avx512bf16:
      return avx512bf16();
    case Isa::avx512:
      return avx512();
    case Isa::avx2:
      return avx2();
    default:
      return portable();
  }
}

// One FP8 matrix [rows, K] and its scale_inv: [] or [rows, 1] (outside the sum), [rows, blocks] or
// [ceil(rows / 128), blocks] (inside it).
struct Operand {
  const uint8_t* codes;
  bool e5m2;
  int64_t rows;
  const float* scale;
  int64_t scale_rows;    // rows of `a` that share a scale row: 1, 128, or all
  int64_t scale_blocks;  // 0: outside the sum
  int64_t k;

  // With K = 0 a block scale has no element, and nothing is left to scale.
  float outer(int64_t row) const { return scale_blocks != 0 || k == 0 ? 1.0f : scale[row / scale_rows]; }
  const float* inner(int64_t row, const float* ones) const {
    return scale_blocks != 0 ? scale + row / scale_rows * scale_blocks : ones;
  }
};

struct Problem {
  Operand a, b;
  int64_t m, n, k;
  ScalarType bias_type, out_type;
  const void* bias;
  void* out;
  std::vector<float> ones;  // the inner scale of an operand that has none while the other has

  bool blocked() const { return a.scale_blocks != 0 || b.scale_blocks != 0; }
  int64_t stride() const { return std::min(kBlock, ceil_to(k, kChunk)); }  // of a panel row, in elements
  int64_t k_blocks() const { return (k + kBlock - 1) / kBlock; }
  int64_t k_count(int64_t block) const { return std::min(kBlock, k - block * kBlock); }
};

// sums [rows][16] -> out: (sum * a scale) * b scale + bias, rounded once. A whole group is a constant trip
// count: one vector a row; with a variable one the loop's own overhead was a third of a K = 256 GEMM.
template <class T>
struct Finish {
  static FP8_INLINE void row(const float* sums, int64_t columns, float a_scale, const float* b_scale,
                             const float* bias, T* out) {
    for (int64_t c = 0; c < columns; ++c) store(sums[c] * a_scale * b_scale[c] + bias[c], out + c);
  }
  static FP8_INLINE void run(const float* sums, int64_t rows, int64_t columns, const float* a_scale,
                             const float* b_scale, const float* bias, T* out, int64_t stride) {
    for (int64_t r = 0; r < rows; ++r) {
      if (columns == kGroup) {
        row(sums + r * kGroup, kGroup, a_scale[r], b_scale, bias, out + r * stride);
      } else {
        row(sums + r * kGroup, columns, a_scale[r], b_scale, bias, out + r * stride);
      }
    }
  }
};

// One thread's working memory.
struct Memory {
  Scratch a, b, sums, a_scale;
};
thread_local Memory memory;

class Task {
 public:
  Task(const Problem& p, const Level& level, const std::byte* resident, int64_t m0, int64_t m1, int64_t n0,
       int64_t n1)
      : p_(p), level_(level), resident_(resident), m0_(m0), rows_(m1 - m0), n0_(n0), n1_(n1) {
    b_panel_ = memory.b.get<std::byte>(kGroup * p.stride() * level.element_size);
    sums_ = memory.sums.get<float>(rows_ * ceil_to(n1 - n0, kGroup));
    a_scale_ = memory.a_scale.get<float>(rows_);
    for (int64_t r = 0; r < rows_; ++r) a_scale_[r] = p.a.outer(m0 + r);
  }

  void run() {
    if (p_.k == 0) std::fill_n(sums_, rows_ * ceil_to(n1_ - n0_, kGroup), 0.0f);
    resident_ != nullptr ? columns_outside() : blocks_outside();
    for (int64_t n = n0_; n < n1_; n += kGroup) finish(n);
  }

 private:
  // Decoding: each weight row is read from its beginning to its end.
  void columns_outside() {
    for (int64_t n = n0_; n < n1_; n += kGroup) {
      for (int64_t kb = 0; kb < p_.k_blocks(); ++kb) {
        multiply(resident_ + kb * p_.m * p_.stride() * level_.element_size, kb, n);
      }
    }
  }

  // Many rows: one block of K of `a` at a time fits the cache.
  void blocks_outside() {
    auto* panel = memory.a.get<std::byte>(rows_ * p_.stride() * level_.element_size);
    for (int64_t kb = 0; kb < p_.k_blocks(); ++kb) {
      for (int64_t r = 0; r < rows_; ++r) unpack_row(r, kb, panel);
      for (int64_t n = n0_; n < n1_; n += kGroup) multiply(panel, kb, n);
    }
  }

  void unpack_row(int64_t row, int64_t kb, std::byte* panel) const {
    level_.unpack_row(p_.a.codes + (m0_ + row) * p_.k + kb * kBlock, p_.k_count(kb), p_.a.e5m2,
                      panel + row * p_.stride() * level_.element_size);
  }

  int64_t column(int64_t n) const { return std::min(n, p_.n - 1); }  // a ragged group repeats its last column

  // sums[rows][16 columns from n] (+)= block kb
  void multiply(const std::byte* panel, int64_t kb, int64_t n) {
    const bool stream = level_.stream != nullptr && rows_ <= kStreamRows && !p_.blocked();
    const uint8_t* codes[kGroup];
    for (int64_t c = 0; c < kGroup; ++c) codes[c] = p_.b.codes + column(n + c) * p_.k + kb * kBlock;
    if (!stream) level_.unpack_columns(codes, p_.k_count(kb), p_.b.e5m2, b_panel_);
    Tile tile{.b = b_panel_, .a_stride = p_.stride(), .k = p_.k_count(kb), .add = kb > 0};
    const float* a_scale[kMaxRows];
    float b_scale[kBlock / kScaleBlock * kGroup];
    if (p_.blocked()) {
      spread_scales(n, kb, b_scale);
      tile.a_scale = a_scale;
      tile.b_scale = b_scale;
    }
    for (int64_t r = 0; r < rows_; r += tile.rows) {
      tile.rows = static_cast<int>(std::min(kMaxRows, rows_ - r));
      tile.a = panel + r * p_.stride() * level_.element_size;
      tile.out = sums_ + (n - n0_) * rows_ + r * kGroup;
      for (int i = 0; p_.blocked() && i < tile.rows; ++i) a_scale[i] = inner(p_.a, m0_ + r + i, kb);
      stream ? level_.stream(tile, codes, p_.b.e5m2) : level_.tile(tile);
    }
  }

  const float* inner(const Operand& x, int64_t row, int64_t kb) const {
    return x.inner(row, p_.ones.data()) + kb * (kBlock / kScaleBlock);
  }

  // [128 of K][16 columns from n]
  void spread_scales(int64_t n, int64_t kb, float* out) const {
    const int64_t blocks = (p_.k_count(kb) + kScaleBlock - 1) / kScaleBlock;
    for (int64_t c = 0; c < kGroup; ++c) {
      const float* scale = inner(p_.b, column(n + c), kb);
      for (int64_t i = 0; i < blocks; ++i) out[i * kGroup + c] = scale[i];
    }
  }

  void finish(int64_t n) const {
    const int64_t columns = std::min(kGroup, n1_ - n);
    float b_scale[kGroup], bias[kGroup] = {};
    for (int64_t c = 0; c < columns; ++c) b_scale[c] = p_.b.outer(n + c);
    if (p_.bias != nullptr) {
      with_element(p_.bias_type, [&](auto type) {
        const auto* values = static_cast<const typename decltype(type)::type*>(p_.bias);
        for (int64_t c = 0; c < columns; ++c) bias[c] = load(values[n + c]);
      });
    }
    with_element(p_.out_type, [&](auto type) {
      using T = typename decltype(type)::type;
      dispatch<Finish<T>>(sums_ + (n - n0_) * rows_, rows_, columns, a_scale_, b_scale, bias,
                          static_cast<T*>(p_.out) + m0_ * p_.n + n, p_.n);
    });
  }

  const Problem& p_;
  const Level& level_;
  const std::byte* resident_;
  int64_t m0_, rows_, n0_, n1_;
  std::byte* b_panel_;
  float* sums_;
  float* a_scale_;
};

// All of `a` as panels [block of K][row], or null when it is too large to stay in cache.
const std::byte* unpack_resident(const Problem& p, const Level& level) {
  const int64_t bytes = p.k_blocks() * p.m * p.stride() * level.element_size;
  if (bytes > kResident && p.m > kMaxRows) return nullptr;
  thread_local Scratch scratch;  // the caller's: tasks on this thread use `memory`
  auto* panel = scratch.get<std::byte>(bytes);
  for (int64_t kb = 0; kb < p.k_blocks(); ++kb) {
    for (int64_t r = 0; r < p.m; ++r) {
      level.unpack_row(p.a.codes + r * p.k + kb * kBlock, p.k_count(kb), p.a.e5m2,
                       panel + (kb * p.m + r) * p.stride() * level.element_size);
    }
  }
  return panel;
}

// Columns of a task: wide enough to repay unpacking the rows, narrow enough to keep the threads busy.
int64_t columns_per_task(const Problem& p, int64_t row_tasks) {
  const int64_t wanted = 4 * static_cast<int64_t>(torch::stable::get_num_threads());
  int64_t columns = 256;
  while (columns > 2 * kGroup && row_tasks * ((p.n + columns - 1) / columns) < wanted) columns /= 2;
  return columns;
}

void run(const Problem& p) {
  const Level& building_blocks = level();
  const std::byte* resident = unpack_resident(p, building_blocks);
  const int64_t rows = resident != nullptr ? p.m : kRowsPerTask;
  const int64_t row_tasks = (p.m + rows - 1) / rows;
  const int64_t columns = columns_per_task(p, row_tasks);
  parallel_tasks(row_tasks * ((p.n + columns - 1) / columns), [&](int64_t task) {
    const int64_t m = task % row_tasks * rows, n = task / row_tasks * columns;
    Task(p, building_blocks, resident, m, std::min(p.m, m + rows), n, std::min(p.n, n + columns)).run();
  });
}

// --- contract
// -----------------------------------------------------------------------------------------------------

Operand operand(const Contract& check, const char* name, const Tensor& x, const char* scale_name,
                const Tensor& scale, Size rows, Size k) {
  check.cpu(scale_name, scale);
  check.dtype(scale_name, scale, {ScalarType::Float});
  check.cpu(name, x);
  Operand out{.codes = data<const uint8_t>(x),
              .e5m2 = x.scalar_type() == ScalarType::Float8_e5m2,
              .rows = rows.value(),
              .scale = data<const float>(scale),
              .scale_rows = std::max<int64_t>(rows.value(), 1),
              .scale_blocks = 0,
              .k = k.value()};
  if (scale.numel() == 1 && (scale.dim() == 0 || scale.dim() == 2)) return out;
  check.rank(scale_name, scale, 2);
  const Size tiles = ceil_div(rows, kScaleBlock), blocks = ceil_div(k, kScaleBlock);
  const bool by_row = scale.size(0) == rows.value();
  if (!by_row) check.shape(scale_name, scale, {tiles, blocks});
  if (by_row && scale.size(1) != 1) check.shape(scale_name, scale, {rows, blocks});
  out.scale_rows = by_row ? 1 : kScaleBlock;
  // K = 0 has no blocks, but its (empty) scales belong inside the sum all the same
  out.scale_blocks = by_row && scale.size(1) == 1 ? 0 : std::max<int64_t>(blocks.value(), 1);
  return out;
}

Tensor scaled_mm(const Tensor& a_in, const Tensor& b_in, const Tensor& a_scale_in, const Tensor& b_scale_in,
                 const std::optional<Tensor>& bias_in, ScalarType out_dtype) {
  const Contract check("scaled_mm");
  check.rank("a", a_in, 2);
  const Size m{"M", a_in.size(0)}, k{"K", a_in.size(1)};
  check.tensor("a", a_in, {ScalarType::Float8_e4m3fn, ScalarType::Float8_e5m2}, {m, k});
  check.rank("b", b_in, 2);
  const Size n{"N", b_in.size(0)};
  check.tensor("b", b_in, {ScalarType::Float8_e4m3fn, ScalarType::Float8_e5m2}, {n, k});
  const auto high = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
  if (bias_in) check.tensor("bias", *bias_in, high, {n});
  check.require(std::find(high.begin(), high.end(), out_dtype) != high.end(), "out_dtype", "is ",
                torch::headeronly::toString(out_dtype), ", must be Float, BFloat16 or Half");
  const Tensor a = dense(a_in), b = dense(b_in), a_scale = dense(a_scale_in), b_scale = dense(b_scale_in);
  const Tensor bias = bias_in ? dense(*bias_in) : a;
  Tensor out = empty({m.value(), n.value()}, out_dtype);
  Problem p{.a = operand(check, "a", a, "a_scale_inv", a_scale, m, k),
            .b = operand(check, "b", b, "b_scale_inv", b_scale, n, k),
            .m = m.value(),
            .n = n.value(),
            .k = k.value(),
            .bias_type = bias.scalar_type(),
            .out_type = out_dtype,
            .bias = bias_in ? bias.data_ptr() : nullptr,
            .out = out.data_ptr(),
            .ones = {}};
  if (p.blocked()) p.ones.assign(static_cast<size_t>(p.k / kScaleBlock + 1), 1.0f);
  if (out.numel() > 0) run(p);
  return out;
}

}  // namespace
}  // namespace gemm
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) { m.impl("scaled_mm", TORCH_BOX(&fp8serve::gemm::scaled_mm)); }
