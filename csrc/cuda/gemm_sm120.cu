// Blackwell workstation chips: warp-level mma fed by TMA (SASS: QMMA.16832.F32). No clusters there.
#include "cuda/gemm_cutlass.h"

namespace {

using namespace cute;

struct Large {
  using Arch = cutlass::arch::Sm120;
  using Tile = Shape<_128, _128, _128>;
  using CtaTile = Tile;
  using Cluster = Shape<_1, _1, _1>;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
  using BlockSchedule = cutlass::gemm::KernelTmaWarpSpecializedBlockwiseCooperativeSm120;
  using EpilogueSchedule = cutlass::epilogue::collective::EpilogueScheduleAuto;
};

struct Small : Large {
  using Tile = Shape<_64, _128, _128>;
  using CtaTile = Tile;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
  using BlockSchedule = cutlass::gemm::KernelTmaWarpSpecializedBlockwisePingpongSm120;
};

}  // namespace

FP8SERVE_DEFINE_GEMM(sm120, Large, Small)
