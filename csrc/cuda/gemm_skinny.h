// What the skinny kernel (gemm_skinny.cu) computes in one launch with a product of few rows: the cast of its
// activations, and what becomes of its result. None of these products may have block scales.
#pragma once

#include "cuda/gemm.h"
#include "cuda/rotary.h"

namespace fp8serve {

// BF16 activations that the skinny kernel casts to E4M3 as it loads them, and counts in `out`.
struct ToCast {
  const BF16* x;  // [m, k], rows 16-byte aligned
  const float* scale;
  CastCounters out;
};

// The cast of rms_norm(x, weight, eps) to E4M3 as activations, counted in `out`. x has at most kNormedRows
// rows, because every block reads them all.
constexpr int kNormedRows = 4;
struct Normed {
  const BF16* x;  // [m, k]; rows and the weight [k] are 16-byte aligned
  int64_t stride;
  const BF16* weight;
  float eps;
  const float* scale;
  CastCounters out;
};

// The output of a product whose columns are a gate and then up: silu(gate) * up, cast to E4M3. The product
// itself is not stored.
struct GatedCast {
  uint8_t* q;  // [m, n / 2] E4M3
  const float* scale;
  CastCounters out;
};

// Multiplies the cast of `from` instead of g.a. m <= kSkinnyRows.
void gemm_skinny_casting(const Gemm& g, const ToCast& from, const OnDevice& device);

// Returns whether the kernel takes a norm as activations.
bool skinny_takes_norm(const Gemm& g, const OnDevice& device);
// Multiplies the cast norm instead of g.a.
void gemm_skinny_normed(const Gemm& g, const Normed& norm, const OnDevice& device);

// The products below have at most kFusedRows rows and multiply g.a, or a cast norm if `norm` is not null.
constexpr int kFusedRows = 16;

// Writes `to` instead of g.out; gate and up are rounded to BF16. n is a multiple of 16.
void gemm_skinny_gated(const Gemm& g, const Normed* norm, const GatedCast& to, const OnDevice& device);

// The product has BF16 heads of queries, then of keys and of values: rotates queries into r.out instead of
// g.out, rotates and writes keys, and writes values. r.dim is a multiple of 16; r.q, r.k and r.v are only
// counted. The caches are E4M3 if `fp8`, else BF16.
void gemm_skinny_rotary(const Gemm& g, const Normed* norm, const Rotary& r, bool fp8, const OnDevice& device);

}  // namespace fp8serve
