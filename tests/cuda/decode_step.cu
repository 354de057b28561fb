// A prototype of the kernel that runs a program of decode_program.py: a whole decode step in one launch,
// whose blocks signal each other by counters. It shows that the program's waits are enough, and which are
// necessary.
//
// It has the real operations' inputs, outputs, buffers and signals, but not their arithmetic: a "product" is
// an exact sum modulo 2^32 over all inputs, so a wrong or missing input changes the result, and its order
// does not. Weights are computed. Not here yet: a warp that loads weights ahead of the waits, and an end to
// waiting.
//
// A program (emulator/program.h) that runs the steps described in a file (test_decode_program.py), and
// returns for each the sum of all hidden states and logits.
#include <fstream>
#include <iterator>
#include <memory>

#include "cuda/amax_scratch.h"
#include "cuda/cooperative.h"
#include "program.h"

namespace fp8serve {
namespace {

constexpr int kThreads = 64, kBlock = 16;

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
  unsigned *counters, *epoch, *finished;
  unsigned* arrived;                                   // [rows][kv_heads] segments
  unsigned *hidden, *qkv, *attended, *gated, *logits;  // [rows][...]
  unsigned* parts;                                     // [rows][kv_heads][most_segments][group]
};

__device__ unsigned product(const unsigned* x, int n, unsigned column, unsigned salt) {
  unsigned sum = 0, weight = (column + 1) * 2654435761u + salt;
  for (int i = 0; i < n; ++i) {
    sum += x[i] * weight;
    weight = weight * 1664525u + 1013904223u;
  }
  return sum;
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
  __syncthreads();
}

__device__ void signal(const Step& s, int counter, int units) {
  __syncthreads();
  if (threadIdx.x == 0) add_release(&s.counters[counter], static_cast<unsigned>(units));
}

// Calls f(row, column, the row's inputs) for the outputs [begin, end) of every row, with the inputs copied to
// shared memory.
template <class F>
__device__ void for_outputs(const Step& s, const unsigned* from, int n, int begin, int end, const F& f) {
  auto* const x = reinterpret_cast<unsigned*>(dynamic_shared());
  for (int i = static_cast<int>(threadIdx.x); i < s.rows * n; i += kThreads) x[i] = from[i];
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < s.rows * (end - begin); i += kThreads) {
    f(i % s.rows, begin + i / s.rows, x + i % s.rows * n);
  }
}

__device__ void multiply(const Step& s, const Instruction& of) {
  const Model& m = s.model;
  const auto salt = static_cast<unsigned>(of.op + 8 * of.layer);
  const int width = of.op == kQkv ? 2 * kBlock : kBlock;
  const int begin = of.unit * width, end = begin + of.units * width;
  const auto outputs = [&](const unsigned* from, int n, const auto& f) {
    for_outputs(s, from, n, begin, end, [&](int row, int column, const unsigned* x) {
      f(row, column,
        [&](unsigned part) { return product(x, n, static_cast<unsigned>(column), salt + part); });
    });
  };
  switch (of.op) {
    case kQkv:
      return outputs(s.hidden, m.hidden, [&](int row, int column, const auto& sum) {
        s.qkv[row * m.kv_heads * m.of_kv_head() + column] = sum(0);
      });
    case kO:
      return outputs(s.attended, m.query(), [&](int row, int column, const auto& sum) {
        s.hidden[row * m.hidden + column] += sum(0);
      });
    case kGateUp:
      return outputs(s.hidden, m.hidden, [&](int row, int column, const auto& sum) {
        s.gated[row * m.inter + column] = sum(0) * sum(1 << 16);
      });
    case kDown:
      return outputs(s.gated, m.inter, [&](int row, int column, const auto& sum) {
        s.hidden[row * m.hidden + column] += sum(0);
      });
    case kHead:
      return outputs(s.hidden, m.hidden, [&](int row, int column, const auto& sum) {
        s.logits[row * m.vocab + column] = sum(0);
      });
  }
}

__device__ int segments_of(const Step& s, int row) { return (s.lengths[row] + 127) / 128; }

// One segment. The block that is the last of a head's segments merges them, in their order.
__device__ void attend_segment(const Step& s, const Instruction& of, int row, int head, int segment) {
  const Model& m = s.model;
  auto* const is_merging = reinterpret_cast<unsigned*>(dynamic_shared());
  const int pair = row * m.kv_heads + head, segments = segments_of(s, row), group = m.group();
  unsigned* const parts = s.parts + pair * s.most_segments * group;
  const auto salt = static_cast<unsigned>(of.layer * s.most_segments + segment);
  for (int i = static_cast<int>(threadIdx.x); i < group; i += kThreads) {
    const unsigned* const qkv = s.qkv + pair * m.of_kv_head();
    parts[segment * group + i] = product(qkv, m.of_kv_head(), static_cast<unsigned>(i), salt);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    *is_merging = is_last({nullptr, &s.arrived[pair]}, static_cast<unsigned>(segments)) ? 1 : 0;
  }
  __syncthreads();
  if (*is_merging == 0) return;
  for (int i = static_cast<int>(threadIdx.x); i < group; i += kThreads) {
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
  const unsigned epoch = threadIdx.x == 0 ? *s.epoch : 0;  // written when all blocks have read it
  for (const Instruction* at = s.program + blockIdx.x * s.longest; at->op != kEnd; ++at) {
    if (at->op == kAttend) {
      attend(s, *at, epoch);
      continue;
    }
    wait_for(s, at->wait, at->waits, epoch);
    multiply(s, *at);
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
    *s_.epoch = epoch;
    for (int i = 0; i < counters; ++i) s_.counters[i] = epoch * static_cast<unsigned>(s_.needs[i]);
    for (int i = 0; i < s_.rows * m.hidden; ++i) s_.hidden[i] = static_cast<unsigned>(i);
  }

  const Step& step() const { return s_; }
  unsigned sum() const {
    const int hidden = s_.rows * s_.model.hidden, logits = s_.rows * s_.model.vocab;
    return product(s_.hidden, hidden, 0, 0) + product(s_.logits, logits, 1, 0);
  }
  int blocks = 0, steps = 0;

 private:
  const int* take(int count) { return ints_.data() + std::exchange(taken_, taken_ + count); }
  unsigned* zeros(int count) {
    return owned_.emplace_back(std::make_unique<unsigned[]>(static_cast<size_t>(count))).get();
  }
  Step s_{};
  std::vector<int> ints_;
  int taken_ = 0;
  std::vector<std::unique_ptr<unsigned[]>> owned_;
};

std::string run(const char* file) {
  Memory memory(file);
  emulator::settings.chip = {90, memory.blocks, 227 * 1024};
  const Step& s = memory.step();
  const int shared_bytes = 4 * s.rows * std::max({s.model.hidden, s.model.query(), s.model.inter});
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
