// Hopper: wgmma with TMA and warp specialisation (SASS: QGMMA).
//
// Hopper's tensor cores keep about 14 bits of an FP8 sum. These kernels always add partial sums to FP32
// registers every 128 of K ("accurate"). A fast mode (larger tiles, sums left in the tensor core) would make
// forward passes 5-10 % faster. It was left out, so that every sum is an FP32 sum (docs/cuda.md, Choices).
#include "cuda/gemm_grouped_cutlass.h"

namespace {

using namespace cute;

struct Medium {  // two consumer warpgroups share a tile; the two blocks of a cluster share b's tile
  static constexpr auto kTile = fp8serve::Tile::medium;
  using Arch = cutlass::arch::Sm90;
  using Tile = Shape<_128, _128, _128>;
  using CtaTile = Tile;
  using Cluster = Shape<_2, _1, _1>;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
  using BlockSchedule = cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8Blockwise;
  using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecializedCooperative;
  using GroupedSchedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
  using GroupedBlockSchedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperativeFP8Blockwise;
  using GroupedEpilogueSchedule = cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative;
};

struct Small {  // each consumer warpgroup has a tile of its own and hides the other's epilogue
  static constexpr auto kTile = fp8serve::Tile::small;
  using Arch = cutlass::arch::Sm90;
  using Tile = Shape<_64, _128, _128>;
  using CtaTile = Tile;
  using Cluster = Shape<_1, _1, _1>;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
  using BlockSchedule = cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8Blockwise;
  using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized;
  using GroupedSchedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong;
  using GroupedBlockSchedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpongFP8Blockwise;
  using GroupedEpilogueSchedule = cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong;
};

// Tiles for few rows of activations. The operands are exchanged: the 128 rows of a tile are weights, and its
// 128, 64 or 32 columns are rows of activations. Such a product has fewer tiles than the chip has
// multiprocessors, and is bound by reading the weights. Stream-K splits the tiles along K so that every
// multiprocessor has the same share.
struct Thin128 {
  static constexpr auto kTile = fp8serve::Tile::thin128;
  static constexpr bool kSwapped = true;
  using Arch = cutlass::arch::Sm90;
  using Tile = Shape<_128, _128, _128>;
  using CtaTile = Tile;
  using Cluster = Shape<_1, _1, _1>;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
  using BlockSchedule = void;
  using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecializedCooperative;
  using Scheduler = cutlass::gemm::StreamKScheduler;
};

struct Thin64 : Thin128 {
  static constexpr auto kTile = fp8serve::Tile::thin64;
  using Tile = Shape<_128, _64, _128>;
  using CtaTile = Tile;
};

struct Thin32 : Thin128 {
  static constexpr auto kTile = fp8serve::Tile::thin32;
  using Tile = Shape<_128, _32, _128>;
  using CtaTile = Tile;
};

}  // namespace

namespace fp8serve {
using namespace cutlass_gemm;

#ifdef FP8SERVE_OUTSIDE
bool gemm_sm90_outside(const Gemm& g, TileChoice choice, const OnDevice& device, const Tensor& allocator) {
  if (!scaled_outside(g)) return false;
  return (g.m <= kThinRows &&
          answer<e4m3, e4m3, bf16, 0, Thin128, Thin64, Thin32>(g, choice, device, allocator)) ||
         answer<e4m3, e4m3, bf16, 0, Medium, Small>(g, choice, device, allocator) ||
         answer<e5m2, e4m3, bf16, 0, Medium>(g, choice, device, allocator) ||
         answer<e4m3, e4m3, fp32, 0, Medium>(g, choice, device, allocator) ||
         answer<e5m2, e4m3, fp32, 0, Medium>(g, choice, device, allocator) ||
         answer<e4m3, e5m2, bf16, 0, Medium>(g, choice, device, allocator) ||
         answer<e4m3, e5m2, fp32, 0, Medium>(g, choice, device, allocator) ||
         answer<e4m3, e4m3, e4m3, 0, Medium, Small>(g, choice, device, allocator);
}

bool grouped_sm90_outside(const Grouped& g, const OnDevice& device, const Tensor& allocator) {
  if (!scaled_outside(g.all)) return false;
  return answer_grouped<e4m3, e4m3, bf16, 0, Small, Medium>(g, device, allocator) ||
         answer_grouped<e5m2, e4m3, bf16, 0, Medium>(g, device, allocator) ||
         answer_grouped<e4m3, e4m3, fp32, 0, Medium>(g, device, allocator) ||
         answer_grouped<e5m2, e4m3, fp32, 0, Medium>(g, device, allocator);
}
#else
bool gemm_sm90_inside(const Gemm& g, TileChoice choice, const OnDevice& device, const Tensor& allocator) {
  if (scaled_inside(g, 128)) {
    return answer<e4m3, e4m3, bf16, 128, Medium, Small>(g, choice, device, allocator) ||
           answer<e5m2, e4m3, bf16, 128, Medium>(g, choice, device, allocator) ||
           answer<e4m3, e4m3, fp32, 128, Medium>(g, choice, device, allocator);
  }
  if (!scaled_inside(g, 1)) return false;
  return answer<e4m3, e4m3, bf16, 1, Medium>(g, choice, device, allocator) ||
         answer<e4m3, e4m3, fp32, 1, Medium>(g, choice, device, allocator) ||
         answer<e5m2, e4m3, bf16, 1, Medium>(g, choice, device, allocator) ||
         answer<e5m2, e4m3, fp32, 1, Medium>(g, choice, device, allocator);
}

bool grouped_sm90_inside(const Grouped& g, const OnDevice& device, const Tensor& allocator) {
  if (scaled_inside(g.all, 128)) {
    return answer_grouped<e4m3, e4m3, bf16, 128, Small, Medium>(g, device, allocator) ||
           answer_grouped<e5m2, e4m3, bf16, 128, Medium>(g, device, allocator) ||
           answer_grouped<e4m3, e4m3, fp32, 128, Medium>(g, device, allocator);
  }
  if (!scaled_inside(g.all, 1)) return false;
  return answer_grouped<e4m3, e4m3, bf16, 1, Medium>(g, device, allocator) ||
         answer_grouped<e4m3, e4m3, fp32, 1, Medium>(g, device, allocator) ||
         answer_grouped<e5m2, e4m3, bf16, 1, Medium>(g, device, allocator) ||
         answer_grouped<e5m2, e4m3, fp32, 1, Medium>(g, device, allocator);
}
#endif

}  // namespace fp8serve
