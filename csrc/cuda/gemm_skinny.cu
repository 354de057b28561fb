// Decoding: E4M3 activations of 1..64 rows times E4M3 weights. Bound by reading the weights once.
//
// The weights are the 16-row operand of mma.m16n8k32 and the activations its 8-column one, so 8 rows of
// activations cost as much as 1. The order of K inside an mma is free as long as both operands agree, so a
// lane takes 16 neighbouring bytes of its weight row as the operands of two mma's, with the same 16 bytes of
// its activation row. It prefetches them two blocks of K ahead. 8 warps of a block share
// 16 weight rows; each takes every eighth block of 128 of K. If a matrix has few rows, a block has two such
// teams of warps, which share K, so that a multiprocessor still has enough to read. The sums are added in a
// fixed order, which depends only on the weight's shape and the chip: a row's result is the same, bit for
// bit, whichever rows are computed with it. The same launch applies scales, bias and residual. Activations in
// BF16 can be cast as they are loaded. Every block then casts all of them, which takes less time than a
// launch; the first block counts them.
//
// A block prefetches its first weights before the preceding kernels have ended. Stored weights (`g.stored`),
// which the preceding kernel does not write, are copied to shared memory. Other weights are only fetched into
// the second-level cache.
//
// One launch also computes silu(gate) * up of an MLP: a block takes 16 rows of the gate's weights and then
// the same 16 of up's, as one stream of blocks of K, and casts the result.
//
// In a product of experts the grid has blocks for every row. A block computes up to 16 rows of one expert if
// its own row is the first of these, and returns if it is not.
#include "cuda/gemm_grouped.h"
#include "cuda/skinny_order.h"

namespace fp8serve {
namespace {

constexpr int kThreads = 32 * kWarps, kMostTeams = 2;
static_assert(kWarps == kReportingWarps);  // the first team reports
constexpr int kGroupsOfExpert = 2, kRowsOfExpert = 8 * kGroupsOfExpert;

// Fetches the block's first weights, a line a thread, into the second-level cache.
__device__ __forceinline__ void prefetch_weights_to_l2(const Gemm& g) {
  const int line = static_cast<int>(threadIdx.x), row = static_cast<int>(blockIdx.x) * kRows + line % kRows;
  const int at = line / kRows * kLine;
  if (at < g.k) prefetch_to_l2(g.b + static_cast<int64_t>(min(row, g.n - 1)) * g.k + at);
}

// FP8 activations, read as they are stored: sixteen values are one piece of 16 bytes.
struct RawActivations {
  static constexpr int kPieces = 1, kMostAhead = 2;  // kMostAhead: groups of eight tokens prefetched
  __device__ __forceinline__ const uint8_t* row(const Gemm& g, int token) const {
    return g.a + static_cast<int64_t>(token) * g.k;
  }
  __device__ __forceinline__ uint4 values(const uint4 (&raw)[1], int) { return raw[0]; }
  __device__ __forceinline__ void report_counts() const {}
};

// BF16 activations, cast as they are loaded: sixteen values are two pieces of 16 bytes.
class CastActivations {
 public:
  static constexpr int kPieces = 2, kMostAhead = 1;
  __device__ CastActivations(const Gemm& g, const ToCast& from)
      : from_(from), scale_(*from.scale), num_counted_rows_(from.out.counted_rows(g.m)) {}
  __device__ __forceinline__ const uint8_t* row(const Gemm& g, int token) const {
    return reinterpret_cast<const uint8_t*>(from_.x + static_cast<int64_t>(token) * g.k);
  }
  __device__ __forceinline__ uint4 values(const uint4 (&raw)[2], int token) {
    const Chunk low = unpack(Raw<BF16>{{raw[0]}}), high = unpack(Raw<BF16>{{raw[1]}});
    if (blockIdx.x == 0 && token < num_counted_rows_) count(low, high);
    const uint2 first = encode_chunk<E4M3>(low, scale_), second = encode_chunk<E4M3>(high, scale_);
    return {first.x, first.y, second.x, second.y};
  }
  // Whole warps call this, once.
  __device__ __forceinline__ void report_counts() const {
    if (blockIdx.x != 0) return;
    const float seen = lanes_max<32>(amax_);
    if (threadIdx.x % 32 == 0) atomic_max_float(from_.out.amax, seen);
    if (is_cut_off<E4M3>(seen * scale_)) add_cut_off(from_.out, num_cut_off_);
  }

 private:
  __device__ __forceinline__ void count(const Chunk& low, const Chunk& high) {
    const float most = amax_of(high, amax_of(low, 0.0f));
    amax_ = fmaxf(amax_, most);
    if (is_cut_off<E4M3>(most * scale_)) {
      num_cut_off_ += cut_off<E4M3>(low, scale_) + cut_off<E4M3>(high, scale_);
    }
  }
  const ToCast& from_;
  float scale_, amax_ = 0.0f;
  int64_t num_counted_rows_;
  unsigned num_cut_off_ = 0;
};

// Copies a warp's weights and activations of a block of K to shared memory, kAhead blocks before they are
// multiplied. A copy needs no registers and runs while other blocks are multiplied. Whole lines are copied,
// because half a line costs the second-level cache as much. Only the warp itself reads what it has copied.
// The activations of many tokens are not copied, but read from the caches when they are multiplied.
//
// A step is a block of K. If kParts is 2 (gate and up), the steps of the first half of the weights' rows are
// followed by the steps of the second half, which begins at row g.n / 2.
template <int kGroups, class From, int kParts = 1>
class Prefetcher {
 public:
  static constexpr int kAhead = 2;
  static constexpr bool kActivations = kGroups <= From::kMostAhead;
  static constexpr int kBytes =
      kAhead * (kRows + (kActivations ? 8 * kGroups * From::kPieces : 0)) * kLine;  // of a warp

  __device__ explicit Prefetcher(const Gemm& g)
      : g_(g),
        n0_(static_cast<int>(blockIdx.x) * kRows),
        lane_(static_cast<int>(threadIdx.x) % 32),
        memory_(dynamic_shared() + static_cast<int>(threadIdx.x) / 32 * kBytes) {}

  // Returns the number of steps of all warps for one part. Of two parts every warp has the same number of
  // steps, some of which may be past the end of K.
  __device__ __forceinline__ int steps() const {
    const int blocks = (g_.k + kScaleBlock - 1) / kScaleBlock, warps = static_cast<int>(blockDim.x) / 32;
    return kParts == 1 ? blocks : (blocks + warps - 1) / warps * warps;
  }
  // Before after_earlier_kernels(): copies the first weights if they are stored, else fetches their lines.
  __device__ __forceinline__ void prefetch_early() {
    g_.stored ? prefetch_first_weights() : prefetch_weights_to_l2(g_);
  }
  // Starts to copy the first kAhead blocks of K, except for what prefetch_early() has copied.
  __device__ __forceinline__ void prefetch_first(const From& from) {
    if (!g_.stored) prefetch_first_weights();
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      prefetch_activations(from, first_step(i));
      copy_commit();
      turn_ ^= 1;
    }
  }
  // Starts to copy the block of K of a step; copies nothing for a step past the last one.
  __device__ __forceinline__ void prefetch(const From& from, int step) {
    __syncwarp();  // all lanes have read what lay there
    prefetch_weights(step);
    prefetch_activations(from, step);
    copy_commit();
    turn_ ^= 1;
  }
  // Waits for the oldest copy.
  __device__ __forceinline__ void wait() {
    copy_wait<kAhead - 1>();
    __syncwarp();
  }

  // Return the lane's sixteen values in one half of the block of K: of the weights' row lane / 4 + 8 * eight,
  // and of token 8 * group + lane / 4.
  __device__ __forceinline__ uint4 weights(int half, int eight) const {
    return *reinterpret_cast<const uint4*>(weight(lane_ / 4 + 8 * eight, half * 4 + lane_ % 4));
  }
  __device__ __forceinline__ uint4 activations(From& from, int group, int half, int block) const {
    const int token = group * 8 + lane_ / 4, first = half * 4 + lane_ % 4;
    const int k = block * kScaleBlock + first * 16;
    uint4 raw[From::kPieces] = {};
#pragma unroll
    for (int p = 0; p < From::kPieces; ++p) {
      if constexpr (kActivations) {
        raw[p] = *reinterpret_cast<const uint4*>(activation(token, first * From::kPieces + p));
      } else if (token < g_.m && k < g_.k) {
        raw[p] = reinterpret_cast<const uint4*>(from.row(g_, token))[k / 16 * From::kPieces + p];
      }
    }
    return from.values(raw, token);
  }

 private:
  __device__ __forceinline__ int part_of(int step) const { return kParts > 1 && step >= steps() ? 1 : 0; }
  // Returns where the step's block of K begins; at least g_.k if the step has none.
  __device__ __forceinline__ int begin_of(int step) const {
    return (step - part_of(step) * steps()) * kScaleBlock;
  }
  // Returns the warp's i-th step.
  __device__ __forceinline__ int first_step(int i) const {
    return static_cast<int>(threadIdx.x + i * blockDim.x) / 32;
  }
  __device__ __forceinline__ void prefetch_first_weights() {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      prefetch_weights(first_step(i));
      turn_ ^= 1;
    }
  }
  __device__ __forceinline__ void prefetch_weights(int step) {
    const int k = begin_of(step), first = n0_ + part_of(step) * (g_.n / 2);
    if (k >= g_.k) return;
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      const int row = lane_ / 8 + 4 * i, at = k + lane_ % 8 * 16;
      const uint8_t* source = g_.b + static_cast<int64_t>(min(first + row, g_.n - 1)) * g_.k;
      copy_async(weight(row, lane_ % 8), source + at, at < g_.k);
    }
  }
  __device__ __forceinline__ void prefetch_activations(const From& from, int step) {
    const int k = begin_of(step);
    if (!kActivations || k >= g_.k) return;
    constexpr int kEach = 8 * From::kPieces;  // pieces of a token
#pragma unroll
    for (int i = 0; i < 8 * kGroups * kEach / 32; ++i) {
      const int token = (lane_ + 32 * i) / kEach, piece = (lane_ + 32 * i) % kEach;
      const bool valid = token < g_.m && k + piece / From::kPieces * 16 < g_.k;
      const uint8_t* source = from.row(g_, valid ? token : 0) + (k / 16 * From::kPieces + piece) * 16;
      copy_async(activation(token, piece), valid ? source : g_.b, valid);
    }
  }
  // Return the address of a piece of 16 bytes. In every other row the two halves of the line are exchanged,
  // for BF16 activations the two pieces of each pair, so that lanes that read eight rows at once use
  // different banks.
  __device__ __forceinline__ unsigned char* weight(int row, int piece) const {
    return slot() + row * kLine + (piece ^ row % 2 * 4) * 16;
  }
  __device__ __forceinline__ unsigned char* activation(int token, int piece) const {
    const int other = From::kPieces == 1 ? 4 : 1;
    return slot() + (kRows + token * From::kPieces) * kLine + (piece ^ token % 2 * other) * 16;
  }
  __device__ __forceinline__ unsigned char* slot() const { return memory_ + turn_ * (kBytes / kAhead); }

  const Gemm& g_;
  int n0_, lane_;
  int turn_ = 0;  // which of kAhead buffers is multiplied next, and then overwritten by the next copy
  unsigned char* memory_;
};

// The operands of the epilogue are loaded before the sum begins, because after it the kernel would have to
// wait for them. For many tokens they would occupy too many registers during the sum, and are loaded after
// it.
template <int kGroups>
constexpr bool kLoadsEpilogueFirst = kGroups <= 2;

// Returns the problem of an expert's rows from `row` on, at most kRowsOfExpert.
__device__ __forceinline__ Gemm from_row(Gemm g, int row) {
  g.m = min(g.m - row, kRowsOfExpert);
  g.a += static_cast<int64_t>(row) * g.k;
  g.out =
      static_cast<uint8_t*>(g.out) + static_cast<int64_t>(row) * g.n * (g.out_type == Number::fp32 ? 4 : 2);
  g.a_scale = g.a_scale.from(row);
  return g;
}

// Sums: the sums of a team's warps, in shared memory. PerThread: values of a thread of the first team, one
// for each of its elements of the block's result, which are kThreads apart.
template <int kGroups>  // tokens in eights
using Sums = float[kWarps][8 * kGroups][kRows];
template <int kGroups, class T = float>
using PerThread = T[(kGroups + 1) / 2];

// Calls f(index in PerThread, token, column in the block) for the thread's elements.
template <int kGroups, class F>
__device__ __forceinline__ void for_own_elements(const F& f) {
#pragma unroll
  for (int t = 0; t < (kGroups + 1) / 2; ++t) {
    const int i = static_cast<int>(threadIdx.x) + t * kThreads;
    if (i < 8 * kGroups * kRows) f(t, i / kRows, i % kRows);
  }
}

template <int kGroups>
__device__ __forceinline__ void add_team(PerThread<kGroups>& own_sums, const Sums<kGroups>& sums) {
  for_own_elements<kGroups>([&](int t, int token, int column) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += sums[w][token][column];
    own_sums[t] += sum;
  });
}

// Calls f(index in PerThread, token, column of the output) for those of them that are inside the output.
template <int kGroups, class F>
__device__ __forceinline__ void for_own_elements_inside(const Gemm& g, int n0, const F& f) {
  for_own_elements<kGroups>([&](int t, int token, int of) {
    if (token < g.m && n0 + of < g.n) f(t, token, n0 + of);
  });
}

// The two endings of a kernel. The threads of the first team call finish() with the block's sums of each
// part. This one stores them.
struct StoreEnding {
  template <int kGroups>
  __device__ __forceinline__ void finish(const Gemm& g, const PerThread<kGroups> (&own_sums)[1],
                                         const PerThread<kGroups, EpilogueOperands> (&end)[1], int n0) const {
    float seen = 0.0f;
    for_own_elements_inside<kGroups>(g, n0, [&](int t, int token, int column) {
      const EpilogueOperands of =
          kLoadsEpilogueFirst<kGroups> ? end[0][t] : load_epilogue_operands(g, token, column);
      seen = put(g, static_cast<int64_t>(token) * g.n + column, apply_epilogue(g, own_sums[0][t], of), seen);
    });
    report_amax(g, seen);
  }
};
// This one casts silu(gate) * up.
struct GatedEnding {
  const GatedCast& to;

  template <int kGroups>
  __device__ __forceinline__ void finish(const Gemm& g, const PerThread<kGroups> (&own_sums)[2],
                                         const PerThread<kGroups, EpilogueOperands> (&end)[2], int n0) const {
    static_assert(kLoadsEpilogueFirst<kGroups>);
    const int64_t counted = to.out.counted_rows(g.m);
    const float scale = *to.scale;
    float seen = 0.0f;
    unsigned found = 0;
    for_own_elements_inside<kGroups>(g, n0, [&](int t, int token, int column) {
      const float gate = rounded<BF16>(apply_epilogue(g, own_sums[0][t], end[0][t]));
      const float y = gated<BF16>(gate, rounded<BF16>(apply_epilogue(g, own_sums[1][t], end[1][t])));
      to.q[static_cast<int64_t>(token) * (g.n / 2) + column] = encode_one<E4M3>(y, scale);
      if (token < counted) {
        seen = fmaxf(seen, fabsf(y));
        found += is_cut_off<E4M3>(y * scale);
      }
    });
    seen = lanes_max<32>(seen);
    if (threadIdx.x % 32 == 0) atomic_max_float(to.out.amax, seen);
    add_cut_off(to.out, found);
  }
};

template <Element kElement, int kGroups, bool kInside, class From, int kParts, class Ending>
__device__ __forceinline__ void compute(const Gemm& g, Prefetcher<kGroups, From, kParts>& prefetcher,
                                        From from, const Ending& ending) {
  __shared__ Sums<kGroups> sums;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int n0 = static_cast<int>(blockIdx.x) * kRows, row = n0 + lane / 4;
  const int blocks = (g.k + kScaleBlock - 1) / kScaleBlock, stride = static_cast<int>(blockDim.x) / 32;
  PerThread<kGroups, EpilogueOperands> end[kParts] = {};
  if (kLoadsEpilogueFirst<kGroups> && warp < kWarps) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      for_own_elements_inside<kGroups>(g, n0 + part * (g.n / 2), [&](int t, int token, int column) {
        end[part][t] = load_epilogue_operands(g, token, column);
      });
    }
  }
  prefetcher.prefetch_first(from);
  float total[kParts][kGroups][4] = {};
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    for (int block = warp; block < prefetcher.steps(); block += stride) {
      prefetcher.wait();
      if (kParts == 1 || block < blocks) {
        float by_row[2] = {1.0f, 1.0f};
        if constexpr (kInside) {
          by_row[0] = g.b_scale.inner(row, g.n, block);
          by_row[1] = g.b_scale.inner(row + 8, g.n, block);
        }
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
          float sum[4] = {};
          multiply<kElement>(sum, prefetcher, from, j, block);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int of = j * 8 + lane % 4 * 2 + e % 2;
            add_block<kInside>(total[part][j][e], sum[e], g, by_row[e / 2], of, block);
          }
        }
      }
      prefetcher.prefetch(from, part * prefetcher.steps() + block + prefetcher.kAhead * stride);
    }
  }
  from.report_counts();
  PerThread<kGroups> own_sums[kParts] = {};
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    for (int team = 0; team < stride / kWarps; ++team) {
      if (part + team > 0) __syncthreads();  // the sums of the preceding team have been added
      if (warp / kWarps == team) {
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e)
            sums[warp % kWarps][j * 8 + lane % 4 * 2 + e % 2][lane / 4 + e / 2 * 8] = total[part][j][e];
        }
      }
      __syncthreads();
      if (warp < kWarps) add_team<kGroups>(own_sums[part], sums);
    }
  }
  if (warp < kWarps) ending.template finish<kGroups>(g, own_sums, end, n0);
}

template <Element kElement, int kGroups, bool kInside>
__global__ void __launch_bounds__(kMostTeams* kThreads) gemm_stream(const __grid_constant__ Gemm g) {
  Prefetcher<kGroups, RawActivations> prefetcher(g);
  prefetcher.prefetch_early();
  after_earlier_kernels();
  compute<kElement, kGroups, kInside>(g, prefetcher, RawActivations(), StoreEnding());
}

template <int kGroups>
__global__ void __launch_bounds__(kMostTeams* kThreads)
    gemm_stream_casting(const __grid_constant__ Gemm g, const __grid_constant__ ToCast from) {
  Prefetcher<kGroups, CastActivations> prefetcher(g);
  prefetcher.prefetch_early();
  after_earlier_kernels();
  compute<Element::e4m3, kGroups, false>(g, prefetcher, CastActivations(g, from), StoreEnding());
}

template <int kGroups>
__global__ void __launch_bounds__(kMostTeams* kThreads)
    gemm_stream_gated(const __grid_constant__ Gemm g, const __grid_constant__ GatedCast to) {
  Prefetcher<kGroups, RawActivations, 2> prefetcher(g);
  prefetcher.prefetch_early();
  after_earlier_kernels();
  compute<Element::e4m3, kGroups, false>(g, prefetcher, RawActivations(), GatedEnding{to});
}

template <bool kInside>
__global__ void __launch_bounds__(kMostTeams* kThreads) grouped_stream(const __grid_constant__ Grouped all) {
  after_earlier_kernels();
  const int row = static_cast<int>(blockIdx.y), expert = all.expert_of_row(row),
            before = row - all.begin(expert);
  if (before % kRowsOfExpert != 0 || before < 0 || row >= all.end(expert)) return;
  const Gemm g = from_row(all.of(expert), before);
  Prefetcher<kGroupsOfExpert, RawActivations> prefetcher(g);
  compute<Element::e4m3, kGroupsOfExpert, kInside>(g, prefetcher, RawActivations(), StoreEnding());
}

// A kernel, and the bytes of dynamic shared memory that each of its warps needs.
template <class Kernel>
struct Launched {
  Kernel* kernel;
  int bytes;
};

template <Element kElement, bool kInside>
auto kernel_for(int m) {
  using Kernel = Launched<void(Gemm)>;
  if (m <= 8) return Kernel{gemm_stream<kElement, 1, kInside>, Prefetcher<1, RawActivations>::kBytes};
  if (m <= 16) return Kernel{gemm_stream<kElement, 2, kInside>, Prefetcher<2, RawActivations>::kBytes};
  if (m <= 32) return Kernel{gemm_stream<kElement, 4, kInside>, Prefetcher<4, RawActivations>::kBytes};
  return Kernel{gemm_stream<kElement, 8, kInside>, Prefetcher<8, RawActivations>::kBytes};
}

auto casting_kernel_for(int m) {
  using Kernel = Launched<void(Gemm, ToCast)>;
  if (m <= 8) return Kernel{gemm_stream_casting<1>, Prefetcher<1, CastActivations>::kBytes};
  if (m <= 16) return Kernel{gemm_stream_casting<2>, Prefetcher<2, CastActivations>::kBytes};
  if (m <= 32) return Kernel{gemm_stream_casting<4>, Prefetcher<4, CastActivations>::kBytes};
  return Kernel{gemm_stream_casting<8>, Prefetcher<8, CastActivations>::kBytes};
}

// Returns the threads of a block: two teams if there are fewer than three blocks per multiprocessor, K is
// long enough for both teams, and the chip has enough shared memory (not Ada and sm_120). The number of
// tokens has no influence, because it must not change the order of a sum.
int threads_for(const Gemm& g, const OnDevice& device) {
  const int64_t blocks = ceil_over(g.n, kRows), steps = ceil_over(ceil_over(g.k, kScaleBlock), kWarps);
  constexpr int kMost = kMostTeams * kWarps * Prefetcher<2, RawActivations>::kBytes + int{sizeof(Sums<2>)};
  const bool both = steps > 1 && blocks < 3 * device.multiprocessors() && device.shared_bytes() >= kMost;
  return both ? kMostTeams * kThreads : kThreads;
}

unsigned blocks_for(const Gemm& g) { return static_cast<unsigned>(ceil_over(g.n, kRows)); }

template <class Kernel, class... A>
void launch_stream(const Launched<Kernel>& of, const Gemm& g, dim3 grid, const OnDevice& device,
                   const A&... args) {
  const int threads = threads_for(g, device);
  launch_early(of.kernel, grid, threads, threads / 32 * of.bytes, device.stream(), args...);
}

}  // namespace

int skinny_warps(const Gemm& g, const OnDevice& device) { return threads_for(g, device) / 32; }

void gemm_skinny(const Gemm& g, const OnDevice& device) {
  const bool inside = g.a_scale.inside() || g.b_scale.inside();
  launch_stream(inside ? kernel_for<Element::e4m3, true>(g.m) : kernel_for<Element::e4m3, false>(g.m), g,
                blocks_for(g), device, g);
}

void gemm_skinny_casting(const Gemm& g, const ToCast& from, const OnDevice& device) {
  launch_stream(casting_kernel_for(g.m), g, blocks_for(g), device, g, from);
}

void gemm_skinny_gated(const Gemm& g, const GatedCast& to, const OnDevice& device) {
  using Kernel = Launched<void(Gemm, GatedCast)>;
  const Kernel kernel = g.m <= 8 ? Kernel{gemm_stream_gated<1>, Prefetcher<1, RawActivations>::kBytes}
                                 : Kernel{gemm_stream_gated<2>, Prefetcher<2, RawActivations>::kBytes};
  launch_stream(kernel, g, blocks_for(g) / 2, device, g, to);
}

void grouped_skinny(const Grouped& g, const OnDevice& device) {
  const bool inside = g.all.a_scale.inside() || g.all.b_scale.inside();
  using Kernel = Launched<void(Grouped)>;
  const Kernel kernel{inside ? grouped_stream<true> : grouped_stream<false>,
                      Prefetcher<kGroupsOfExpert, RawActivations>::kBytes};
  launch_stream(kernel, g.all, dim3(blocks_for(g.all), static_cast<unsigned>(g.total)), device, g);
}

void gemm_skinny_bf16(const Gemm& g, const OnDevice& device) {
  launch_stream(kernel_for<Element::bf16, false>(g.m), g, blocks_for(g), device, g);
}

}  // namespace fp8serve
