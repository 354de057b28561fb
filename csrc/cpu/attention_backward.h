// The gradients of causal attention, for any instruction set: the computation of one task.
//
// A task is one sequence and one query head. It takes 64 queries at a time, against all keys that these see.
// All matrices are transposed, with a row for each key and a column for each query. So a softmax goes down a
// column and needs no sum across a vector, and the weights and their gradients are left operands of their
// products:
//
//   S = K Q^T, capped    weights P = softmax of S down each column
//   dP = V dO^T          D = the sum of P dP down each column
//   dS = P (dP - D)      times the cap's slope and the softmax scale
//   dV += P dO,  dK += dS Q,  dQ^T = K^T dS
//
// Scores and weights are FP32; P and dS are rounded to BF16 for their products, whose sums are FP32
// (pair_product.h). dK and dV of a head are summed over the queries in order.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fp8serve::attention_backward {

constexpr int64_t kTile = 64;  // queries, and keys of a product
constexpr int64_t kUnit = 16;  // dimensions are padded to multiples of this

inline int64_t padded(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

struct Inputs {
  const uint16_t *q, *k, *v, *grad;  // [T][heads or kv_heads][dim]
  const float* sinks;                // [heads], or null
  int64_t heads, kv_heads, dim;
  int64_t window;
  float scale, softcap;

  int64_t width() const { return padded(dim, kUnit); }
  int64_t group() const { return heads / kv_heads; }
};

struct Sequence {
  int64_t first, length;  // tokens
  int64_t rows() const { return padded(length, kTile); }
};

// The results of one head of a sequence: dK and dV [rows][width], and the gradient of its sink.
struct Gradients {
  float *k, *v, *sink;

  static int64_t size(const Sequence& s, int64_t width) { return 2 * s.rows() * width + 1; }
  static Gradients at(float* memory, const Sequence& s, int64_t width) {
    return {memory, memory + s.rows() * width, memory + 2 * s.rows() * width};
  }
};

// Computes one head of one sequence: its dK and dV into `out`, its dQ into d_q, BF16 [T][heads][dim].
void differentiate(const Inputs& in, const Sequence& sequence, int64_t head, const Gradients& out,
                   uint16_t* d_q);

}  // namespace fp8serve::attention_backward
