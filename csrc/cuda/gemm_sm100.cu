// Blackwell data centre chips: tcgen05, two blocks to a multiplication (SASS: UTCQMMA). Sums are full FP32.
#include "cuda/gemm_cutlass.h"

namespace {

using namespace cute;

struct Large {
  using Arch = cutlass::arch::Sm100;
  using Tile = Shape<_256, _128, _128>;
  using CtaTile = Shape<_128, _128, _128>;
  using Cluster = Shape<_2, _1, _1>;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecialized2SmSm100;
  using BlockSchedule = cutlass::gemm::KernelTmaWarpSpecializedBlockwise2SmSm100;
  using EpilogueSchedule = cutlass::epilogue::collective::EpilogueScheduleAuto;
};

struct Small {
  using Arch = cutlass::arch::Sm100;
  using Tile = Shape<_128, _128, _128>;
  using CtaTile = Tile;
  using Cluster = Shape<_1, _1, _1>;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecialized1SmSm100;
  using BlockSchedule = cutlass::gemm::KernelTmaWarpSpecializedBlockwise1SmSm100;
  using EpilogueSchedule = cutlass::epilogue::collective::EpilogueScheduleAuto;
};

}  // namespace

FP8SERVE_DEFINE_GEMM(sm100, Large, Small)
