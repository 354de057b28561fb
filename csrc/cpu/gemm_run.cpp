// Work is cut into tasks of rows x columns; a task
//  1. unpacks its rows of `a` into a panel that stays in the second-level cache,
//  2. for every 16 columns unpacks `b` into a panel that stays in the first-level cache and runs the tiles
//     over it; a few rows (decoding) skip that panel: the weights, packed or not, are converted in
//     registers,
//  3. at the last block of K each tile scales, adds the bias, rounds, adds the residual and stores.
// gemm.h says in which order a sum is taken and why the cut into tasks cannot change a bit of it.
#include "cpu/gemm_run.h"

#include "cpu/gemm_packed.h"
#include "cpu/isa.h"
#include "cpu/tensors.h"

namespace fp8serve::gemm {
namespace {

constexpr int64_t kRowsPerTask = 256;      // 512 KiB of BF16 for a block of K: half a second-level cache
constexpr int64_t kResident = 512 * 1024;  // bytes of `a` that are unpacked whole, once, for all tasks
constexpr int64_t kAloneBytes = 1 << 17;   // a smaller `b` and ...
constexpr int64_t kAloneWork = 1 << 22;    // ... fewer products are not worth waking other threads

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

// One thread's working memory.
struct Memory {
  Scratch a, b, sums, a_scale, rows;
};
thread_local Memory memory;

class Task {
 public:
  Task(const Problem& p, const Level& level, const std::byte* resident, int64_t m0, int64_t m1, int64_t n0,
       int64_t n1)
      : p_(p), level_(level), resident_(resident), m0_(m0), rows_(m1 - m0), n0_(n0), n1_(n1) {
    reads_packed_ = p.b.packed && level.stream_packed != nullptr;
    streams_ = rows_ <= (reads_packed_ ? level.packed_rows : level.stream_rows);
    if (p.b.packed && !reads_packed_) plain_ = memory.rows.get<char>(kGroup * kBlock * bytes_of(p.b.kind));
    if (!streams_) b_panel_ = memory.b.get<std::byte>(kGroup * p.stride() * level.element_size);
    if (p.k_blocks() > 1) sums_ = memory.sums.get<float>(rows_ * ceil_to(n1 - n0, kGroup));
    a_scale_ = memory.a_scale.get<float>(rows_);
    for (int64_t r = 0; r < rows_; ++r) a_scale_[r] = p.a.outer(m0 + r);
  }

  void run() { resident_ != nullptr ? columns_outside() : blocks_outside(); }

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
    level_.unpack_row(p_.a.at(m0_ + row, kb * kBlock), p_.k_count(kb), p_.a.kind,
                      panel + row * p_.stride() * level_.element_size);
  }

  void columns_at(int64_t n, int64_t kb, const void** b) const {
    if (plain_ != nullptr) return unpacked(b);
    const char* first = p_.b.at(n, kb * kBlock);
    const int64_t step = p_.k * bytes_of(p_.b.kind), last = p_.n - 1 - n;
    for (int64_t c = 0; c < kGroup; ++c) b[c] = first + std::min(c, last) * step;
  }
  // Packed columns, for a level that wants rows: find_rows() has laid them here.
  void unpacked(const void** b) const {
    for (int64_t c = 0; c < kGroup; ++c) b[c] = plain_ + c * kBlock * bytes_of(p_.b.kind);
  }

  // What columns_outside() reads after block kb of the columns from n; at the end, the same again.
  void columns_after(int64_t n, int64_t kb, const void** b) const {
    const bool more = kb + 1 < p_.k_blocks(), another = n + kGroup < n1_;
    columns_at(more || !another ? n : n + kGroup, more ? kb + 1 : (another ? 0 : kb), b);
  }

  int64_t column(int64_t n) const { return std::min(n, p_.n - 1); }  // a ragged group repeats its last column

  // sums[rows][16 columns from n] (+)= block kb, and with the last block the output itself.
  void multiply(const std::byte* panel, int64_t kb, int64_t n) {
    Tile tile{.b = b_panel_, .a_stride = p_.stride(), .k = p_.k_count(kb), .add = kb > 0};
    const void *b[kGroup], *next[kGroup];
    reads_packed_ ? find_packed(n, kb, tile) : find_rows(n, kb, b, next);
    const float* a_scale[std::max(kMaxRows, kMaxStream)];
    float b_inner[kBlock / kScaleBlock * kGroup], b_outer[kGroup], bias[kGroup];
    if (p_.blocked()) {
      spread_scales(n, kb, b_inner);
      tile.a_scale = a_scale;
      tile.b_scale = b_inner;
    }
    Ending ending{};
    if (kb + 1 == p_.k_blocks()) {
      ending = end_of(n, b_outer, bias);
      tile.ending = &ending;
    }
    const int64_t most = streams_ ? rows_per_stream() : kMaxRows;
    for (int64_t r = 0; r < rows_; r += tile.rows) {
      tile.rows = static_cast<int>(std::min(most, rows_ - r));
      tile.a = panel + r * p_.stride() * level_.element_size;
      if (sums_ != nullptr) tile.out = sums_ + (n - n0_) * rows_ + r * kGroup;
      for (int i = 0; p_.blocked() && i < tile.rows; ++i) a_scale[i] = inner(p_.a, m0_ + r + i, kb);
      multiply_tile(tile, b, next);
      if (tile.ending != nullptr) advance(ending, tile.rows);
    }
  }

  // Block kb of the 16 columns from n: where they can be streamed, else in the panel.
  void find_packed(int64_t n, int64_t kb, Tile& tile) {
    const char* block = p_.b.block(n, kb * kBlock);
    if (streams_) tile.b = block;
    if (!streams_) level_.unpack_packed(block, tile.k, p_.b.kind, b_panel_);
  }
  void find_rows(int64_t n, int64_t kb, const void** b, const void** next) {
    const int64_t k = p_.k_count(kb), stride = kBlock * bytes_of(p_.b.kind);
    if (plain_ != nullptr) unpack_block(p_.b.block(n, kb * kBlock), k, p_.b.kind, stride, plain_);
    columns_at(n, kb, b);
    if (streams_) columns_after(n, kb, next);
    if (!streams_) level_.unpack_columns(b, k, p_.b.kind, b_panel_);
  }

  // Even shares: 9 rows are 5 and 4.
  int64_t rows_per_stream() const {
    const int64_t streams = (rows_ + level_.stream_rows - 1) / level_.stream_rows;
    return (rows_ + streams - 1) / streams;
  }

  void multiply_tile(const Tile& tile, const void* const* b, const void* const* next) const {
    if (!streams_) return level_.tile(tile);
    reads_packed_ ? level_.stream_packed(tile, p_.b.kind) : level_.stream(tile, b, next, p_.b.kind);
  }

  const float* inner(const Operand& x, int64_t row, int64_t kb) const {
    return x.inner(row, p_.ones.data()) + kb * (kBlock / kScaleBlock);
  }

  // [128 of K][16 columns from n]. A tile's columns lie in one 128 x 128 block.
  void spread_scales(int64_t n, int64_t kb, float* out) const {
    const int64_t blocks = (p_.k_count(kb) + kScaleBlock - 1) / kScaleBlock;
    if (p_.b.scale_rows != 1) {
      const float* scale = inner(p_.b, n, kb);
      for (int64_t i = 0; i < blocks; ++i) std::fill_n(out + i * kGroup, kGroup, scale[i]);
      return;
    }
    for (int64_t c = 0; c < kGroup; ++c) {
      const float* scale = inner(p_.b, column(n + c), kb);
      for (int64_t i = 0; i < blocks; ++i) out[i * kGroup + c] = scale[i];
    }
  }

  // The end of the task's first rows in the 16 columns from n, whose scales and biases it fills in.
  Ending end_of(int64_t n, float* b_scale, float* bias) const {
    const int64_t columns = std::min(kGroup, n1_ - n), at = (m0_ * p_.n + n) * p_.out_bytes();
    std::fill_n(b_scale, kGroup, 1.0f);
    std::fill_n(bias, kGroup, 0.0f);
    for (int64_t c = 0; c < columns; ++c) b_scale[c] = p_.b.outer(n + c);
    if (p_.bias != nullptr) {
      with_element(p_.bias_type, [&](auto type) {
        const auto* values = static_cast<const typename decltype(type)::type*>(p_.bias);
        for (int64_t c = 0; c < columns; ++c) bias[c] = load(values[n + c]);
      });
    }
    return {.a_scale = a_scale_,
            .b_scale = b_scale,
            .bias = bias,
            .residual = p_.residual == nullptr ? nullptr : static_cast<const std::byte*>(p_.residual) + at,
            .out = static_cast<std::byte*>(p_.out) + at,
            .stride = p_.n,
            .columns = columns,
            .type = p_.out_type};
  }

  void advance(Ending& e, int64_t rows) const {
    const int64_t bytes = rows * p_.n * p_.out_bytes();
    e.a_scale += rows;
    e.out = static_cast<std::byte*>(e.out) + bytes;
    if (e.residual != nullptr) e.residual = static_cast<const std::byte*>(e.residual) + bytes;
  }

  const Problem& p_;
  const Level& level_;
  const std::byte* resident_;
  int64_t m0_, rows_, n0_, n1_;
  bool streams_, reads_packed_;
  char* plain_ = nullptr;  // a packed block as 16 rows, for a level that cannot read it
  std::byte* b_panel_ = nullptr;
  float* sums_ = nullptr;
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
      level.unpack_row(p.a.at(r, kb * kBlock), p.k_count(kb), p.a.kind,
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

// Equal shares of whole tiles.
int64_t rows_per_task(const Problem& p) {
  const int64_t tasks = (p.m + kRowsPerTask - 1) / kRowsPerTask;
  return ceil_to((p.m + tasks - 1) / tasks, kMaxRows);
}

bool alone(const Problem& p) {
  return p.n * p.k * bytes_of(p.b.kind) < kAloneBytes && p.m * p.n * p.k < kAloneWork;
}

}  // namespace

void run(const Problem& p) {
  const Level& building_blocks = level();
  const std::byte* resident = unpack_resident(p, building_blocks);
  if (resident != nullptr && alone(p)) return Task(p, building_blocks, resident, 0, p.m, 0, p.n).run();
  const int64_t rows = resident != nullptr ? p.m : rows_per_task(p);
  const int64_t row_tasks = (p.m + rows - 1) / rows;
  const int64_t columns = columns_per_task(p, row_tasks);
  parallel_tasks(row_tasks * ((p.n + columns - 1) / columns), [&](int64_t task) {
    const int64_t m = task % row_tasks * rows, n = task / row_tasks * columns;
    Task(p, building_blocks, resident, m, std::min(p.m, m + rows), n, std::min(p.n, n + columns)).run();
  });
}

}  // namespace fp8serve::gemm
