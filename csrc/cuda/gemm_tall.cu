// The invariant mode: any number of rows times E4M3 or BF16 weights, with the sums of the skinny kernel.
//
// The skinny kernel takes up to 64 rows. This kernel takes more, and gives a row the same bits, so that a
// prompt, a decoded token and a training batch agree (fp8/batch_invariant.py). It repeats the skinny kernel's
// arithmetic by the same functions (skinny_order.h): the same mma's with weights as their 16-row operand, and
// one warp that adds the blocks of K in the order in which the skinny kernel's warps and teams add them.
//
// A block computes 128 weight rows x 64 tokens with 8 warps of 32 x 32 each. Both operands are copied to
// three stages of shared memory, a block of K in each. On Hopper and sm_100, whose warps multiply FP16,
// converting the operands takes longer than multiplying them; there cuBLASLt is several times as fast.
#include "cuda/skinny_order.h"

namespace fp8serve {
namespace {

constexpr int kThreads = 32 * kWarps, kStages = 3;
static_assert(kWarps == kReportingWarps);
constexpr int kTileN = 128, kTileM = 64;  // weight rows and tokens of a block
constexpr int kWarpN = 32, kWarpM = 32;   // of a warp
constexpr int kSixteens = kWarpN / kRows, kEights = kWarpM / 8;
constexpr int kStage = (kTileN + kTileM) * kLine;  // bytes
constexpr int kPieces = kLine / 16;                // of a row

// In every other row the two halves of the line are exchanged, so that lanes that read eight rows at once use
// different banks.
__device__ __forceinline__ int place_of(int row, int piece) {
  return row * kLine + (piece ^ row % 2 * 4) * 16;
}

// The blocks of K in the order of their addition: those of the first warp that shares K, then of the second,
// ...
struct Order {
  int blocks, warps, block = 0;

  __device__ __forceinline__ bool done() const { return block >= blocks; }
  __device__ __forceinline__ int warp() const { return block % warps; }
  __device__ __forceinline__ bool ends_warp() const { return block + warps >= blocks; }
  __device__ __forceinline__ void next() {
    if (!ends_warp()) {
      block += warps;
    } else {
      block = warp() + 1 < warps ? warp() + 1 : blocks;
    }
  }
};

// Starts to copy a block of K of the tile's weights and, below them, of its tokens.
__device__ __forceinline__ void load_stage(unsigned char* stage, const Gemm& g, int n0, int m0, int block) {
#pragma unroll
  for (int i = 0; i < (kTileN + kTileM) * kPieces / kThreads; ++i) {
    const int index = static_cast<int>(threadIdx.x) + i * kThreads, row = index / kPieces,
              piece = index % kPieces;
    const bool is_weight = row < kTileN;
    const int of = is_weight ? n0 + row : m0 + row - kTileN, k = block * kLine + piece * 16;
    const bool valid = of < (is_weight ? g.n : g.m) && k < g.k;
    const uint8_t* from = (is_weight ? g.b : g.a) + static_cast<int64_t>(of) * g.k + k;
    copy_async(stage + place_of(row, piece), valid ? from : g.b, valid);
  }
}

struct NoCast {};

// The operands of 16 weight rows, and of the warp's tokens, in a stage.
struct Operands {
  const unsigned char *weight, *token;  // the first row
  int lane;

  __device__ __forceinline__ uint4 weights(int half, int eight) const {
    return *reinterpret_cast<const uint4*>(weight + place_of(lane / 4 + 8 * eight, half * 4 + lane % 4));
  }
  __device__ __forceinline__ uint4 activations(const NoCast&, int group, int half, int) const {
    return *reinterpret_cast<const uint4*>(token + place_of(group * 8 + lane / 4, half * 4 + lane % 4));
  }
};

using Sums = float[kSixteens][kEights][4];

// Adds `from` to `to`, and sets `from` to 0.
__device__ __forceinline__ void move_sums(Sums& to, Sums& from) {
#pragma unroll
  for (int i = 0; i < kSixteens; ++i) {
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) to[i][j][e] += from[i][j][e], from[i][j][e] = 0.0f;
    }
  }
}

// warps: how many warps of the skinny kernel share K.
template <Element kElement, bool kInside>
__global__ void __launch_bounds__(kThreads, 1) multiply_tall(const __grid_constant__ Gemm g, int warps) {
  unsigned char* shared = dynamic_shared();
  const int tiles_m = (g.m + kTileM - 1) / kTileM, index = static_cast<int>(blockIdx.x);
  const int n0 = index / tiles_m * kTileN,
            m0 = index % tiles_m * kTileM;  // blocks that share weights are neighbours
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_n = warp % 4 * kWarpN, warp_m = warp / 4 * kWarpM;
  Order next{(g.k + kScaleBlock - 1) / kScaleBlock, warps};
  Order now = next;
  const auto load_next = [&](int stage) {
    if (!next.done()) {
      load_stage(shared + stage * kStage, g, n0, m0, next.block);
      next.next();
    }
    copy_commit();  // also an empty group, so that the number of pending groups stays the same
  };
  for (int stage = 0; stage < kStages - 1; ++stage) load_next(stage);
  const NoCast no_cast;
  Sums of_warp = {}, of_team = {}, total = {};
  for (int step = 0; !now.done(); ++step, now.next()) {
    copy_wait<kStages - 2>();
    __syncthreads();  // this stage has arrived everywhere, and all threads are done with the next one
    load_next((step + kStages - 1) % kStages);
    const unsigned char* stage = shared + step % kStages * kStage;
#pragma unroll
    for (int i = 0; i < kSixteens; ++i) {
      const int row = warp_n + i * kRows;
      const Operands operands{stage + row * kLine, stage + (kTileN + warp_m) * kLine, lane};
      float by_row[2] = {1.0f, 1.0f};
      if constexpr (kInside) {
        by_row[0] = g.b_scale.inner(n0 + row + lane / 4, g.n, now.block);
        by_row[1] = g.b_scale.inner(n0 + row + lane / 4 + 8, g.n, now.block);
      }
#pragma unroll
      for (int j = 0; j < kEights; ++j) {
        float sum[4] = {};
        multiply<kElement>(sum, operands, no_cast, j, now.block);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int token = m0 + warp_m + j * 8 + lane % 4 * 2 + e % 2;
          add_block<kInside>(of_warp[i][j][e], sum[e], g, by_row[e / 2], token, now.block);
        }
      }
    }
    if (now.ends_warp()) {
      move_sums(of_team, of_warp);
      if (now.warp() % kWarps == kWarps - 1) move_sums(total, of_team);
    }
  }
  move_sums(total, of_team);
  float seen = 0.0f;
#pragma unroll
  for (int i = 0; i < kSixteens; ++i) {
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = m0 + warp_m + j * 8 + lane % 4 * 2 + e % 2;
        const int column = n0 + warp_n + i * kRows + lane / 4 + e / 2 * 8;
        if (token >= g.m || column >= g.n) continue;
        const float value = apply_epilogue(g, total[i][j][e], load_epilogue_operands(g, token, column));
        seen = put(g, static_cast<int64_t>(token) * g.n + column, value, seen);
      }
    }
  }
  report_amax(g, seen);
}

template <Element kElement>
void launch_tall(const Gemm& g, const OnDevice& device) {
  const auto blocks = static_cast<unsigned>(ceil_over(g.m, kTileM) * ceil_over(g.n, kTileN));
  auto* kernel = multiply_tall<kElement, false>;
  if constexpr (kElement == Element::e4m3) {
    if (g.a_scale.inside() || g.b_scale.inside()) kernel = multiply_tall<kElement, true>;
  }
  launch(kernel, blocks, kThreads, kStages * kStage, device.stream(), g, skinny_warps(g, device));
}

}  // namespace

void gemm_tall(const Gemm& g, const OnDevice& device) { launch_tall<Element::e4m3>(g, device); }

void gemm_tall_bf16(const Gemm& g, const OnDevice& device) { launch_tall<Element::bf16>(g, device); }

}  // namespace fp8serve
