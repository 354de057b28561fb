// One GEMM of the CUTLASS collective builders with our epilogue, for the three architectures that have them.
//
// The epilogue tree, on FP32 sums, in the order of reference.py: (sum * a_scale) * b_scale + bias, rounded
// once. A scale is a number or a vector at run time (a stride that is true or false), so one kernel serves
// tensor and row scales. Block scales act in the main loop, 128 of K at a time; the kernels for them take a
// per 1x128 and b per 128x128 or 1x128, which is what the block recipe multiplies. A configuration
// (gemm_sm90.cu ...) names tiles, clusters and schedules.
#pragma once

#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>

#include <cute/tensor.hpp>
#include <cutlass/detail/blockwise_scale_layout.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/fusion/operations.hpp>
#include <cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/util/packed_stride.hpp>

#include "cuda/gemm.h"

namespace fp8serve::cutlass_gemm {

using namespace cute;  // NOLINT: shapes are spelled Shape<_128, _128, _128> everywhere in this field

using e4m3 = cutlass::float_e4m3_t;
using e5m2 = cutlass::float_e5m2_t;
using bf16 = cutlass::bfloat16_t;
using fp32 = float;

template <class Out>
inline constexpr Number kNumber = std::is_same_v<Out, float> ? Number::fp32 : Number::bf16;

template <class CtaTile, class Out>
struct Epilogue {
  static constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;
  using ByRow = cutlass::epilogue::fusion::Sm90ColBroadcast<0, CtaTile, float, float, Stride<bool, _0, _0>>;
  using ByColumn =
      cutlass::epilogue::fusion::Sm90RowBroadcast<0, CtaTile, float, float, Stride<_0, bool, _0>>;
  using Bias = cutlass::epilogue::fusion::Sm90RowBroadcast<0, CtaTile, Out, float>;
  using Times = cutlass::epilogue::fusion::Sm90Compute<cutlass::multiplies, float, float, kRound>;
  using Plus = cutlass::epilogue::fusion::Sm90Compute<cutlass::plus, Out, float, kRound>;
  using Sum = cutlass::epilogue::fusion::Sm90AccFetch;
  using ScaledByRow = cutlass::epilogue::fusion::Sm90EVT<Times, ByRow, Sum>;
  using Scaled = cutlass::epilogue::fusion::Sm90EVT<Times, ByColumn, ScaledByRow>;
  using Tree = cutlass::epilogue::fusion::Sm90EVT<Plus, Bias, Scaled>;

  static typename Tree::Arguments arguments(const Gemm& g) {
    const bool by_row = !g.a_scale.one(), by_column = !g.b_scale.one();
    const float* a_scale = g.a_scale.inside() ? nullptr : g.a_scale.data;
    const float* b_scale = g.b_scale.inside() ? nullptr : g.b_scale.data;
    return {{static_cast<const Out*>(g.bias), Out(0), {}},
            {{b_scale, 1.0f, {_0{}, by_column, _0{}}}, {{a_scale, 1.0f, {by_row, _0{}, _0{}}}, {}, {}}, {}},
            {}};
  }
};

// kScaleRowsB: 0 for scales outside the sum; else a is scaled per 1x128 and b per kScaleRowsB x 128.
template <class Config, class A, class B, class Out, int kScaleRowsB>
struct Kernel {
  using Scales = cutlass::detail::Sm1xxBlockwiseScaleConfig<1, kScaleRowsB == 0 ? 1 : kScaleRowsB,
                                                            kScaleBlock, UMMA::Major::K, UMMA::Major::K>;
  using ScaleLayoutA = decltype(Scales::deduce_layoutSFA());
  using ScaleLayoutB = decltype(Scales::deduce_layoutSFB());
  using RowMajor = cutlass::layout::RowMajor;
  using ColumnMajor = cutlass::layout::ColumnMajor;
  static constexpr bool kBlocked = kScaleRowsB != 0;
  static constexpr int kAlign = 16 / sizeof(Out);  // of a row of the output, in elements

  using Fusion = Epilogue<typename Config::CtaTile, Out>;
  using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      typename Config::Arch, cutlass::arch::OpClassTensorOp, typename Config::Tile, typename Config::Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, RowMajor, kAlign, Out, RowMajor,
      kAlign, typename Config::EpilogueSchedule, typename Fusion::Tree>::CollectiveOp;
  using CollectiveMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      typename Config::Arch, cutlass::arch::OpClassTensorOp, A,
      std::conditional_t<kBlocked, cute::tuple<RowMajor, ScaleLayoutA>, RowMajor>, 16, B,
      std::conditional_t<kBlocked, cute::tuple<ColumnMajor, ScaleLayoutB>, ColumnMajor>, 16, float,
      typename Config::Tile, typename Config::Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename CollectiveEpilogue::SharedStorage))>,
      std::conditional_t<kBlocked, typename Config::BlockSchedule, typename Config::Schedule>>::CollectiveOp;
  using GemmKernel =
      cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, CollectiveMainloop, CollectiveEpilogue>;
  using Adapter = cutlass::gemm::device::GemmUniversalAdapter<GemmKernel>;

  static typename GemmKernel::MainloopArguments mainloop(const Gemm& g) {
    typename GemmKernel::MainloopArguments args{};
    args.ptr_A = reinterpret_cast<decltype(args.ptr_A)>(g.a);
    args.ptr_B = reinterpret_cast<decltype(args.ptr_B)>(g.b);
    args.dA = cutlass::make_cute_packed_stride(typename GemmKernel::StrideA{}, make_shape(g.m, g.k, 1));
    args.dB = cutlass::make_cute_packed_stride(typename GemmKernel::StrideB{}, make_shape(g.n, g.k, 1));
    if constexpr (kBlocked) {
      args.ptr_SFA = g.a_scale.data;
      args.ptr_SFB = g.b_scale.data;
      args.layout_SFA = Scales::tile_atom_to_shape_SFA(make_shape(g.m, g.n, g.k, 1));
      args.layout_SFB = Scales::tile_atom_to_shape_SFB(make_shape(g.m, g.n, g.k, 1));
    }
    return args;
  }

  static void run(const Gemm& g, const OnDevice& device, const Tensor& allocator) {
    typename GemmKernel::EpilogueArguments epilogue{};
    epilogue.thread = Fusion::arguments(g);
    epilogue.ptr_D = static_cast<Out*>(g.out);
    epilogue.dD = cutlass::make_cute_packed_stride(typename GemmKernel::StrideD{}, make_shape(g.m, g.n, 1));
    typename Adapter::Arguments args{
        cutlass::gemm::GemmUniversalMode::kGemm, {g.m, g.n, g.k, 1}, mainloop(g), epilogue, {}, {}};
    args.hw_info.sm_count = device.multiprocessors();
    const auto bytes = static_cast<int64_t>(Adapter::get_workspace_size(args));
    std::optional<Tensor> workspace;
    if (bytes > 0) workspace = empty(allocator, {bytes}, ScalarType::Byte);
    Adapter adapter;
    check(adapter.can_implement(args));
    check(adapter.run(args, workspace ? workspace->data_ptr() : nullptr, device.stream()));
  }

  static void check(cutlass::Status status) {
    if (status != cutlass::Status::kSuccess) {
      throw std::runtime_error(std::string("fp8serve::scaled_mm: CUTLASS refused the problem: ") +
                               cutlassGetStatusString(status));
    }
  }
};

// Whether the tensor memory accelerator can write this output, and the epilogue read this bias.
template <class Out>
bool fits(const Gemm& g) {
  constexpr int kAlign = 16 / sizeof(Out);
  return g.out_type == kNumber<Out> && g.n % kAlign == 0 && g.k > 0 && aligned(g.a, 16) && aligned(g.b, 16) &&
         aligned(g.out, 16) && (g.bias == nullptr || (g.bias_type == kNumber<Out> && aligned(g.bias, 16)));
}

// Large and small tiles by whether the large ones would fill the device; false for scales nobody multiplies
// here.
template <class Large, class Small, class A, class B, class Out>
bool answer(const Gemm& g, const OnDevice& device, const Tensor& allocator) {
  if (!fits<Out>(g)) return false;
  const auto pick = [&](auto rows) {
    const int64_t tiles =
        ceil_over(g.m, size<0>(typename Large::Tile{})) * ceil_over(g.n, size<1>(typename Large::Tile{}));
    if (tiles >= device.multiprocessors()) {
      Kernel<Large, A, B, Out, rows.value>::run(g, device, allocator);
    } else {
      Kernel<Small, A, B, Out, rows.value>::run(g, device, allocator);
    }
    return true;
  };
  if (!g.a_scale.inside() && !g.b_scale.inside()) return pick(std::integral_constant<int, 0>{});
  if (!g.a_scale.inside() || !g.b_scale.inside() || g.a_scale.shift != 0) return false;
  if (g.b_scale.shift == 7) return pick(std::integral_constant<int, kScaleBlock>{});
  return pick(std::integral_constant<int, 1>{});
}

}  // namespace fp8serve::cutlass_gemm

// Defines gemm_<arch>_<a>_<b>_<out> for the operands this object was compiled for (CMakeLists.txt sets them).
#define FP8SERVE_JOIN(arch, a, b, out) gemm_##arch##_##a##_##b##_##out
#define FP8SERVE_NAME(arch, a, b, out) FP8SERVE_JOIN(arch, a, b, out)
#define FP8SERVE_DEFINE_GEMM(arch, Large, Small)                                             \
  bool fp8serve::FP8SERVE_NAME(arch, FP8SERVE_A, FP8SERVE_B, FP8SERVE_OUT)(                  \
      const Gemm& g, const OnDevice& device, const Tensor& allocator) {                      \
    using namespace fp8serve::cutlass_gemm;                                                  \
    return answer<Large, Small, FP8SERVE_A, FP8SERVE_B, FP8SERVE_OUT>(g, device, allocator); \
  }
