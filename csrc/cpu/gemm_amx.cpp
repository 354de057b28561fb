// The GEMM level for tiles of BF16 (AMX): numerics class `amx_tiles`.
//
// The order. A block of 1024 of K is cut into steps of 32. In a step, one FP32 sum adds the products of the
// even k and one those of the odd k; the two are added, and the result is added to the sum of the block, as
// `tdpbf16ps` does. Values and sums that are subnormal in FP32 count as zero. With block scales each 128 of K
// has a sum of its own, which is promoted to the sum of the block by total += sum * scale, rounded twice. The
// rest is as in gemm.h. The number of rows does not matter: a row's sum depends on its own values only.
//
// Up to 64 rows by 16 columns are four tiles of sums, which are independent of each other: an instruction
// takes 16 cycles, its result 52. The panels are those of the AVX-512 BF16 level, but that the pairs of k of
// 16 columns lie side by side. Its unpacking is used, whatever the weights are, and each run is transposed
// afterwards. A few rows have no tile of their own: they read a panel, too.
//
// Both levels run the same code. `amx` has the instructions, `emulated_amx` what Intel's manual says that
// they do, so that the kernel is tested where no processor has them. Neither runs unless a cap names it.
#include "cpu/features.h"
#include "cpu/gemm.h"

#if FP8_X86
#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "cpu/gemm_packed.h"
#include "cpu/gemm_zmm.h"

namespace fp8serve::gemm {
namespace amx_level {

#define FP8_TARGET FP8_TARGET_AMX

using Vector = __m512;
#include "cpu/gemm_sum.h"

constexpr int64_t kTileRows = 16, kStep = 32;       // rows of a tile, k of an instruction
constexpr int64_t kBytes = 64;                      // of a row of a tile
constexpr int kWeights = 4, kWhole = 5, kRest = 6;  // tiles; 0 to 3 are sums

// --- the instructions, and what they do

// Tiles of 16 rows, but that the last tile of sums and kRest have `rest`.
struct Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  Config(int last, int64_t rest) {
    for (int i = 0; i <= kRest; ++i) {
      row_bytes[i] = kBytes;
      rows[i] = static_cast<uint8_t>(i == last || i == kRest ? rest : kTileRows);
    }
  }
};
static_assert(sizeof(Config) == 64);

class Tiles {
 public:
  FP8_TARGET FP8_INLINE explicit Tiles(const Config& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
  FP8_TARGET FP8_INLINE void release() { asm volatile("tilerelease"); }
  template <int t>
  FP8_TARGET FP8_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(t));
  }
  template <int t>
  FP8_TARGET FP8_INLINE void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(t) : "memory");
  }
  template <int t>
  FP8_TARGET FP8_INLINE void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(t) : "memory");
  }
  template <int sum, int a, int b>
  FP8_TARGET FP8_INLINE void multiply_add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(a), "i"(b));
  }
};

class EmulatedTiles {
 public:
  explicit EmulatedTiles(const Config& config) : config_(config) {}
  void release() {}
  template <int t>
  void zero() {
    std::memset(rows_[t], 0, sizeof rows_[t]);
  }
  template <int t>
  void load(const void* from, int64_t stride) {
    zero<t>();
    for (int r = 0; r < config_.rows[t]; ++r)
      std::memcpy(rows_[t][r], static_cast<const char*>(from) + r * stride, kBytes);
  }
  template <int t>
  void store(void* to, int64_t stride) {
    for (int r = 0; r < config_.rows[t]; ++r)
      std::memcpy(static_cast<char*>(to) + r * stride, rows_[t][r], kBytes);
  }
  template <int sum, int a, int b>
  FP8_TARGET void multiply_add() {
    for (int r = 0; r < config_.rows[sum]; ++r) {
      float even[16] = {}, odd[16] = {};
      for (int pair = 0; pair < kStep / 2; ++pair) {
        const uint32_t x = rows_[a][r][pair];
        for (int c = 0; c < 16; ++c) {
          const uint32_t y = rows_[b][pair][c];
          even[c] = flushed(std::fma(low(x), low(y), even[c]));
          odd[c] = flushed(std::fma(high(x), high(y), odd[c]));
        }
      }
      for (int c = 0; c < 16; ++c) {
        const float before = std::bit_cast<float>(rows_[sum][r][c]);
        rows_[sum][r][c] = std::bit_cast<uint32_t>(flushed(before + flushed(even[c] + odd[c])));
      }
    }
  }

 private:
  static FP8_INLINE float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
  static FP8_INLINE float low(uint32_t pair) { return flushed(std::bit_cast<float>(pair << 16)); }
  static FP8_INLINE float high(uint32_t pair) { return flushed(std::bit_cast<float>(pair & 0xffff0000u)); }

  const Config config_;
  uint32_t rows_[kRest + 1][kTileRows][kBytes / 4] = {};
};

// --- the tile of gemm.h

template <class Instructions, int row_tile, int row_tiles>
FP8_TARGET FP8_INLINE void zero_from(Instructions& tiles) {
  tiles.template zero<row_tile>();
  if constexpr (row_tile + 1 < row_tiles) zero_from<Instructions, row_tile + 1, row_tiles>(tiles);
}

template <class Instructions, int row_tile, int row_tiles>
FP8_TARGET FP8_INLINE void multiply_from(Instructions& tiles, const uint16_t* a, int64_t stride) {
  constexpr int from = row_tile + 1 < row_tiles ? kWhole : kRest;
  tiles.template load<from>(a + row_tile * kTileRows * stride, 2 * stride);
  tiles.template multiply_add<row_tile, from, kWeights>();
  if constexpr (row_tile + 1 < row_tiles)
    multiply_from<Instructions, row_tile + 1, row_tiles>(tiles, a, stride);
}

template <class Instructions, int row_tile, int row_tiles>
FP8_TARGET FP8_INLINE void store_from(Instructions& tiles, float* sums) {
  tiles.template store<row_tile>(sums + row_tile * kTileRows * kGroup, kBytes);
  if constexpr (row_tile + 1 < row_tiles) store_from<Instructions, row_tile + 1, row_tiles>(tiles, sums);
}

// The sums of k = begin to end, [rows][16].
template <class Instructions, int row_tiles>
FP8_TARGET FP8_INLINE void sum(Instructions& tiles, const Tile& t, int64_t begin, int64_t end, float* sums) {
  zero_from<Instructions, 0, row_tiles>(tiles);
  for (int64_t k = begin; k < end; k += kStep) {
    tiles.template load<kWeights>(static_cast<const uint16_t*>(t.b) + k * kGroup, kBytes);
    multiply_from<Instructions, 0, row_tiles>(tiles, static_cast<const uint16_t*>(t.a) + k, t.a_stride);
  }
  store_from<Instructions, 0, row_tiles>(tiles, sums);
}

// Adds the sums of a block of 128 of K, times its scales, to the totals.
FP8_TARGET FP8_INLINE void promote_rows(const Tile& t, int64_t block, const float* sums, float* totals) {
  for (int r = 0; r < t.rows; ++r) {
    const __m512 scale = same_scale(t.scale[r][block]);
    const __m512 scales =
        t.b_scale == nullptr ? scale : _mm512_mul_ps(scale, _mm512_loadu_ps(t.b_scale + block * kGroup));
    float* total = totals + r * kGroup;
    _mm512_storeu_ps(total, promote(_mm512_loadu_ps(total), _mm512_loadu_ps(sums + r * kGroup), scales));
  }
}

template <class Instructions, int row_tiles>
FP8_TARGET void rows_of(const Tile& t) {
  alignas(64) float sums[row_tiles * kTileRows * kGroup];
  Instructions tiles(Config(row_tiles - 1, t.rows - (row_tiles - 1) * kTileRows));
  if (t.scale == nullptr) {
    sum<Instructions, row_tiles>(tiles, t, 0, t.k, sums);
  } else {
    alignas(64) float parts[row_tiles * kTileRows * kGroup];
    std::fill_n(sums, row_tiles * kTileRows * kGroup, 0.0f);
    for (int64_t k = 0; k < t.k; k += kScaleBlock) {
      sum<Instructions, row_tiles>(tiles, t, k, std::min(t.k, k + kScaleBlock), parts);
      promote_rows(t, k / kScaleBlock, parts, sums);
    }
  }
  tiles.release();
  for (int r = 0; r < t.rows; ++r) {
    Sums row[] = {load_sums(sums + r * kGroup)};
    finish_sums<1>(row, t, r);
  }
}

template <class Instructions>
void tile(const Tile& t) {
  static constexpr void (*by_row_tiles[])(const Tile&) = {rows_of<Instructions, 1>, rows_of<Instructions, 2>,
                                                          rows_of<Instructions, 3>, rows_of<Instructions, 4>};
  by_row_tiles[(t.rows - 1) / kTileRows](t);
}

// --- the panel

// Transposes the runs from k = begin to end of a panel of the AVX-512 BF16 level: four vectors of four
// columns and four pairs become four pairs of 16 columns. Fills the last step with zeros.
FP8_TARGET_AVX512 void transpose_runs(void* panel, int64_t begin, int64_t end) {
  auto* at = static_cast<uint16_t*>(panel) + begin * kGroup;
  for (int64_t k = begin; k < end; k += kRun, at += kRun * kGroup) {
    const __m512i a = _mm512_loadu_si512(at), b = _mm512_loadu_si512(at + 32),
                  c = _mm512_loadu_si512(at + 64), d = _mm512_loadu_si512(at + 96);
    const __m512i ab_low = _mm512_unpacklo_epi32(a, b), ab_high = _mm512_unpackhi_epi32(a, b),
                  cd_low = _mm512_unpacklo_epi32(c, d), cd_high = _mm512_unpackhi_epi32(c, d);
    _mm512_storeu_si512(at, _mm512_unpacklo_epi64(ab_low, cd_low));
    _mm512_storeu_si512(at + 32, _mm512_unpackhi_epi64(ab_low, cd_low));
    _mm512_storeu_si512(at + 64, _mm512_unpacklo_epi64(ab_high, cd_high));
    _mm512_storeu_si512(at + 96, _mm512_unpackhi_epi64(ab_high, cd_high));
  }
  const int64_t runs = (end + kRun - 1) / kRun * kRun, steps = (end + kStep - 1) / kStep * kStep;
  std::memset(at, 0, static_cast<size_t>((steps - runs) * kGroup) * sizeof(uint16_t));
}

void unpack_columns(const void* const* from, int64_t k, Kind kind, void* panel) {
  avx512bf16().unpack_columns(from, k, kind, panel);
  transpose_runs(panel, 0, k);
}
void unpack_packed(const void* block, int64_t k, int64_t begin, int64_t end, Kind kind,
                   const uint16_t* mx_shifts, void* panel) {
  avx512bf16().unpack_packed(block, k, begin, end, kind, mx_shifts, panel);
  transpose_runs(panel, begin, end);
}
void unpack_4bit(const void* block, const uint8_t* distances, int64_t begin, int64_t end, Kind kind,
                 void* panel) {
  avx512bf16().unpack_4bit(block, distances, begin, end, kind, panel);
  transpose_runs(panel, begin, end);
}

Level level_of(const Variant& variant, void (*tile)(const Tile&)) {
  return {.variant = variant,
          .element_size = sizeof(uint16_t),
          .unpack_row = avx512bf16().unpack_row,
          .unpack_columns = unpack_columns,
          .tile = tile,
          .stream = nullptr,
          .stream_rows = 0,
          .unpack_packed = unpack_packed,
          .compute_mx_shifts = packed_avx512bf16::compute_mx_shifts,
          .unpack_4bit = unpack_4bit,
          .tile_rows = kMostRows};
}

#undef FP8_TARGET

}  // namespace amx_level

const Level& amx() {
  using namespace amx_level;
  static const Level level = level_of({"amx", kAmx, Numerics::amx_tiles}, tile<Tiles>);
  return level;
}

const Level& emulated_amx() {
  using namespace amx_level;
  static const Level level =
      level_of({"emulated_amx", kEmulatedAmx, Numerics::amx_tiles}, tile<EmulatedTiles>);
  return level;
}

}  // namespace fp8serve::gemm

#endif
