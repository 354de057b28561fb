// A GEMM of CUTLASS's collective builders with our epilogue, for sm_90, sm_100 and sm_120.
//
// The epilogue works on FP32 sums, in the order of fp8/ops/gemm.py: (sum * a_scale) * b_scale + bias, rounded
// once. For FP8 output it then takes the amax, multiplies by the output's scale and casts. Whether a scale is
// a number or a vector is decided at run time (its stride is false or true), so one kernel serves tensor and
// row scales. Block scales apply in the main loop, 128 of K at a time; the kernels for them take a scale of a
// per 1x128 and of b per 128x128 or 1x128, as in the block recipe.
//
// gemm_sm90.cu, gemm_sm100.cu and gemm_sm120.cu define tiles, clusters and schedules, and list the
// combinations that are compiled. Compile time limits their number: a kernel takes about 5 seconds, and a
// file with any kernel about 25. Each of the three files is therefore compiled only twice: once for tensor
// and row scales (FP8SERVE_OUTSIDE) and once for block scales.
#pragma once

#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>

#include <cute/tensor.hpp>
#include <cutlass/detail/blockwise_scale_layout.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/fusion/operations.hpp>
#include <cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/util/packed_stride.hpp>

#include "cuda/chips.h"
#include "cuda/descriptor.h"
#include "cuda/gemm.h"

namespace fp8serve::cutlass_gemm {

using namespace cute;  // NOLINT: shapes are spelled Shape<_128, _128, _128> everywhere in this field
namespace fusion = cutlass::epilogue::fusion;

using e4m3 = cutlass::float_e4m3_t;
using e5m2 = cutlass::float_e5m2_t;
using either =
    cutlass::type_erased_dynamic_float8_t;  // sm_100: the instruction's descriptor holds the format
using bf16 = cutlass::bfloat16_t;
using fp32 = float;

// The root of the epilogue's tree for FP8 output: takes the amax of its input, multiplies the input by the
// output's scale and casts it to FP8.
struct ToFp8 {
  struct SharedStorage {};
  struct Arguments {
    const float* scale = nullptr;
    float* amax = nullptr;
  };
  using Params = Arguments;

  template <class Problem>
  static constexpr Params to_underlying_arguments(const Problem&, const Arguments& args, void*) {
    return args;
  }
  template <class Problem>
  static bool can_implement(const Problem&, const Arguments&) {
    return true;
  }
  template <class Problem>
  static size_t get_workspace_size(const Problem&, const Arguments&) {
    return 0;
  }
  template <class Problem>
  static cutlass::Status initialize_workspace(const Problem&, const Arguments&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }
  CUTLASS_DEVICE bool is_producer_load_needed() const { return false; }
  CUTLASS_DEVICE bool is_C_load_needed() const { return false; }
  CUTLASS_HOST_DEVICE ToFp8() {}
  CUTLASS_HOST_DEVICE ToFp8(const Params& arguments, const SharedStorage&) : params(arguments) {}
  Params params;

  template <class... Args>
  CUTLASS_DEVICE auto get_producer_load_callbacks(const fusion::ProducerLoadArgs<Args...>&) {
    return fusion::EmptyProducerLoadCallbacks{};
  }

  template <class Coordinates, class Residue>
  struct Callbacks : fusion::EmptyConsumerStoreCallbacks {
    CUTLASS_DEVICE Callbacks(Coordinates at, Residue edge, const Params& arguments)
        : coordinates(at), residue(edge), params(arguments), scale(*arguments.scale) {}
    Coordinates coordinates;  // of this thread's values in the tile
    Residue residue;          // how much of the tile is inside the matrix
    const Params& params;
    float scale, seen = 0.0f;

    template <class Sum, int kCount>
    CUTLASS_DEVICE cutlass::Array<e4m3, kCount> visit(const cutlass::Array<Sum, kCount>&, int part, int epi_m,
                                                      int epi_n,
                                                      const cutlass::Array<float, kCount>& values) {
      const auto at = coordinates(_, _, _, epi_m, epi_n);
      cutlass::Array<float, kCount> scaled;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        if (elem_less(at(part * kCount + i), residue)) seen = fmaxf(seen, fabsf(values[i]));
        scaled[i] = values[i] * scale;
      }
      return cutlass::NumericArrayConverter<e4m3, float, kCount>{}(scaled);
    }

    CUTLASS_DEVICE void end() {  // CUTLASS calls it at the end of a tile
      seen = lanes_max<32>(seen);
      if (threadIdx.x % 32 == 0) atomic_max_float(params.amax, seen);
      seen = 0.0f;
    }
  };

  template <bool, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(const fusion::ConsumerStoreArgs<Args...>& args) {
    return Callbacks<decltype(args.tCcD), decltype(args.residue_tCcD)>(args.tCcD, args.residue_tCcD, params);
  }
};

// (sum * a_scale) * b_scale, element by element; the three arguments are leaves of the tree.
template <class Values>
struct ScaledBy {
  CUTLASS_HOST_DEVICE Values operator()(const Values& sum, const Values& a, const Values& b) const {
    Values out;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Values::kElements; ++i) out[i] = scaled_by(sum[i], a[i], b[i]);
    return out;
  }
};

// The type of a pointer, stride or layout argument: T for a single product. For products of experts it is T*,
// an array with one T for each expert.
template <class T, bool kGrouped>
using Each = std::conditional_t<kGrouped, T*, T>;

// `kSwapped`: the operands are exchanged, so that the kernel's rows are the columns of the output.
template <class CtaTile, class Out, bool kGrouped = false, bool kSwapped = false>
struct Epilogue {
  static constexpr bool kFp8 = std::is_same_v<Out, e4m3>;
  using BiasType = std::conditional_t<kFp8, bf16, Out>;
  static constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;
  template <class T>
  using Pointer = Each<const T*, kGrouped>;
  // `Along` broadcasts one scale per row of the kernel's tile, `Across` one per column. The scales of an
  // expert's rows may begin at any element, so a grouped kernel loads them one at a time instead of four.
  using Along = fusion::Sm90ColBroadcast<0, CtaTile, Each<float, kGrouped>, float, Stride<bool, _0, _0>,
                                         kGrouped ? 1 : 4>;
  using Across = fusion::Sm90RowBroadcast<0, CtaTile, Each<float, kGrouped>, float, Stride<_0, bool, _0>>;
  using ByRow = std::conditional_t<kSwapped, Across, Along>;
  using ByColumn = std::conditional_t<kSwapped, Along, Across>;
  using Bias = std::conditional_t<kSwapped, fusion::Sm90ColBroadcast<0, CtaTile, BiasType, float>,
                                  fusion::Sm90RowBroadcast<0, CtaTile, Each<BiasType, kGrouped>, float>>;
  using Times = fusion::Sm90Compute<ScaledBy, float, float, kRound>;
  using Plus = fusion::Sm90Compute<cutlass::plus, std::conditional_t<kFp8, float, Out>, float, kRound>;
  using Scaled = fusion::Sm90EVT<Times, fusion::Sm90AccFetch, ByRow, ByColumn>;
  using Value = fusion::Sm90EVT<Plus, Bias, Scaled>;
  using Fp8Value = fusion::Sm90EVT<ToFp8, Value>;
  using Tree = std::conditional_t<kFp8, Fp8Value, Value>;

  // Returns the stride with which a leaf reads its scales: 1 in its direction for a vector, 0 for a number.
  template <class Leaf>
  static auto along(bool is_vector) {
    if constexpr (std::is_same_v<Leaf, Along>) {
      return Stride<bool, _0, _0>{is_vector, _0{}, _0{}};
    } else {
      return Stride<_0, bool, _0>{_0{}, is_vector, _0{}};
    }
  }

  static typename Tree::Arguments arguments(const Gemm& g) {
    return arguments(g, g.a_scale.data, g.b_scale.data, static_cast<const BiasType*>(g.bias));
  }

  static typename Tree::Arguments arguments(const Gemm& g, Pointer<float> a_scale, Pointer<float> b_scale,
                                            Pointer<BiasType> bias) {
    const bool by_row = !g.a_scale.one(), by_column = !g.b_scale.one();
    if (g.a_scale.inside()) a_scale = nullptr;
    if (g.b_scale.inside()) b_scale = nullptr;
    const typename Value::Arguments value{
        {bias, BiasType(0), {}},
        {{}, {a_scale, 1.0f, along<ByRow>(by_row)}, {b_scale, 1.0f, along<ByColumn>(by_column)}, {}},
        {}};
    if constexpr (kFp8) {
      return {value, {g.out_scale, g.amax}};
    } else {
      return value;
    }
  }
};

template <class Type>
inline constexpr Number kNumber = std::is_same_v<Type, float> ? Number::fp32 : Number::bf16;

template <class Config, bool kGrouped>
struct Schedules {
  using Main = typename Config::Schedule;
  using Block = typename Config::BlockSchedule;
  using Epilogue = typename Config::EpilogueSchedule;
};
template <class Config>
struct Schedules<Config, true> {
  using Main = typename Config::GroupedSchedule;
  using Block = typename Config::GroupedBlockSchedule;
  using Epilogue = typename Config::GroupedEpilogueSchedule;
};

template <class Config>
inline constexpr bool is_swapped = requires { Config::kSwapped; };

// The tile scheduler: CUTLASS's default (void) unless the configuration has a type `Scheduler`.
template <class Config>
struct SchedulerOf {
  using type = void;
};
template <class Config>
  requires requires { typename Config::Scheduler; }
struct SchedulerOf<Config> {
  using type = typename Config::Scheduler;
};

// The types of a kernel. kScaleRowsB: 0 for scales outside the sum; else a is scaled per 1x128 and b per
// kScaleRowsB x 128.
template <class Config, class A, class B, class Out, int kScaleRowsB, bool kGrouped>
struct Types {
  using Scales = cutlass::detail::Sm1xxBlockwiseScaleConfig<1, kScaleRowsB == 0 ? 1 : kScaleRowsB,
                                                            kScaleBlock, UMMA::Major::K, UMMA::Major::K>;
  using ScaleLayoutA = decltype(Scales::deduce_layoutSFA());
  using ScaleLayoutB = decltype(Scales::deduce_layoutSFB());
  using RowMajor = Each<cutlass::layout::RowMajor, kGrouped>;
  using ColumnMajor = Each<cutlass::layout::ColumnMajor, kGrouped>;
  static constexpr bool kBlocked = kScaleRowsB != 0;
  static constexpr int kAlign = 16 / sizeof(Out);  // alignment of the output's rows, in elements
  static constexpr bool kSwapped = is_swapped<Config>;
  using OutLayout = std::conditional_t<kSwapped, cutlass::layout::ColumnMajor, RowMajor>;

  using Schedule = Schedules<Config, kGrouped>;
  using Fusion = Epilogue<typename Config::CtaTile, Out, kGrouped, kSwapped>;
  using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      typename Config::Arch, cutlass::arch::OpClassTensorOp, typename Config::Tile, typename Config::Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, OutLayout, kAlign, Out, OutLayout,
      kAlign, typename Schedule::Epilogue, typename Fusion::Tree>::CollectiveOp;
  using CollectiveMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      typename Config::Arch, cutlass::arch::OpClassTensorOp, A,
      std::conditional_t<kBlocked, cute::tuple<RowMajor, Each<ScaleLayoutA, kGrouped>>, RowMajor>, 16, B,
      std::conditional_t<kBlocked, cute::tuple<ColumnMajor, Each<ScaleLayoutB, kGrouped>>, ColumnMajor>, 16,
      float, typename Config::Tile, typename Config::Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename CollectiveEpilogue::SharedStorage))>,
      std::conditional_t<kBlocked, typename Schedule::Block, typename Schedule::Main>>::CollectiveOp;
  using Problem = std::conditional_t<kGrouped, cutlass::gemm::GroupProblemShape<Shape<int, int, int>>,
                                     Shape<int, int, int, int>>;
  using GemmKernel = cutlass::gemm::kernel::GemmUniversal<Problem, CollectiveMainloop, CollectiveEpilogue,
                                                          typename SchedulerOf<Config>::type>;
  using Adapter = cutlass::gemm::device::GemmUniversalAdapter<GemmKernel>;
  static_assert(GemmKernel::SharedStorageSize <= shared_bytes_of(Config::Arch::kMinComputeCapability));
};

inline void check(cutlass::Status status) {
  if (status != cutlass::Status::kSuccess) {
    throw std::runtime_error(std::string("fp8serve: CUTLASS failed: ") + cutlassGetStatusString(status));
  }
}

// Sets the operands' formats if the instruction's descriptor holds them (sm_100).
template <class A, class Arguments>
void name_formats(const Gemm& g, Arguments& args) {
  if constexpr (std::is_same_v<A, either>) {
    args.runtime_data_type_a = g.a_e5m2 ? UMMA::MXF8F6F4Format::E5M2 : UMMA::MXF8F6F4Format::E4M3;
    args.runtime_data_type_b = g.b_e5m2 ? UMMA::MXF8F6F4Format::E5M2 : UMMA::MXF8F6F4Format::E4M3;
  }
}

// Launches the kernel and returns true. Returns false without a launch if CUTLASS refuses the problem or the
// driver failed to encode a TMA descriptor. `amax`: null, or [] in FP32, which is set to zero before the
// launch because the kernel raises it to the amax of the output.
template <class Adapter>
bool launch_unless_refused(const typename Adapter::Arguments& args, const OnDevice& device,
                           const Tensor& allocator, float* amax = nullptr) {
  if (Adapter::can_implement(args) != cutlass::Status::kSuccess) return false;
  const auto bytes = static_cast<int64_t>(Adapter::get_workspace_size(args));
  std::optional<Tensor> workspace;
  if (bytes > 0) workspace = empty(allocator, {bytes}, ScalarType::Byte);
  Adapter adapter;
  check(adapter.initialize(args, workspace ? workspace->data_ptr() : nullptr, device.stream()));
  const auto& p = adapter.params();
  if (!is_encoded(*p.mainloop.tma_load_a.get_tma_descriptor()) ||
      !is_encoded(*p.mainloop.tma_load_b.get_tma_descriptor()) ||
      !is_encoded(*p.epilogue.tma_store_d.get_tma_descriptor()))
    return false;
  if (amax != nullptr) set_zero(amax, sizeof(float), device.stream());
  check(adapter.run(device.stream()));
  return true;
}

template <class Config, class A, class B, class Out, int kScaleRowsB>
struct Kernel : Types<Config, A, B, Out, kScaleRowsB, false> {
  using Types = Types<Config, A, B, Out, kScaleRowsB, false>;
  using typename Types::Adapter, typename Types::Fusion, typename Types::GemmKernel, typename Types::Scales;

  // Rows and columns of the kernel's output, which is the transpose of ours if kSwapped.
  static int rows(const Gemm& g) { return Types::kSwapped ? g.n : g.m; }
  static int columns(const Gemm& g) { return Types::kSwapped ? g.m : g.n; }

  static typename GemmKernel::MainloopArguments mainloop(const Gemm& g) {
    typename GemmKernel::MainloopArguments args{};
    args.ptr_A = reinterpret_cast<decltype(args.ptr_A)>(Types::kSwapped ? g.b : g.a);
    args.ptr_B = reinterpret_cast<decltype(args.ptr_B)>(Types::kSwapped ? g.a : g.b);
    args.dA = cutlass::make_cute_packed_stride(typename GemmKernel::StrideA{}, make_shape(rows(g), g.k, 1));
    args.dB =
        cutlass::make_cute_packed_stride(typename GemmKernel::StrideB{}, make_shape(columns(g), g.k, 1));
    name_formats<A>(g, args);
    if constexpr (Types::kBlocked) {
      args.ptr_SFA = g.a_scale.data;
      args.ptr_SFB = g.b_scale.data;
      args.layout_SFA = Scales::tile_atom_to_shape_SFA(make_shape(g.m, g.n, g.k, 1));
      args.layout_SFB = Scales::tile_atom_to_shape_SFB(make_shape(g.m, g.n, g.k, 1));
    }
    return args;
  }

  // Returns false without a launch if CUTLASS or the driver refuses the problem (launch_unless_refused).
  static bool run(const Gemm& g, int swizzle, const OnDevice& device, const Tensor& allocator) {
    typename GemmKernel::EpilogueArguments epilogue{};
    epilogue.thread = Fusion::arguments(g);
    epilogue.ptr_D = static_cast<Out*>(g.out);
    epilogue.dD =
        cutlass::make_cute_packed_stride(typename GemmKernel::StrideD{}, make_shape(rows(g), columns(g), 1));
    typename Adapter::Arguments args{cutlass::gemm::GemmUniversalMode::kGemm,
                                     {rows(g), columns(g), g.k, 1},
                                     mainloop(g),
                                     epilogue,
                                     {},
                                     {}};
    args.hw_info.sm_count = device.multiprocessors();
    args.scheduler.max_swizzle_size = swizzle;
    return launch_unless_refused<Adapter>(args, device, allocator, g.amax);
  }
};

template <class A>
bool reads(bool is_e5m2) {
  return std::is_same_v<A, either> || std::is_same_v<A, e5m2> == is_e5m2;
}

// Returns whether the formats and types are those of this kernel, and operands, output and bias are aligned
// for TMA and for the epilogue's loads.
template <class A, class B, class Out>
bool fits(const Gemm& g) {
  using Bias = typename Epilogue<void, Out>::BiasType;
  constexpr int kAlign = 16 / sizeof(Out);
  const bool to_fp8 = g.out_scale != nullptr;
  const bool typed =
      std::is_same_v<Out, e4m3> ? to_fp8 && !g.out_e5m2 : !to_fp8 && g.out_type == kNumber<Out>;
  return typed && reads<A>(g.a_e5m2) && reads<B>(g.b_e5m2) && g.n % kAlign == 0 && g.k > 0 &&
         aligned(g.a, 16) && aligned(g.b, 16) && aligned(g.out, 16) &&
         (g.bias == nullptr || (g.bias_type == kNumber<Bias> && aligned(g.bias, 16)));
}

inline bool scaled_outside(const Gemm& g) { return !g.a_scale.inside() && !g.b_scale.inside(); }
inline bool scaled_inside(const Gemm& g, int rows_b) {
  return g.a_scale.inside() && g.a_scale.shift == 0 && g.b_scale.inside() &&
         g.b_scale.shift == (rows_b == 128 ? 7 : 0);
}

// Runs the chosen tile. Returns false if it is not compiled for these types, or does not take the problem.
template <class A, class B, class Out, int kScaleRowsB, class... Configs>
bool answer(const Gemm& g, TileChoice choice, const OnDevice& device, const Tensor& allocator) {
  if (!fits<A, B, Out>(g)) return false;
  const auto run = [&]<class Config>() {
    if (Config::kTile != choice.tile) return false;
    return Kernel<Config, A, B, Out, kScaleRowsB>::run(g, choice.swizzle, device, allocator);
  };
  return (run.template operator()<Configs>() || ...);
}

}  // namespace fp8serve::cutlass_gemm
