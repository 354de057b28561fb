// paged_attention on tensor cores, for BF16 queries over BF16 or FP8 caches and heads of up to 128
// dimensions: which kernel handles which rows, and how the parts of segments are merged.
//
// On Hopper, a sequence with several tokens and at least 64 rows (tokens times the heads of a group) in a
// call is a prompt, which warpgroups handle (attention_wgmma.cu). Warps handle all other sequences
// (attention_mma.cu). Both kernels do the same operations in the same order, so their results are equal to
// the bit if mma and wgmma round alike. NVIDIA does not document whether they do, so the choice of the
// kernel depends on the rows of the sequence alone, never on those of others in the call. A call with as
// many tokens as sequences is decoding and launches no kernel for prompts. In a call with fewer tokens some
// sequences are empty padding.
//
// In the invariant mode warps handle all sequences.
//
// If there are few rows, several blocks share their segments, and `merge_parts` merges the parts that both
// kernels stored.
#include <climits>

#include "cuda/attention_softmax.h"
#include "cuda/gemm_switches.h"

#ifndef FP8SERVE_HAVE_wgmma
#define FP8SERVE_HAVE_wgmma 0
#endif

namespace fp8serve {
namespace attention {
namespace {

constexpr int kMergeThreads = 128;
constexpr int kAhead = 32;  // segments whose values are loaded while their weights are computed
constexpr int kPromptRows = 64;
constexpr int kEnough = 4;  // one-warp blocks per multiprocessor; with as many, none shares its segments
constexpr int64_t kMostParts = int64_t{128} << 20;  // bytes of parts; with more, none shares its segments

// A block merges the segments of one token of one head, in order. It computes the weights of the segments
// in parallel, and then adds up the values, whose loads wait neither for the weights nor for each other.
__global__ void __launch_bounds__(kMergeThreads) merge_parts(const __grid_constant__ Work w) {
  after_earlier_kernels();
  __shared__ float maxima[kMergeThreads], sums[kMergeThreads], before[kMergeThreads], weight[kMergeThreads];
  const int token = static_cast<int>(blockIdx.x), me = static_cast<int>(threadIdx.x);
  const int keys = keys_of(w, token), segments = (keys + kSegment - 1) / kSegment;
  const int64_t all = rows_in_all(w), row = static_cast<int64_t>(token) * w.heads + blockIdx.y;
  float maximum = -INFINITY, sum = 0.0f, value = 0.0f;
  for (int first = max(keys - w.window, 0) / kSegment; first < segments; first += kMergeThreads) {
    const int count = min(kMergeThreads, segments - first);
    const int64_t base = first * all + row;
    __syncthreads();
    if (me < count) maxima[me] = w.maxima[base + me * all], sums[me] = w.sums[base + me * all];
    float ahead[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      ahead[j] = j < count && me < w.dim ? w.values[(base + j * all) * w.dim + me] : 0.0f;
    }
    __syncthreads();
    float mine = maximum;
    for (int j = 0; j < count; ++j) {
      maximum = fmaxf(maximum, maxima[j]);
      if (j < me) mine = maximum;
    }
    if (me < count) {
      const Merge m = merge_of(mine, maxima[me]);
      before[me] = m.before, weight[me] = m.segment;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (j == count) break;
      const Merge m{0.0f, before[j], weight[j]};
      sum = merged(m, sum, sums[j]);
      value = merged(m, value, ahead[j]);
    }
#pragma unroll 8
    for (int j = kAhead; j < count; ++j) {
      const Merge m{0.0f, before[j], weight[j]};
      sum = merged(m, sum, sums[j]);
      if (me < w.dim) value = merged(m, value, w.values[(base + j * all) * w.dim + me]);
    }
  }
  if (me < w.dim) {
    const Sunk sunk = with_sink(w, row, maximum, sum);
    store(quotient(value * sunk.value_weight, sunk.sum) * factor(w.v_scale),
          static_cast<BF16*>(w.out) + row * w.dim + me);
  }
}

// --- launch

bool fits(const Call& call) {
  const Work& w = call.work;
  const bool types = w.query == Number::bf16 && (call.cache == ScalarType::BFloat16 || is_fp8(call.cache));
  const bool power_of_2 = (w.block_size & (w.block_size - 1)) == 0;
  return types && power_of_2 && call.slots <= INT_MAX && w.whole && w.dim % 16 == 0 && w.dim <= 128 &&
         aligned(w.q, 4);
}

// Returns whether some sequence may be a prompt, as far as the host knows.
bool may_have_prompts(const Call& call, const OnDevice& device) {
  const Work& w = call.work;
  const int64_t rows = call.tokens * w.group;
  return FP8SERVE_HAVE_wgmma && !is_invariant() && call.tokens != w.sequences && rows >= kPromptRows &&
         aligned(w.q, 16) && gemm_switches.on(GemmKernel::attention_wgmma) && device.capability() == 90;
}

// Blocks have one warp if sequences have at most 16 rows on average, or if longer sequences are prompts.
// Blocks of one warp and of four take the dimensions of FP8 keys in another order within a product: in the
// invariant mode all have one.
MmaGrid mma_grid(const Call& call, bool prompts) {
  const Work& w = call.work;
  const bool few = call.tokens * w.group <= int64_t{kWarpRows} * w.sequences;
  const int warps = few || prompts || (is_invariant() && is_fp8(call.cache)) ? 1 : 4;
  return {warps, tiles_of(w, call.tokens, kWarpRows * warps), 1};
}

// Returns whether several blocks share the segments of their rows, because `blocks` would not fill the
// device.
bool is_apart(const Call& call, int64_t blocks, int64_t enough) {
  const Work& w = call.work;
  const int64_t bytes = int64_t{4} * w.segments * call.tokens * w.heads * (w.dim + 2);
  return w.segments > 1 && blocks < enough && bytes <= kMostParts;
}

void merge(const Work& w, int64_t tokens, const OnDevice& device) {
  launch_early(merge_parts, dim3(static_cast<unsigned>(tokens), static_cast<unsigned>(w.heads)),
               kMergeThreads, 0, device.stream(), w);
}

}  // namespace

bool attend_on_tensor_cores(const Call& request, const OnDevice& device, const Tensor& allocator) {
  if (!fits(request) || !gemm_switches.on(GemmKernel::attention_mma)) return false;
  Call call = request;
  Work& w = call.work;
  w.segments = static_cast<int>(ceil_over(static_cast<int64_t>(w.max_blocks) * w.block_size, kSegment));
  const bool prompts = may_have_prompts(call, device), others = !prompts || w.sequences > 1;
  if (prompts) w.prompt_rows = kPromptRows;
  MmaGrid grid = mma_grid(call, prompts);
  const int64_t blocks = (prompts ? tiles_of(w, call.tokens, kPromptRows) : grid.tiles) * w.kv_heads;
  const bool apart =
      is_apart(call, blocks, (grid.warps == 1 && !prompts ? kEnough : 2) * device.multiprocessors());
  std::optional<Tensor> parts;
  if (apart) {
    parts = make_parts(w, call.tokens, allocator);
    // As many blocks as are resident at once: further blocks would wait for these and then fill their
    // pipelines anew. A sequence has at least one tile, and not more on average if blocks have one warp.
    const int64_t tiles = grid.warps == 1 && !prompts ? w.sequences : grid.tiles;
    const int64_t wanted = ceil_over(kResident * device.multiprocessors(), tiles * w.kv_heads);
    grid.each = std::min<int64_t>(w.segments, wanted);
  }
#if FP8SERVE_HAVE_wgmma
  if (prompts) attend_by_wgmma(w, call.cache, call.tokens, device);
#endif
  if (others) attend_by_mma(w, call.cache, grid, device);
  if (apart) merge(w, call.tokens, device);
  return true;
}

}  // namespace attention
}  // namespace fp8serve
