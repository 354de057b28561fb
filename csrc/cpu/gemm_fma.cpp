// The AVX-512 BF16 level for many rows, on processors that take longer for a BF16 dot product
// than for two FMAs (feature::slow_dot): the tiles of the AVX-512 level in the mode of `vdpbf16ps`, which
// give the same bits. Packed weights become BF16 panels as at that level, and then FP32 ones.
//
// A few rows are bound by reading and widening the weights, so they stay with the dot product: as FP32 their
// `a` does not fit the first-level cache beside the weights.
#include "cpu/features.h"
#include "cpu/gemm.h"

#if FP8_X86
#include <immintrin.h>

#include "cpu/gemm_4bit.h"
#include "cpu/gemm_packed.h"

namespace fp8serve::gemm {
namespace {

// Calls unpack(begin, end, panel), which converts k = begin to end to a BF16 panel, and widens each run: the
// odd k of 16 columns, then the even ones.
template <class F>
FP8_TARGET_AVX512 void unpack_wide(int64_t begin, int64_t end, float* panel, const F& unpack) {
  alignas(64) thread_local uint16_t narrow[kBlock * kGroup];
  unpack(begin, end, narrow);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  for (int64_t at = begin * kGroup; at < end * kGroup; at += kRun * kGroup) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i columns = _mm512_loadu_si512(narrow + at + i * 32);
      float* odd = panel + at + i * 16;
      _mm512_storeu_ps(odd, _mm512_castsi512_ps(_mm512_and_si512(columns, upper)));
      _mm512_storeu_ps(odd + 64, _mm512_castsi512_ps(_mm512_slli_epi32(columns, 16)));
    }
  }
}

void unpack_packed(const void* block, int64_t k, int64_t begin, int64_t end, Kind kind,
                   const uint16_t* mx_shifts, void* panel) {
  unpack_wide(begin, end, static_cast<float*>(panel), [&](int64_t first, int64_t last, uint16_t* narrow) {
    packed_avx512bf16::unpack_columns(block, k, first, last, kind, mx_shifts, narrow);
  });
}

void unpack_4bit(const void* block, const uint8_t* distances, int64_t begin, int64_t end, Kind kind,
                 void* panel) {
  unpack_wide(begin, end, static_cast<float*>(panel), [&](int64_t first, int64_t last, uint16_t* narrow) {
    fourbit_avx512bf16::unpack_columns(block, distances, first, last, kind, narrow);
  });
}

}  // namespace

const Level& fma() {
  static const Level level = [] {
    Level result = avx512();
    result.variant = avx512bf16().variant;
    result.tile = flushing_tile;
    result.stream_rows = 0;  // stream() does not flush
    result.unpack_packed = unpack_packed;
    result.compute_mx_shifts = packed_avx512bf16::compute_mx_shifts;
    result.unpack_4bit = unpack_4bit;
    return result;
  }();
  return level;
}

}  // namespace fp8serve::gemm

#endif
