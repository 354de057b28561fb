// FP8 or BF16 -> FP32 panels in the order of gemm.h, for the levels without a BF16 dot product: unpacking one
// value at a time by table, and the constants for decoding by arithmetic. A run has two steps: its odd k,
// then its even k.
#pragma once

#include "cpu/gemm.h"
#include "fp8.h"

namespace fp8serve::gemm {

constexpr int kStepOrder[kRun] = {1, 3, 5, 7, 0, 2, 4, 6};

// value(i) returns the i-th value of a row or column.
template <class Value>
FP8_INLINE void unpack_row_of(int64_t k, float* row, const Value& value) {
  for (int64_t begin = 0; begin < k; begin += kRun) {
    for (int i = 0; i < kRun; ++i) {
      const int64_t from = begin + kStepOrder[i];
      row[begin + i] = from < k ? value(from) : 0.0f;
    }
  }
}
// Column c goes to vector c % 4, quad c / 4.
template <class Value>
FP8_INLINE void unpack_column_of(int64_t c, int64_t k, float* panel, const Value& value) {
  float* column = panel + c % 4 * 16 + c / 4 * 4;
  for (int64_t begin = 0; begin < k; begin += kRun) {
    for (int i = 0; i < kRun; ++i) {
      const int64_t from = begin + kStepOrder[i];
      column[begin * kGroup + i / 4 * 64 + i % 4] = from < k ? value(from) : 0.0f;
    }
  }
}

// Calls f(value), where value(i) returns the i-th of the values at `from`.
template <class F>
FP8_INLINE void with_values(const void* from, Kind kind, const F& f) {
  if (kind == Kind::bf16) {
    const auto* bits = static_cast<const uint16_t*>(from);
    return f([bits](int64_t i) { return std::bit_cast<float>(static_cast<uint32_t>(bits[i]) << 16); });
  }
  const auto* bytes = static_cast<const uint8_t*>(from);
  const float* table = kind == Kind::e5m2 ? kDecode<E5M2>.value : kDecode<E4M3>.value;
  f([bytes, table](int64_t i) { return table[bytes[i]]; });
}

inline void unpack_row_fp32(const void* from, int64_t k, Kind kind, void* row) {
  with_values(from, kind, [&](const auto& value) { unpack_row_of(k, static_cast<float*>(row), value); });
}
inline void unpack_columns_fp32(const void* const* from, int64_t k, Kind kind, void* panel) {
  for (int64_t c = 0; c < kGroup; ++c) {
    with_values(from[c], kind,
                [&](const auto& value) { unpack_column_of(c, k, static_cast<float*>(panel), value); });
  }
}

// FP8 -> BF16 in 16-bit integers: (magnitude << shift) + bias, except for subnormals, infinity and NaN, which
// are looked up in a table by the low bits of the magnitude.
template <class F>
struct Bf16Code {
  static constexpr int shift = 7 - F::mantissa;
  static constexpr int16_t bias = (127 - F::bias) << 7;
  static constexpr int16_t first_normal = 1 << F::mantissa;
  static constexpr int16_t last_normal = F::max_fp8;
  static constexpr int16_t nan = 0x7fc0;
  alignas(64) uint16_t special[32];
  constexpr Bf16Code() : special() {
    for (int i = 0; i < 128; ++i) {
      if (i >= first_normal && i <= last_normal) continue;
      special[i % 32] =
          static_cast<uint16_t>(std::bit_cast<uint32_t>(decode<F>(static_cast<uint8_t>(i))) >> 16);
    }
  }
};
template <class F>
inline constexpr Bf16Code<F> kBf16Code{};

// The first eight of the special values; E5M2's infinity and NaN (0x7c to 0x7f) are the last four of them.
template <class F>
struct alignas(16) LowTable {
  uint16_t special[8];
  constexpr LowTable() : special() {
    for (int i = 0; i < 8; ++i) special[i] = kBf16Code<F>.special[i < Bf16Code<F>::first_normal ? i : 24 + i];
  }
};
template <class F>
inline constexpr LowTable<F> kLow{};

}  // namespace fp8serve::gemm
