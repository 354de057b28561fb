// The AVX-512 BF16 level for two rows or more, on processors that take longer for a BF16 dot product than for
// two FMAs (feature::slow_dot): the tiles of the AVX-512 level in the mode of `vdpbf16ps`, which give the
// same bits. Packed weights become BF16 panels as at that level, and then FP32 ones. For a few rows they are
// streamed as at that level, and widened once more in registers (gemm_pairs.h).
#include "cpu/features.h"
#include "cpu/gemm.h"

#if FP8_X86
#include <immintrin.h>

#include "cpu/gemm_4bit.h"
#include "cpu/gemm_packed.h"
#include "cpu/gemm_pairs.h"

namespace fp8serve::gemm {
namespace {

struct Wide {
  __m512 odd, even;  // the odd and the even ones of 32 values
  FP8_TARGET_AVX512 FP8_INLINE explicit Wide(const uint16_t* values) {
    const __m512i pairs = _mm512_loadu_si512(values);
    odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
    even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  }
};

// Calls unpack(begin, end, panel), which converts k = begin to end to a BF16 panel, and widens each run: the
// odd k of 16 columns, then the even ones.
template <class F>
FP8_TARGET_AVX512 void unpack_wide(int64_t begin, int64_t end, float* panel, const F& unpack) {
  alignas(64) thread_local uint16_t narrow[kBlock * kGroup];
  unpack(begin, end, narrow);
  for (int64_t at = begin * kGroup; at < end * kGroup; at += kRun * kGroup) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const Wide columns(narrow + at + i * 32);
      _mm512_storeu_ps(panel + at + i * 16, columns.odd);
      _mm512_storeu_ps(panel + at + i * 16 + 64, columns.even);
    }
  }
}

// In each run the odd k come first.
FP8_TARGET_AVX512 void unpack_row(const void* from, int64_t k, Kind kind, void* row) {
  alignas(64) uint16_t narrow[kBlock];
  avx512bf16().unpack_row(from, k, kind, narrow);
  const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11),
                second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  auto* out = static_cast<float*>(row);
  for (int64_t at = 0; at < k; at += 32) {
    const Wide runs(narrow + at);
    const __m512d odd = _mm512_castps_pd(runs.odd), even = _mm512_castps_pd(runs.even);
    _mm512_storeu_pd(out + at, _mm512_permutex2var_pd(odd, first, even));
    _mm512_storeu_pd(out + at + 16, _mm512_permutex2var_pd(odd, second, even));
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
    result.unpack_row = unpack_row;
    result.tile = flushing_tile;
    result.stream_rows = 0;  // stream() does not flush
    result.stream_packed = packed_avx512bf16::stream<Fma>;
    result.stream_4bit = fourbit_avx512bf16::stream<Fma>;
    result.packed_rows = result.rows_4bit = 24;  // panels are not faster
    result.unpack_packed = unpack_packed;
    result.compute_mx_shifts = packed_avx512bf16::compute_mx_shifts;
    result.unpack_4bit = unpack_4bit;
    return result;
  }();
  return level;
}

}  // namespace fp8serve::gemm

#endif
