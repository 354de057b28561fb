// Blackwell data centre chips: tcgen05, two blocks to a multiplication (SASS: UTCQMMA). Sums are full FP32.
// The instruction's descriptor holds the formats of the operands, so one kernel serves every pair of formats.
#include "cuda/gemm_grouped_cutlass.h"

namespace {

using namespace cute;

struct Large {
  static constexpr auto kTile = fp8serve::Tile::large;
  using Arch = cutlass::arch::Sm100;
  using Tile = Shape<_256, _128, _128>;
  using CtaTile = Shape<_128, _128, _128>;
  using Cluster = Shape<_2, _1, _1>;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecialized2SmSm100;
  using BlockSchedule = cutlass::gemm::KernelTmaWarpSpecializedBlockwise2SmSm100;
  using EpilogueSchedule = cutlass::epilogue::collective::EpilogueScheduleAuto;
  using GroupedSchedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecialized2SmSm100;
  using GroupedBlockSchedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedBlockwise2SmSm100;
  using GroupedEpilogueSchedule = cutlass::epilogue::PtrArrayTmaWarpSpecialized2Sm;
};

struct Small {
  static constexpr auto kTile = fp8serve::Tile::small;
  using Arch = cutlass::arch::Sm100;
  using Tile = Shape<_128, _128, _128>;
  using CtaTile = Tile;
  using Cluster = Shape<_1, _1, _1>;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecialized1SmSm100;
  using BlockSchedule = cutlass::gemm::KernelTmaWarpSpecializedBlockwise1SmSm100;
  using EpilogueSchedule = cutlass::epilogue::collective::EpilogueScheduleAuto;
  using GroupedSchedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecialized1SmSm100;
  using GroupedBlockSchedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedBlockwise1SmSm100;
  using GroupedEpilogueSchedule = cutlass::epilogue::PtrArrayTmaWarpSpecialized1Sm;
};

}  // namespace

namespace fp8serve {
using namespace cutlass_gemm;

#ifdef FP8SERVE_OUTSIDE
bool gemm_sm100_outside(const Gemm& g, TileChoice choice, const OnDevice& device, const Tensor& allocator) {
  if (!scaled_outside(g)) return false;
  return answer<either, either, bf16, 0, Large, Small>(g, choice, device, allocator) ||
         answer<either, either, fp32, 0, Large, Small>(g, choice, device, allocator) ||
         answer<either, either, e4m3, 0, Large>(g, choice, device, allocator);
}

bool grouped_sm100_outside(const Grouped& g, const OnDevice& device, const Tensor& allocator) {
  if (!scaled_outside(g.all)) return false;
  return answer_grouped<either, either, bf16, 0, Small, Large>(g, device, allocator) ||
         answer_grouped<either, either, fp32, 0, Small, Large>(g, device, allocator);
}
#else
bool gemm_sm100_inside(const Gemm& g, TileChoice choice, const OnDevice& device, const Tensor& allocator) {
  if (scaled_inside(g, 128)) {
    return answer<either, either, bf16, 128, Large, Small>(g, choice, device, allocator) ||
           answer<either, either, fp32, 128, Large>(g, choice, device, allocator);
  }
  if (!scaled_inside(g, 1)) return false;
  return answer<either, either, bf16, 1, Large>(g, choice, device, allocator) ||
         answer<either, either, fp32, 1, Large>(g, choice, device, allocator);
}

bool grouped_sm100_inside(const Grouped& g, const OnDevice& device, const Tensor& allocator) {
  if (scaled_inside(g.all, 128)) {
    return answer_grouped<either, either, bf16, 128, Small, Large>(g, device, allocator) ||
           answer_grouped<either, either, fp32, 128, Small>(g, device, allocator);
  }
  if (!scaled_inside(g.all, 1)) return false;
  return answer_grouped<either, either, bf16, 1, Small>(g, device, allocator) ||
         answer_grouped<either, either, fp32, 1, Small>(g, device, allocator);
}
#endif

}  // namespace fp8serve
