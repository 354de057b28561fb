// Hopper: wgmma with TMA and warp specialisation (SASS: QGMMA).
//
// Hopper's tensor cores keep about 14 bits of an FP8 sum. These kernels move partial sums to FP32 registers
// every 128 of K ("accurate"), always: the second set of accumulators is why a consumer warpgroup takes no
// more than 64 x 128. A fast mode (larger tiles, sums left in the tensor core) is a known 5-10 % for forward
// passes and was left out: an op that gradients and inference share must not need to be told which of them
// calls.
#include "cuda/gemm_cutlass.h"

namespace {

using namespace cute;

struct Large {  // two consumer warpgroups share a tile; two tiles share the columns of b
  using Arch = cutlass::arch::Sm90;
  using Tile = Shape<_128, _128, _128>;
  using CtaTile = Tile;
  using Cluster = Shape<_2, _1, _1>;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
  using BlockSchedule = cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8Blockwise;
  using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecializedCooperative;
};

struct Small {  // each consumer warpgroup has a tile of its own and hides the other's epilogue
  using Arch = cutlass::arch::Sm90;
  using Tile = Shape<_64, _128, _128>;
  using CtaTile = Tile;
  using Cluster = Shape<_1, _1, _1>;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
  using BlockSchedule = cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8Blockwise;
  using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized;
};

}  // namespace

FP8SERVE_DEFINE_GEMM(sm90, Large, Small)
