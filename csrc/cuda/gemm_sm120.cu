// Blackwell workstation chips: warp-level mma fed by TMA (SASS: QMMA.16832.F32). These chips have no
// clusters. The mma kernel (gemm_sm89.cu) uses the same instruction, so it takes the rare cases, such as E4M3
// x E5M2, and FP32 output with block scales.
#include "cuda/gemm_cutlass.h"

namespace {

using namespace cute;

struct Large {
  static constexpr auto kTile = fp8serve::Tile::large;
  using Arch = cutlass::arch::Sm120;
  using Tile = Shape<_128, _128, _128>;
  using CtaTile = Tile;
  using Cluster = Shape<_1, _1, _1>;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
  using BlockSchedule = cutlass::gemm::KernelTmaWarpSpecializedBlockwiseCooperativeSm120;
  using EpilogueSchedule = cutlass::epilogue::collective::EpilogueScheduleAuto;
};

struct Small : Large {
  static constexpr auto kTile = fp8serve::Tile::small;
  using Tile = Shape<_64, _128, _128>;
  using CtaTile = Tile;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
  using BlockSchedule = cutlass::gemm::KernelTmaWarpSpecializedBlockwisePingpongSm120;
};

}  // namespace

namespace fp8serve {
using namespace cutlass_gemm;

#ifdef FP8SERVE_OUTSIDE
bool gemm_sm120_outside(const Gemm& g, TileChoice choice, const OnDevice& device, const Tensor& allocator) {
  if (!scaled_outside(g)) return false;
  return answer<e4m3, e4m3, bf16, 0, Large, Small>(g, choice, device, allocator) ||
         answer<e4m3, e4m3, fp32, 0, Large>(g, choice, device, allocator) ||
         answer<e5m2, e4m3, bf16, 0, Large>(g, choice, device, allocator) ||
         answer<e5m2, e4m3, fp32, 0, Large>(g, choice, device, allocator) ||
         answer<e4m3, e4m3, e4m3, 0, Large>(g, choice, device, allocator);
}
#else
bool gemm_sm120_inside(const Gemm& g, TileChoice choice, const OnDevice& device, const Tensor& allocator) {
  if (scaled_inside(g, 128)) {
    return answer<e4m3, e4m3, bf16, 128, Large>(g, choice, device, allocator) ||
           answer<e5m2, e4m3, bf16, 128, Large>(g, choice, device, allocator);
  }
  return scaled_inside(g, 1) && answer<e4m3, e4m3, bf16, 1, Large>(g, choice, device, allocator);
}
#endif

}  // namespace fp8serve
