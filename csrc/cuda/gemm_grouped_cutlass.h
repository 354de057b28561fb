// The products of experts as one grouped GEMM of CUTLASS's collective builders: the same tiles and epilogue
// as for a single product, and an array of problems instead of one.
//
// A first launch (`describe`) writes that array on the device, from where each expert ends, so that nothing
// waits for the host. An expert without rows has no tiles; in grouped_wgrad a launch of `fill_idle` fills its
// gradient with zeros.
#pragma once

#include "cuda/gemm_cutlass.h"
#include "cuda/gemm_grouped.h"

namespace fp8serve::cutlass_gemm {

// The arrays that a grouped kernel reads, with an element for each expert, one after the other in one
// allocation.
template <class Types>
struct Problems {
  using Kernel = typename Types::GemmKernel;
  typename Types::Problem::UnderlyingProblemShape* shape;
  const uint8_t **a, **b;
  void** out;
  const float **a_scale, **b_scale;
  const void** bias;
  typename Kernel::InternalStrideA* a_stride;
  typename Kernel::InternalStrideB* b_stride;
  typename Kernel::InternalStrideD* out_stride;
  typename Types::ScaleLayoutA* a_scale_layout;
  typename Types::ScaleLayoutB* b_scale_layout;

  // Places the arrays in `memory` and returns the bytes that they take, which do not depend on `memory` (null
  // if only they are needed).
  int64_t lay_at(unsigned char* memory, int64_t count) {
    int64_t at = 0;
    const auto place = [&](auto*& array) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(memory + at);
      at += ceil_over(count * static_cast<int64_t>(sizeof(*array)), 128) * 128;
    };
    place(shape), place(a), place(b), place(out), place(a_scale), place(b_scale), place(bias),
        place(a_stride);
    place(b_stride), place(out_stride), place(a_scale_layout), place(b_scale_layout);
    return at;
  }
};

constexpr int kDescribing = 128;  // threads of a block of `describe`

// Block scales of grouped_wgrad, packed as [rows, blocks of the expert], expert after expert. CUTLASS's
// grouped kernels for Hopper take no other layout: they derive the layout of scales from the problem and
// ignore layout_SFA and layout_SFB.
struct PackedScales {
  const float *a = nullptr, *b = nullptr;
};

// Packs the scales [rows, blocks] that grouped_wgrad is given; each thread copies one.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    pack_scales(const __grid_constant__ Grouped all, const float* from, float* to, int rows, int blocks) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int row = static_cast<int>(at / blocks), block = static_cast<int>(at % blocks);
  if (row >= rows) return;
  int before = 0;
  for (int expert = 0; expert < all.experts; ++expert) {
    const int own = (max(0, all.end(expert) - all.begin(expert)) + kScaleBlock - 1) / kScaleBlock;
    if (block < before + own) {
      to[static_cast<int64_t>(before) * rows + static_cast<int64_t>(row) * own + block - before] = from[at];
      return;
    }
    before += own;
  }
}

template <class Types>
__global__ void __launch_bounds__(kDescribing)
    describe(const __grid_constant__ Grouped all, const __grid_constant__ Problems<Types> to,
             const __grid_constant__ PackedScales packed) {
  const int expert = static_cast<int>(blockIdx.x * kDescribing + threadIdx.x);
  if (expert >= all.experts) return;
  const Gemm g = all.of(expert);
  to.shape[expert] = make_shape(g.k == 0 ? 0 : g.m, g.n, g.k);
  to.a[expert] = g.a;
  to.b[expert] = g.b;
  to.out[expert] = g.out;
  to.a_scale[expert] = g.a_scale.data;
  to.b_scale[expert] = g.b_scale.data;
  to.bias[expert] = g.bias;
  get<0>(to.a_stride[expert]) = all.stride;
  get<0>(to.b_stride[expert]) = all.stride;
  get<0>(to.out_stride[expert]) = g.n;
  if constexpr (Types::kBlocked) {
    using Scales = typename Types::Scales;
    to.a_scale_layout[expert] = Scales::tile_atom_to_shape_SFA(make_shape(g.m, g.n, g.k, 1));
    to.b_scale_layout[expert] = Scales::tile_atom_to_shape_SFB(make_shape(g.m, g.n, g.k, 1));
    if (packed.a != nullptr && g.k > 0) {  // of(expert) has added the preceding experts' blocks
      to.a_scale[expert] = packed.a + (g.a_scale.data - all.all.a_scale.data) * g.m;
      to.b_scale[expert] = packed.b + (g.b_scale.data - all.all.b_scale.data) * g.n;
    }
  }
}

// Writes zeros to the outputs of experts without columns, 16 bytes per thread.
template <int kBytes>  // of an element
__global__ void __launch_bounds__(256) fill_idle(const __grid_constant__ Grouped all) {
  const Gemm g = all.of(static_cast<int>(blockIdx.y));
  const int64_t at = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (g.k == 0 && at < static_cast<int64_t>(g.m) * g.n * kBytes / 16)
    static_cast<uint4*>(g.out)[at] = {0, 0, 0, 0};
}

template <class Config, class A, class B, class Out, int kScaleRowsB>
struct GroupedKernel : Types<Config, A, B, Out, kScaleRowsB, true> {
  using Types = Types<Config, A, B, Out, kScaleRowsB, true>;
  using typename Types::Adapter, typename Types::Fusion, typename Types::GemmKernel;
  using Arrays = Problems<Types>;

  static typename GemmKernel::MainloopArguments mainloop(const Gemm& g, const Arrays& arrays) {
    typename GemmKernel::MainloopArguments args{};
    args.ptr_A = reinterpret_cast<decltype(args.ptr_A)>(arrays.a);
    args.ptr_B = reinterpret_cast<decltype(args.ptr_B)>(arrays.b);
    args.dA = arrays.a_stride;
    args.dB = arrays.b_stride;
    name_formats<A>(g, args);
    if constexpr (Types::kBlocked) {
      args.ptr_SFA = arrays.a_scale;
      args.ptr_SFB = arrays.b_scale;
      args.layout_SFA = arrays.a_scale_layout;
      args.layout_SFB = arrays.b_scale_layout;
    }
    return args;
  }

  // Returns false if CUTLASS or the driver refuses the problem (launch_unless_refused).
  static bool run(const Grouped& g, const OnDevice& device, const Tensor& allocator) {
    Arrays arrays{};
    const Tensor memory = empty(allocator, {arrays.lay_at(nullptr, g.experts)}, ScalarType::Byte);
    arrays.lay_at(data<unsigned char>(memory), g.experts);
    typename GemmKernel::EpilogueArguments epilogue{};
    using Bias = typename Fusion::BiasType;
    epilogue.thread =
        Fusion::arguments(g.all, arrays.a_scale, arrays.b_scale,
                          g.all.bias == nullptr ? nullptr : reinterpret_cast<const Bias**>(arrays.bias));
    epilogue.ptr_D = reinterpret_cast<Out**>(arrays.out);
    epilogue.dD = arrays.out_stride;
    typename Adapter::Arguments args{cutlass::gemm::GemmUniversalMode::kGrouped,
                                     {g.experts, arrays.shape, nullptr},
                                     mainloop(g.all, arrays),
                                     epilogue,
                                     {},
                                     {}};
    args.hw_info.sm_count = device.multiprocessors();
    std::optional<Tensor> scales;
    PackedScales packed;
    if constexpr (Types::kBlocked) {
      if (g.along_k) scales = packed_scales(g, device, allocator, packed);
    }
    launch(describe<Types>, static_cast<unsigned>(ceil_over(g.experts, kDescribing)), kDescribing, 0,
           device.stream(), g, arrays, packed);
    if (g.along_k) fill_zeros(g, device);
    return launch_unless_refused<Adapter>(args, device, allocator);
  }

  // Packs both operands' scales. Returns their memory and sets `packed` to point into it.
  static Tensor packed_scales(const Grouped& g, const OnDevice& device, const Tensor& allocator,
                              PackedScales& packed) {
    const auto pack = [&](const Scale& scale, int rows, float* to) {
      const int64_t count = static_cast<int64_t>(rows) * scale.blocks;
      launch(pack_scales<256>, static_cast<unsigned>(ceil_over(count, 256)), 256, 0, device.stream(), g,
             scale.data, to, rows, scale.blocks);
      return count;
    };
    const int64_t all = static_cast<int64_t>(g.all.m) * g.all.a_scale.blocks +
                        static_cast<int64_t>(g.all.n) * g.all.b_scale.blocks;
    const Tensor memory = empty(allocator, {all}, ScalarType::Float);
    packed.a = data<float>(memory);
    packed.b = packed.a + pack(g.all.a_scale, g.all.m, data<float>(memory));
    pack(g.all.b_scale, g.all.n, data<float>(memory) + (packed.b - packed.a));
    return memory;
  }

  static void fill_zeros(const Grouped& g, const OnDevice& device) {
    const int64_t pieces = static_cast<int64_t>(g.all.m) * g.all.n * sizeof(Out) / 16;
    const dim3 grid(static_cast<unsigned>(ceil_over(pieces, 256)), static_cast<unsigned>(g.experts));
    launch(fill_idle<sizeof(Out)>, grid, 256, 0, device.stream(), g);
  }
};

// Runs one of the two tiles compiled for these types: `Few` if an expert's output has at most 64 rows (on
// average), else `Many`. Returns false if the kernels do not take the problem.
template <class A, class B, class Out, int kScaleRowsB, class Few, class Many = Few>
bool answer_grouped(const Grouped& g, const OnDevice& device, const Tensor& allocator) {
  if (!fits<A, B, Out>(g.all)) return false;
  const bool few = (g.along_k ? g.all.m : g.total / g.experts) <= 64;
  return few ? GroupedKernel<Few, A, B, Out, kScaleRowsB>::run(g, device, allocator)
             : GroupedKernel<Many, A, B, Out, kScaleRowsB>::run(g, device, allocator);
}

}  // namespace fp8serve::cutlass_gemm
