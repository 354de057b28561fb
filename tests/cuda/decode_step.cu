// A prototype of the kernel that runs a program of decode_program.py: a whole decode step in one launch,
// whose blocks signal each other by counters. It shows that the program's waits are enough, and which are
// necessary.
//
// It has the real operations' inputs, outputs, buffers and signals, but not their arithmetic: a product is an
// exact sum of integers modulo 2^32, so a wrong or missing operand changes it, and the order of K does not.
// One warp loads weights by bulk copies into a ring of pages, ahead of the waits for activations; the others
// compute. If a signal is lost, the prototype waits for ever.
//
// A program (emulator/program.h) that runs the steps described in a file (test_decode_program.py), and
// returns for each the sum of all hidden states and logits.
#include <fstream>
#include <iterator>
#include <memory>

#include "cuda/amax_scratch.h"
#include "cuda/cooperative.h"
#include "cuda/mbarrier.h"
#include "program.h"

namespace fp8serve {
namespace {

constexpr int kComputing = 64, kThreads = kComputing + 32;  // the last warp loads weights
constexpr int kBlock = 16, kColumns = 128, kStages = 3;     // rows and columns of a page
constexpr int kMostRows = kComputing / kBlock;              // sequences

enum Op { kEnd, kQkv, kAttend, kO, kGateUp, kDown, kHead };

struct Instruction {
  int op, layer, unit, units, wait, waits, signal, unused;
};

struct Model {
  int layers, hidden, heads, kv_heads, head_dim, inter, vocab;
  __device__ int query() const { return heads * head_dim; }
  __device__ int group() const { return query() / kv_heads; }           // queries of a head of k and v
  __device__ int of_kv_head() const { return group() + 2 * head_dim; }  // and its k and v
};

struct Step {
  Model model;
  int rows, longest, most_segments;
  const int *lengths, *needs;  // [rows], [counters]
  const Instruction* program;  // [blocks][longest]
  const unsigned *qkv_weights, *o_weights, *gate_up_weights, *down_weights, *head_weights;  // by layer
  unsigned *counters, *epoch, *finished;
  unsigned* arrived;                                   // [rows][kv_heads] segments
  unsigned *hidden, *qkv, *attended, *gated, *logits;  // [rows][...]
  unsigned* parts;                                     // [rows][kv_heads][most_segments][group]
};

struct Ring {
  alignas(16) unsigned pages[kStages][kBlock][kColumns];
  Mbarrier full[kStages], free[kStages];
  unsigned is_merging;
};

__device__ Ring& ring() { return *reinterpret_cast<Ring*>(dynamic_shared()); }
__device__ unsigned* inputs() { return reinterpret_cast<unsigned*>(dynamic_shared() + sizeof(Ring)); }

// The weights of an instruction: [...][n]. A unit reads `parts` blocks of 16 rows.
struct Weights {
  const unsigned* rows;
  int n, parts, between;  // rows from one part of a unit to the next

  __device__ const unsigned* block(int unit, int part) const {
    const int row = between == kBlock ? (unit * parts + part) * kBlock : unit * kBlock + part * between;
    return rows + static_cast<int64_t>(row) * n;
  }
};

__device__ Weights weights_of(const Step& s, const Instruction& of) {
  const Model& m = s.model;
  switch (of.op) {
    case kQkv:
      return {s.qkv_weights + of.layer * m.kv_heads * m.of_kv_head() * m.hidden, m.hidden, 2, kBlock};
    case kO:
      return {s.o_weights + of.layer * m.hidden * m.query(), m.query(), 1, kBlock};
    case kGateUp:
      return {s.gate_up_weights + of.layer * 2 * m.inter * m.hidden, m.hidden, 2, m.inter};
    case kDown:
      return {s.down_weights + of.layer * m.hidden * m.inter, m.inter, 1, kBlock};
    default:
      return {s.head_weights, m.hidden, 1, kBlock};
  }
}

// Calls f(unit, part, first column, page) for the pages of an instruction, in their order in the ring.
template <class F>
__device__ void for_pages(const Instruction& of, const Weights& weights, int& page, const F& f) {
  for (int unit = of.unit; unit < of.unit + of.units; ++unit) {
    for (int part = 0; part < weights.parts; ++part) {
      for (int column = 0; column < weights.n; column += kColumns) f(unit, part, column, page++);
    }
  }
}

// One warp. It waits only for free pages.
__device__ void load_weights(const Step& s) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int next = 0;
  for (const Instruction* at = s.program + blockIdx.x * s.longest; at->op != kEnd; ++at) {
    if (at->op == kAttend) continue;
    const Weights weights = weights_of(s, *at);
    for_pages(*at, weights, next, [&](int unit, int part, int column, int page) {
      const int stage = page % kStages, bytes = 4 * min(kColumns, weights.n - column);
      mbarrier_wait(&ring().free[stage], 1 - page / kStages % 2);
      if (lane == 0) mbarrier_arrive_expecting(&ring().full[stage], kBlock * bytes);
      if (lane >= kBlock) return;
      const unsigned* const row = weights.block(unit, part) + lane * weights.n;
      bulk_copy(ring().pages[stage][lane], row + column, bytes, &ring().full[stage]);
    });
  }
}

// Waits until the counters [first, first + count) have got all signals of this step and the `epoch` before
// it.
__device__ void wait_for(const Step& s, int first, int count, unsigned epoch) {
  if (threadIdx.x == 0) {
    for (int i = first; i < first + count; ++i) {
      const unsigned target = (epoch + 1) * static_cast<unsigned>(s.needs[i]);
      while (static_cast<int>(load_acquire(&s.counters[i]) - target) < 0) {
      }
    }
  }
  sync_warps(1, kComputing);
}

__device__ void signal(const Step& s, int counter, int units) {
  sync_warps(1, kComputing);
  if (threadIdx.x == 0) add_release(&s.counters[counter], static_cast<unsigned>(units));
}

__device__ void store_sums(const Step& s, const Instruction& of, int unit, int row, int i,
                           const unsigned (&sums)[2]) {
  const Model& m = s.model;
  const int column = unit * kBlock + i;
  switch (of.op) {
    case kQkv: {
      unsigned* const qkv = s.qkv + row * m.kv_heads * m.of_kv_head() + 2 * unit * kBlock + i;
      qkv[0] = sums[0], qkv[kBlock] = sums[1];
      return;
    }
    case kO:
    case kDown:
      s.hidden[row * m.hidden + column] += sums[0];
      return;
    case kGateUp:
      s.gated[row * m.inter + column] = sums[0] * sums[1];
      return;
    case kHead:
      s.logits[row * m.vocab + column] = sums[0];
  }
}

// A thread computes one row of weights for one sequence.
__device__ void multiply(const Step& s, const Instruction& of, int& next) {
  const int i = static_cast<int>(threadIdx.x) % kBlock, row = static_cast<int>(threadIdx.x) / kBlock;
  const Weights weights = weights_of(s, of);
  const unsigned* const from = of.op == kO ? s.attended : of.op == kDown ? s.gated : s.hidden;
  for (int k = static_cast<int>(threadIdx.x); k < s.rows * weights.n; k += kComputing) inputs()[k] = from[k];
  sync_warps(1, kComputing);
  unsigned sums[2] = {};
  for_pages(of, weights, next, [&](int unit, int part, int column, int page) {
    const int stage = page % kStages, end = min(kColumns, weights.n - column);
    mbarrier_wait(&ring().full[stage], page / kStages % 2);
    if (row < s.rows) {
      const unsigned* const x = inputs() + row * weights.n + column;
      for (int k = 0; k < end; ++k) sums[part] += ring().pages[stage][i][k] * x[k];
    }
    mbarrier_arrive(&ring().free[stage]);
    if (part < weights.parts - 1 || column + kColumns < weights.n) return;
    if (row < s.rows) store_sums(s, of, unit, row, i, sums);
    sums[0] = sums[1] = 0;
  });
}

__device__ int segments_of(const Step& s, int row) { return (s.lengths[row] + 127) / 128; }

// One segment. The block that is the last of a head's segments merges them, in their order.
__device__ void attend_segment(const Step& s, const Instruction& of, int row, int head, int segment) {
  const Model& m = s.model;
  const int pair = row * m.kv_heads + head, segments = segments_of(s, row), group = m.group();
  unsigned* const parts = s.parts + pair * s.most_segments * group;
  for (int i = static_cast<int>(threadIdx.x); i < group; i += kComputing) {
    const unsigned* const qkv = s.qkv + pair * m.of_kv_head();  // all of it, q, k and v
    unsigned part = static_cast<unsigned>(of.layer * 1000 + segment * 100 + i);
    for (int j = 0; j < m.of_kv_head(); ++j) part = part * 31 + qkv[j];
    parts[segment * group + i] = part;
  }
  sync_warps(1, kComputing);
  if (threadIdx.x == 0) {
    ring().is_merging = is_last({nullptr, &s.arrived[pair]}, static_cast<unsigned>(segments)) ? 1 : 0;
  }
  sync_warps(1, kComputing);
  if (ring().is_merging == 0) return;
  for (int i = static_cast<int>(threadIdx.x); i < group; i += kComputing) {
    unsigned merged = 0;
    for (int j = 0; j < segments; ++j) merged = merged * 31 + parts[j * group + i];
    s.attended[row * m.query() + head * group + i] = merged;
  }
  signal(s, of.signal, 1);
}

// The number of segments is not in the program: the blocks take them in turn.
__device__ void attend(const Step& s, const Instruction& of, unsigned epoch) {
  unsigned task = 0;
  for (int row = 0; row < s.rows; ++row) {
    for (int head = 0; head < s.model.kv_heads; ++head) {
      for (int segment = 0; segment < segments_of(s, row); ++segment) {
        if (task++ % gridDim.x != blockIdx.x) continue;
        if (of.waits > 0) wait_for(s, of.wait + head, 1, epoch);
        attend_segment(s, of, row, head, segment);
      }
    }
  }
}

__global__ void decode_step(const __grid_constant__ Step s) {
  if (threadIdx.x < kStages) {
    mbarrier_init(&ring().full[threadIdx.x], 1);
    mbarrier_init(&ring().free[threadIdx.x], kComputing);
  }
  __syncthreads();
  if (threadIdx.x >= kComputing) return load_weights(s);
  const unsigned epoch = threadIdx.x == 0 ? *s.epoch : 0;  // written when all blocks have read it
  int page = 0;
  for (const Instruction* at = s.program + blockIdx.x * s.longest; at->op != kEnd; ++at) {
    if (at->op == kAttend) {
      attend(s, *at, epoch);
      continue;
    }
    wait_for(s, at->wait, at->waits, epoch);
    multiply(s, *at, page);
    signal(s, at->signal, at->units);
  }
  if (threadIdx.x == 0 && is_last({nullptr, s.finished}, gridDim.x)) *s.epoch = epoch + 1;
}

// A step and the memory that it points to, as the file describes them: model, rows, blocks, longest list,
// counters, steps before these, steps, and then lengths, needs, instructions.
class Memory {
 public:
  explicit Memory(const char* file) {
    std::ifstream in(file, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(in), {}};
    ints_.resize(bytes.size() / sizeof(int));
    std::memcpy(ints_.data(), bytes.data(), bytes.size());
    std::memcpy(&s_.model, take(7), sizeof(Model));
    const Model& m = s_.model;
    s_.rows = *take(1), blocks = *take(1), s_.longest = *take(1);
    const int counters = *take(1);
    const auto epoch = static_cast<unsigned>(*take(1));
    steps = *take(1);
    s_.lengths = take(s_.rows), s_.needs = take(counters);
    s_.program = reinterpret_cast<const Instruction*>(take(8 * blocks * s_.longest));
    for (int row = 0; row < s_.rows; ++row)
      s_.most_segments = std::max(s_.most_segments, segments_of(s_, row));
    s_.counters = zeros(counters), s_.epoch = zeros(1), s_.finished = zeros(1);
    s_.arrived = zeros(s_.rows * m.kv_heads);
    s_.hidden = zeros(s_.rows * m.hidden), s_.qkv = zeros(s_.rows * m.kv_heads * m.of_kv_head());
    s_.attended = zeros(s_.rows * m.query()), s_.gated = zeros(s_.rows * m.inter);
    s_.logits = zeros(s_.rows * m.vocab);
    s_.parts = zeros(s_.rows * m.kv_heads * s_.most_segments * m.group());
    s_.qkv_weights = numbers(m.layers * m.kv_heads * m.of_kv_head() * m.hidden);
    s_.o_weights = numbers(m.layers * m.hidden * m.query());
    s_.gate_up_weights = numbers(m.layers * 2 * m.inter * m.hidden);
    s_.down_weights = numbers(m.layers * m.hidden * m.inter);
    s_.head_weights = numbers(m.vocab * m.hidden);
    *s_.epoch = epoch;
    for (int i = 0; i < counters; ++i) s_.counters[i] = epoch * static_cast<unsigned>(s_.needs[i]);
    for (int i = 0; i < s_.rows * m.hidden; ++i) s_.hidden[i] = static_cast<unsigned>(i);
  }

  const Step& step() const { return s_; }
  unsigned sum() const {
    unsigned sum = 0;
    for (int i = 0; i < s_.rows * s_.model.hidden; ++i) sum = sum * 31 + s_.hidden[i];
    for (int i = 0; i < s_.rows * s_.model.vocab; ++i) sum = sum * 31 + s_.logits[i];
    return sum;
  }
  int blocks = 0, steps = 0;

 private:
  const int* take(int count) { return ints_.data() + std::exchange(taken_, taken_ + count); }
  unsigned* zeros(int count) {
    return owned_.emplace_back(std::make_unique<unsigned[]>(static_cast<size_t>(count))).get();
  }
  const unsigned* numbers(int count) {
    unsigned* const out = zeros(count);
    for (int i = 0; i < count; ++i) out[i] = number_ = number_ * 1664525u + 1013904223u;
    return out;
  }
  Step s_{};
  unsigned number_ = 0;
  std::vector<int> ints_;
  int taken_ = 0;
  std::vector<std::unique_ptr<unsigned[]>> owned_;
};

std::string run(const char* file) {
  Memory memory(file);
  emulator::settings.chip = {90, memory.blocks, 227 * 1024};
  const Step& s = memory.step();
  if (s.rows > kMostRows) throw std::runtime_error("decode_step has a thread for at most four sequences");
  const int widest = std::max({s.model.hidden, s.model.query(), s.model.inter});
  const int shared_bytes = static_cast<int>(sizeof(Ring)) + 4 * s.rows * widest;
  std::string sums;
  for (int i = 0; i < memory.steps; ++i) {
    launch_cooperative(decode_step, dim3(static_cast<unsigned>(memory.blocks)), kThreads, shared_bytes,
                       nullptr, s);
    sums += std::to_string(memory.sum()) + ' ';
  }
  return sums;
}

}  // namespace
}  // namespace fp8serve

int main(int, char** arguments) { fp8serve::emulator::run_program(arguments, fp8serve::run); }
