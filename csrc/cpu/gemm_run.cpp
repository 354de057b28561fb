// Runs a GEMM. First the rows of `a`, as many as fit kPanel, are unpacked into a panel. Then work is cut into
// tasks of rows x columns, whose rows of the panel's block of K stay in the second-level cache. A task
//  1. goes through its columns, 16 at a time, which become a panel in the first-level cache, and runs the
//     tiles of its rows over it. Each tile also unpacks a share of the next 16, so that the products go on
//     while unpacking waits for memory. A few rows (decoding) need no such panel: the weights are converted
//     in registers;
//  2. applies the epilogue (gemm_epilogue.h) to each tile at the last block of K.
#include "cpu/gemm_run.h"

#include "cpu/features.h"
#include "cpu/gemm_columns.h"
#include "cpu/mx.h"
#include "cpu/rows.h"
#include "cpu/scratch.h"
#include "cpu/tensors.h"

namespace fp8serve::gemm {
namespace {

constexpr int64_t kPanel = 8 << 20;  // bytes of `a` that are unpacked at a time
// A smaller panel stays in the second-level cache with all of its K. Of a larger one, this many rows stay
// there with one block of K, which they read from memory once for this many columns.
constexpr int64_t kResident = 512 * 1024, kRowsPerTask = 43 * kMaxRows, kColumnsPerTask = 256;
// From which rows on FMAs are worth widening to FP32 (gemm_fma.cpp). Weights that are not packed need panels,
// and BF16 weights no widening otherwise.
constexpr int64_t kFmaRowsOfPacked = 2, kFmaRows = 12, kFmaRowsOfBf16 = 32;
constexpr int64_t kColumnsPerStream = 128;  // where the panel is small
// With a smaller `b` and fewer products, waking other threads is not worthwhile.
constexpr int64_t kMinParallelBytes = 1 << 17, kMinParallelProducts = 1 << 22;

int64_t ceil_to(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// One thread's scratch memory.
struct Memory {
  Scratch panels, sums, a_scale;
};
thread_local Memory memory;

// Rows of `a` from `first` on as a level's tiles read them: [block of K][row].
struct Panel {
  const std::byte* values;
  int64_t first, rows, row_bytes;  // of one block of K

  const std::byte* at(int64_t row, int64_t kb) const {
    return values + (kb * rows + row - first) * row_bytes;
  }
};

// Distributes the pieces of a block of K evenly over the tiles during which they are processed. Tiles may be
// short, so next() does not divide.
class Pieces {
 public:
  Pieces(int64_t k, int64_t size, int64_t tiles)
      : k_(k), size_(size), count_((k + size - 1) / size), tiles_(tiles) {}

  // Calls f(begin, end) for the part of K that is due during the next tile, if any.
  template <class F>
  void next(const F& f) {
    const int64_t before = done_;
    due_ += count_;
    while (done_ * tiles_ < due_) ++done_;
    if (done_ > before) f(before * size_, std::min(done_ * size_, k_));
  }

 private:
  int64_t k_, size_, count_, tiles_;
  int64_t done_ = 0, due_ = 0;  // pieces, and pieces x tiles
};

// The scales of each 128 of a tile's K, see Tile.
struct InnerScales {
  static constexpr int64_t kMaxScales = kBlock / kScaleBlock;
  const float* rows[kMostRows];
  float products[kMostRows][kMaxScales], columns[kMaxScales * kGroup];
};

// The outer one of a task's two loops. It is the loop over columns if all of K stays in the cache: each
// weight row is read from beginning to end. Otherwise it is the loop over blocks of K, one of which stays
// there.
enum class OuterLoop { columns, blocks };

class Task {
 public:
  Task(const Problem& p, const Level& level, const Panel& panel, OuterLoop outer_loop, int64_t m0, int64_t m1,
       int64_t n0, int64_t n1)
      : p_(p),
        level_(level),
        panel_(panel),
        columns_(p, level),
        outer_loop_(outer_loop),
        m0_(m0),
        rows_(m1 - m0),
        n0_(n0),
        n1_(n1),
        streams_(rows_ <= columns_.stream_rows()) {
    const int64_t bytes = kGroup * p.stride() * level.element_size;
    here_ = streams_ ? nullptr : memory.panels.get<std::byte>(2 * bytes);
    next_ = streams_ ? nullptr : here_ + bytes;
    if (p.k_blocks() > 1) sums_ = memory.sums.get<float>(rows_ * ceil_to(n1 - n0, kGroup));
    a_scale_ = memory.a_scale.get<float>(rows_);
    for (int64_t r = 0; r < rows_; ++r) a_scale_[r] = p.a.outer(m0 + r);
  }

  void run() {
    BlockIndex at{n0_, 0};
    if (!streams_) columns_.unpack(at, 0, p_.k_count(0), here_);
    for (; within(at); at = after(at), std::swap(here_, next_)) multiply(at);
  }

 private:
  BlockIndex after(BlockIndex at) const {
    if (outer_loop_ == OuterLoop::columns)
      return at.kb + 1 < p_.k_blocks() ? BlockIndex{at.n, at.kb + 1} : BlockIndex{at.n + kGroup, 0};
    return at.n + kGroup < n1_ ? BlockIndex{at.n + kGroup, at.kb} : BlockIndex{n0_, at.kb + 1};
  }
  bool within(BlockIndex at) const { return at.n < n1_ && at.kb < p_.k_blocks(); }
  // Whether `at` is a block of this task or of the next.
  bool exists(BlockIndex at) const { return at.n < p_.n && at.kb < p_.k_blocks(); }

  // Adds a block to the sums [rows][16 columns]. At the last block of K the epilogue writes the output.
  void multiply(BlockIndex at) {
    Tile tile{.b = here_, .a_stride = p_.stride(), .k = p_.k_count(at.kb), .add = at.kb > 0};
    InnerScales scales;
    float b_outer[kGroup], bias[kGroup];
    if (p_.blocked() && p_.b.scale_rows == 1) tile.b_scale = spread_scales(at, scales);
    Epilogue epilogue{};
    if (at.kb + 1 == p_.k_blocks()) {
      epilogue = epilogue_of(at.n, b_outer, bias);
      tile.epilogue = &epilogue;
    }
    const int64_t max_rows = streams_ ? rows_per_stream() : level_.tile_rows,
                  tiles = (rows_ + max_rows - 1) / max_rows;
    const BlockIndex next = after(at), later = after(next);
    Pieces unpacking(within(next) ? p_.k_count(next.kb) : 0, columns_.piece(), tiles);
    Pieces prefetching(exists(later) ? p_.k_count(later.kb) : 0, kChunk, tiles);
    for (int64_t r = 0; r < rows_; r += tile.rows) {
      tile.rows = static_cast<int>(std::min(max_rows, rows_ - r));
      tile.a = panel_.at(m0_ + r, at.kb);
      if (sums_ != nullptr) tile.out = sums_ + (at.n - n0_) * rows_ + r * kGroup;
      if (p_.blocked()) tile.scale = row_scales(at, m0_ + r, tile.rows, scales);
      if (streams_) {
        columns_.stream(tile, at, exists(next) ? next : at);
      } else {
        unpacking.next([&](int64_t begin, int64_t end) { columns_.unpack(next, begin, end, next_); });
        prefetching.next([&](int64_t begin, int64_t end) { columns_.prefetch(later, begin, end); });
        level_.tile(tile);
      }
      if (tile.epilogue != nullptr) advance(epilogue, tile.rows);
    }
  }

  // Even shares: 9 rows are 5 and 4.
  int64_t rows_per_stream() const {
    const int64_t streams = (rows_ + kMaxStream - 1) / kMaxStream;
    return (rows_ + streams - 1) / streams;
  }

  const float* inner(const Operand& x, int64_t row, int64_t kb) const {
    return x.inner(row, p_.ones.data()) + kb * (kBlock / kScaleBlock);
  }

  int64_t scale_blocks(BlockIndex at) const { return (p_.k_count(at.kb) + kScaleBlock - 1) / kScaleBlock; }

  // Returns the scales [128 of K][16 columns from n], if each column has scales of its own.
  const float* spread_scales(BlockIndex at, InnerScales& scales) const {
    for (int64_t c = 0; c < kGroup; ++c) {
      const float* scale = inner(p_.b, std::min(at.n + c, p_.n - 1), at.kb);
      for (int64_t i = 0; i < scale_blocks(at); ++i) scales.columns[i * kGroup + c] = scale[i];
    }
    return scales.columns;
  }

  // Returns the scales of each row from `row` on, times those of the columns if these share 128 x 128 blocks.
  const float* const* row_scales(BlockIndex at, int64_t row, int rows, InnerScales& scales) const {
    for (int r = 0; r < rows; ++r) {
      const float *a = inner(p_.a, row + r, at.kb), *b = inner(p_.b, at.n, at.kb);
      float* products = scales.products[r];
      for (int64_t i = 0; i < scale_blocks(at) && p_.b.scale_rows != 1; ++i) products[i] = a[i] * b[i];
      scales.rows[r] = p_.b.scale_rows == 1 ? a : products;
    }
    return scales.rows;
  }

  // Returns the epilogue of the task's first rows in the 16 columns from n. Fills in their scales and biases.
  Epilogue epilogue_of(int64_t n, float* b_scale, float* bias) const {
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

  void advance(Epilogue& e, int64_t rows) const {
    const int64_t bytes = rows * p_.n * p_.out_bytes();
    e.a_scale += rows;
    e.out = static_cast<std::byte*>(e.out) + bytes;
    if (e.residual != nullptr) e.residual = static_cast<const std::byte*>(e.residual) + bytes;
  }

  const Problem& p_;
  const Level& level_;
  const Panel& panel_;
  const Columns columns_;
  const OuterLoop outer_loop_;
  const int64_t m0_, rows_, n0_, n1_;
  const bool streams_;
  std::byte *here_, *next_;  // panels of 16 columns
  float* sums_ = nullptr;
  float* a_scale_;
};

// Problems whose rows are consecutive in memory, and the number of all rows.
struct Group {
  const Problem* problems;
  int64_t count, rows;

  const Problem& shape() const { return problems[0]; }  // of each: n, k and types
};

// Rows m0 to m1 of a problem, and how they are cut into tasks.
struct Piece {
  const Problem* problem;
  Panel panel;  // with rows counted from the problem's first
  int64_t m0, m1;
  int64_t first = 0;              // index of its first task
  bool few = false;               // rows: each task has all of them
  int64_t rows = 0, columns = 0;  // of a task

  int64_t row_tasks() const { return (m1 - m0 + rows - 1) / rows; }
  int64_t tasks() const { return row_tasks() * ((problem->n + columns - 1) / columns); }

  void run(const Level& level, int64_t task) const {
    const int64_t m = m0 + task % row_tasks() * rows, n = task / row_tasks() * columns;
    Task(*problem, level, panel, few ? OuterLoop::columns : OuterLoop::blocks, m, std::min(m1, m + rows), n,
         std::min(problem->n, n + columns))
        .run();
  }
};

Panel unpack_rows(const Problem& p, const Level& level, int64_t m0, int64_t m1) {
  thread_local Scratch scratch;  // the caller's: tasks on this thread use `memory`
  const int64_t rows = m1 - m0, bytes = p.stride() * level.element_size;
  auto* values = scratch.get<std::byte>(p.k_blocks() * rows * bytes);
  parallel_rows(rows, p.k, [&](int64_t r) {
    for (int64_t kb = 0; kb < p.k_blocks(); ++kb) {
      const void* from = p.a.at(m0 + r, kb * kBlock);
      uint16_t wide[kBlock];
      if (p.a.mx_codes != nullptr) widen_row(p.a, from, m0 + r, kb * kBlock, p.k_count(kb), wide);
      level.unpack_row(p.a.mx_codes == nullptr ? from : wide, p.k_count(kb), p.a.panel_kind(),
                       values + (kb * rows + r) * bytes);
    }
  });
  return {values, m0, rows, bytes};
}

// Returns the size of equal shares of `count` rows: whole tiles, and not much above `max_rows`.
int64_t share(int64_t count, int64_t max_rows, const Level& level) {
  const int64_t shares = (count + max_rows - 1) / max_rows;
  return ceil_to((count + shares - 1) / shares, level.tile_rows);
}

// The rows m0 to m1 of the group, for each problem that has some of them.
std::vector<Piece> pieces(const Group& group, const Panel& panel, int64_t m0, int64_t m1) {
  std::vector<Piece> result;
  int64_t begin = 0;
  for (int64_t i = 0; i < group.count; begin += group.problems[i++].m) {
    const int64_t low = std::max(m0, begin), high = std::min(m1, begin + group.problems[i].m);
    Panel own = panel;
    own.first -= begin;
    if (low < high) result.push_back({&group.problems[i], own, low - begin, high - begin});
  }
  return result;
}

// Returns the number of columns of a task, few enough to give every thread some tasks.
int64_t columns_per_task(const Problem& p, int64_t row_tasks, int64_t columns) {
  const int64_t min_tasks = 4 * static_cast<int64_t>(torch::stable::get_num_threads());
  while (columns > 2 * kGroup && row_tasks * ((p.n + columns - 1) / columns) < min_tasks) columns /= 2;
  return columns;
}

// Cuts the pieces into tasks; returns their number.
int64_t cut(std::vector<Piece>& all, const Level& level) {
  int64_t row_tasks = 0, tasks = 0;
  for (Piece& piece : all) {
    const int64_t rows = piece.m1 - piece.m0,
                  bytes = rows * piece.panel.row_bytes * piece.problem->k_blocks();
    piece.few = rows <= kMaxRows || bytes <= kResident;
    piece.rows = piece.few ? rows : share(rows, kRowsPerTask, level);
    row_tasks += piece.row_tasks();
  }
  for (Piece& piece : all) {
    piece.columns =
        columns_per_task(*piece.problem, row_tasks, piece.few ? kColumnsPerStream : kColumnsPerTask);
    piece.first = tasks;
    tasks += piece.tasks();
  }
  return tasks;
}

bool is_serial(const Problem& p, int64_t rows, int64_t weights) {
  return bytes_of(p.b.kind, weights * p.n * p.k) < kMinParallelBytes &&
         rows * p.n * p.k < kMinParallelProducts;
}

void run_rows(const Group& group, const Level& level, int64_t m0, int64_t m1) {
  const Problem& shape = group.shape();
  const Panel panel = unpack_rows(shape, level, m0, m1);
  std::vector<Piece> all = pieces(group, panel, m0, m1);
  if (is_serial(shape, m1 - m0, static_cast<int64_t>(all.size()))) {
    for (const Piece& p : all)
      Task(*p.problem, level, p.panel, OuterLoop::columns, p.m0, p.m1, 0, shape.n).run();
    return;
  }
  parallel_tasks(cut(all, level), [&](int64_t task) {
    const auto is_before = [](int64_t index, const Piece& piece) { return index < piece.first; };
    const Piece& piece = *(std::upper_bound(all.begin(), all.end(), task, is_before) - 1);
    piece.run(level, task - piece.first);
  });
}

// Returns the level for a group's problems, which have the same shape but for their rows.
const Level& level_for(const Group& group) {
  const Problem& p = group.shape();
  const Level& best = best_level(p.a.panel_kind(), p.b.panel_kind());
#if FP8_X86
  const bool has_bf16 = p.a.panel_kind() == Kind::bf16 || p.b.panel_kind() == Kind::bf16;
  const bool can_flush = !(p.blocked() && has_bf16);  // promoted sums are not flushed
  const int64_t min_rows = p.b.packed ? kFmaRowsOfPacked : p.b.kind == Kind::bf16 ? kFmaRowsOfBf16 : kFmaRows;
  const bool has_many_rows = group.rows >= min_rows * group.count;
  if (can_flush && has_many_rows && has(kSlowDot) && &best == &avx512bf16()) return fma();
#endif
  return best;
}

}  // namespace

const Level& best_level(Kind a, Kind b) {
  const auto runs = [&](const auto& level) {
    return has(level().variant.needs) && (!level().only_fp8 || (is_fp8(a) && is_fp8(b)));
  };
  return (*std::find_if(kLevels.begin(), kLevels.end(), runs))();
}

void run(const Problem* problems, int64_t count) {
  Group group{problems, count, 0};
  for (int64_t i = 0; i < count; ++i) group.rows += problems[i].m;
  const Problem& shape = group.shape();
  const Level& level = level_for(group);
  const int64_t row_bytes = std::max<int64_t>(shape.k_blocks() * shape.stride() * level.element_size, 1);
  const int64_t rows = share(group.rows, std::max(kRowsPerTask, kPanel / row_bytes), level);
  for (int64_t m = 0; m < group.rows; m += rows) run_rows(group, level, m, std::min(group.rows, m + rows));
}

}  // namespace fp8serve::gemm
