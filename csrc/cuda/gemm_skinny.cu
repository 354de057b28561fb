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
// BF16 can be cast as they are loaded, and of few rows the norm can be cast. Every block then casts all of
// them, which takes less time than a launch; the first block counts them.
//
// A block prefetches its first weights before the preceding kernels have ended. Stored weights (`g.stored`),
// which the preceding kernel does not write, are copied to shared memory. Other weights are only fetched into
// the second-level cache.
//
// One launch also computes silu(gate) * up of an MLP and casts it: a block takes eight rows of the gate's
// weights and the same eight of up's. Likewise a launch rotates queries and keys and writes keys and values
// to the cache: a block takes eight rows of the first half of a head, and those of the second half with which
// they are rotated.
//
// In a product of experts the grid has blocks for every row. A block computes up to 16 rows of one expert if
// its own row is the first of these, and returns if it is not.
#include "cuda/gemm_grouped.h"
#include "cuda/gemm_skinny.h"
#include "cuda/gemm_switches.h"
#include "cuda/skinny_order.h"

namespace fp8serve {
namespace {

constexpr int kThreads = 32 * kWarps, kMostTeams = 2;
static_assert(kWarps == kReportingWarps);  // the first team reports
constexpr int kGroupsOfExpert = 2, kRowsOfExpert = 8 * kGroupsOfExpert;

// The weight rows of a block: eight from `first` on, and eight from `second` on.
struct BlockRows {
  int first, second;
  __device__ __forceinline__ int operator[](int i) const {
    return i < kRows / 2 ? first + i : second + i - kRows / 2;
  }
};
__device__ __forceinline__ BlockRows adjacent_rows() {
  const int first = static_cast<int>(blockIdx.x) * kRows;
  return {first, first + kRows / 2};
}
__device__ __forceinline__ BlockRows rows_of_gate_and_up(const Gemm& g) {
  const int first = static_cast<int>(blockIdx.x) * (kRows / 2);
  return {first, first + g.n / 2};
}
__device__ __forceinline__ BlockRows rows_of_head(int dim) {
  const int block = static_cast<int>(blockIdx.x), per_head = dim / kRows;
  const int first = block / per_head * dim + block % per_head * (kRows / 2);
  return {first, first + dim / 2};
}

// Fetches the block's first weights, a line a thread, into the second-level cache.
__device__ __forceinline__ void prefetch_weights_to_l2(const Gemm& g, const BlockRows& rows) {
  const int line = static_cast<int>(threadIdx.x), at = line / kRows * kLine;
  if (at < g.k) prefetch_to_l2(g.b + static_cast<int64_t>(min(rows[line % kRows], g.n - 1)) * g.k + at);
}

// What a thread has cast to E4M3, for the counters of the cast.
class CastCounts {
 public:
  __device__ __forceinline__ void count(const Chunk& x, float scale) {
    const float most = amax_of(x, 0.0f);
    amax_ = fmaxf(amax_, most);
    if (is_cut_off<E4M3>(most * scale)) num_cut_off_ += cut_off<E4M3>(x, scale);
  }
  __device__ __forceinline__ void count(float x, float scale) {
    amax_ = fmaxf(amax_, fabsf(x));
    num_cut_off_ += is_cut_off<E4M3>(x * scale);
  }
  // Whole warps call this, once.
  __device__ __forceinline__ void report(const CastCounters& out, float scale) const {
    const float seen = lanes_max<32>(amax_);
    if (threadIdx.x % 32 == 0) atomic_max_float(out.amax, seen);
    if (is_cut_off<E4M3>(seen * scale)) add_cut_off(out, num_cut_off_);
  }

 private:
  float amax_ = 0.0f;
  unsigned num_cut_off_ = 0;
};

struct NoArguments {};

// The inputs of a kernel. This one has FP8 activations, read as they are stored: sixteen values are one piece
// of 16 bytes.
struct RawActivations {
  using Arguments = NoArguments;
  static constexpr int kPieces = 1, kMostAhead = 2;  // kMostAhead: groups of eight tokens prefetched
  static int shared_bytes(const Gemm&) { return 0; }
  __device__ __forceinline__ RawActivations(const Gemm&, const NoArguments&) {}
  __device__ __forceinline__ const uint8_t* row(const Gemm& g, int token) const {
    return g.a + static_cast<int64_t>(token) * g.k;
  }
  __device__ __forceinline__ uint4 values(const uint4 (&raw)[1], int) { return raw[0]; }
  __device__ __forceinline__ void report_counts() const {}
};

// BF16 activations, cast as they are loaded: sixteen values are two pieces of 16 bytes.
class CastActivations {
 public:
  using Arguments = ToCast;
  static constexpr int kPieces = 2, kMostAhead = 1;
  static int shared_bytes(const Gemm&) { return 0; }
  __device__ CastActivations(const Gemm& g, const ToCast& from)
      : from_(from), scale_(*from.scale), num_counted_rows_(from.out.counted_rows(g.m)) {}
  __device__ __forceinline__ const uint8_t* row(const Gemm& g, int token) const {
    return reinterpret_cast<const uint8_t*>(from_.x + static_cast<int64_t>(token) * g.k);
  }
  __device__ __forceinline__ uint4 values(const uint4 (&raw)[2], int token) {
    const Chunk low = unpack(Raw<BF16>{{raw[0]}}), high = unpack(Raw<BF16>{{raw[1]}});
    if (blockIdx.x == 0 && token < num_counted_rows_) {
      counts_.count(low, scale_);
      counts_.count(high, scale_);
    }
    const uint2 first = encode_chunk<E4M3>(low, scale_), second = encode_chunk<E4M3>(high, scale_);
    return {first.x, first.y, second.x, second.y};
  }
  // Whole warps call this, once.
  __device__ __forceinline__ void report_counts() const {
    if (blockIdx.x == 0) counts_.report(from_.out, scale_);
  }

 private:
  const ToCast& from_;
  float scale_;
  int64_t num_counted_rows_;
  CastCounts counts_;
};

// Copies a warp's weights and activations of a block of K to shared memory, kAhead blocks before they are
// multiplied. A copy needs no registers and runs while other blocks are multiplied. Whole lines are copied,
// because half a line costs the second-level cache as much. Only the warp itself reads what it has copied.
// The activations of many tokens are not copied, but read from the caches when they are multiplied.
template <int kGroups, class From>
class Prefetcher {
 public:
  static constexpr int kAhead = 2;
  static constexpr bool kActivations = kGroups <= From::kMostAhead;
  static constexpr int kBytes =
      kAhead * (kRows + (kActivations ? 8 * kGroups * From::kPieces : 0)) * kLine;  // of a warp

  __device__ Prefetcher(const Gemm& g, const BlockRows& rows)
      : g_(g),
        rows_(rows),
        lane_(static_cast<int>(threadIdx.x) % 32),
        memory_(dynamic_shared() + static_cast<int>(threadIdx.x) / 32 * kBytes) {}

  // Before after_earlier_kernels(): copies the first weights if they are stored, else fetches their lines.
  __device__ __forceinline__ void prefetch_early() {
    g_.stored ? prefetch_first_weights() : prefetch_weights_to_l2(g_, rows_);
  }
  // Starts to copy the first kAhead blocks of K, except for what prefetch_early() has copied.
  __device__ __forceinline__ void prefetch_first(const From& from) {
    if (!g_.stored) prefetch_first_weights();
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      prefetch_activations(from, first_block(i));
      copy_commit();
      turn_ ^= 1;
    }
  }
  // Starts to copy a block of K; copies nothing for a block past the last one.
  __device__ __forceinline__ void prefetch(const From& from, int block) {
    __syncwarp();  // all lanes have read what lay there
    prefetch_weights(block);
    prefetch_activations(from, block);
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
  // Returns the warp's i-th block of K.
  __device__ __forceinline__ int first_block(int i) const {
    return static_cast<int>(threadIdx.x + i * blockDim.x) / 32;
  }
  __device__ __forceinline__ void prefetch_first_weights() {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      prefetch_weights(first_block(i));
      turn_ ^= 1;
    }
  }
  __device__ __forceinline__ void prefetch_weights(int block) {
    const int k = block * kScaleBlock;
    if (k >= g_.k) return;
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      const int row = lane_ / 8 + 4 * i, at = k + lane_ % 8 * 16;
      const int begin = i < kRows / 8 ? rows_.first : rows_.second - kRows / 2;
      const uint8_t* source = g_.b + static_cast<int64_t>(min(begin + row, g_.n - 1)) * g_.k;
      copy_async(weight(row, lane_ % 8), source + at, at < g_.k);
    }
  }
  __device__ __forceinline__ void prefetch_activations(const From& from, int block) {
    const int k = block * kScaleBlock;
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
  BlockRows rows_;
  int lane_;
  int turn_ = 0;  // which of kAhead buffers is multiplied next, and then overwritten by the next copy
  unsigned char* memory_;
};

// The norm of BF16 activations, cast. Every block casts all rows, each once, and keeps them in shared memory.
// Squares are added in the order of norm_row (elementwise.cu).
class NormedActivations {
 public:
  using Arguments = Normed;
  static constexpr int kPieces = 1, kMostAhead = 0;
  static int shared_bytes(const Gemm& g) { return g.m * pitch(g.k); }

  // All threads call this. Afterwards they see the rows.
  __device__ NormedActivations(const Gemm& g, const Normed& norm) : norm_(norm), scale_(*norm.scale) {
    __shared__ float sums[kNormedRows][kRowThreads / 32];
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    const int threads_of_row = row_threads(g.k), warps_of_row = threads_of_row / 32;
    memory_ = dynamic_shared() + blockDim.x / 32 * Prefetcher<1, NormedActivations>::kBytes;
    const Chunk first_weight = load_chunk<true>(norm.weight, thread * kChunk, g.k);
    for (int row = warp / warps_of_row; row < g.m; row += static_cast<int>(blockDim.x) / threads_of_row) {
      float sum = 0.0f;
      for (int at = thread % threads_of_row * kChunk; at < g.k; at += threads_of_row * kChunk) {
        sum = sum_of_squares(load_chunk<true>(norm.x + row * norm.stride, at, g.k), sum);
      }
      sum = lanes_sum(sum);
      if (lane == 0) sums[row][warp % warps_of_row] = sum;
    }
    __syncthreads();
    const int64_t counted = blockIdx.x == 0 ? norm.out.counted_rows(g.m) : 0;
    for (int row = 0; row < g.m; ++row) {
      const float squares = lanes_sum(lane < warps_of_row ? sums[row][lane] : 0.0f);
      const float factor = norm_factor(squares, g.k, norm.eps);
      for (int at = thread * kChunk; at < g.k; at += static_cast<int>(blockDim.x) * kChunk) {
        const Chunk weight = at == thread * kChunk ? first_weight : load_chunk<true>(norm.weight, at, g.k);
        const Chunk y = normed<BF16>(load_chunk<true>(norm.x + row * norm.stride, at, g.k), weight, factor);
        if (row < counted) counts_.count(y, scale_);
        *reinterpret_cast<uint2*>(memory_ + row * pitch(g.k) + at) = encode_chunk<E4M3>(y, scale_);
      }
    }
    __syncthreads();
  }
  __device__ __forceinline__ const uint8_t* row(const Gemm& g, int token) const {
    return memory_ + token * pitch(g.k);
  }
  __device__ __forceinline__ uint4 values(const uint4 (&raw)[1], int) { return raw[0]; }
  // Whole warps call this, once.
  __device__ __forceinline__ void report_counts() const {
    if (blockIdx.x == 0) counts_.report(norm_.out, scale_);
  }

 private:
  // Bytes from row to row: half a line more than a multiple of lines, so that lanes that read two rows at
  // once use different banks.
  __host__ __device__ static int pitch(int k) { return (k + kLine - 1) / kLine * kLine + kLine / 2; }
  const Normed& norm_;
  float scale_;
  unsigned char* memory_;
  CastCounts counts_;
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
__device__ __forceinline__ void for_own_elements_inside(const Gemm& g, const BlockRows& rows, const F& f) {
  for_own_elements<kGroups>([&](int t, int token, int of) {
    if (token < g.m && rows[of] < g.n) f(t, token, rows[of]);
  });
}

// What a kernel does with its output. The threads of the first team call finish() with the block's sums.
// This one stores them.
struct StoreOutput {
  using Arguments = NoArguments;
  __device__ __forceinline__ static BlockRows rows(const Gemm&, const NoArguments&) {
    return adjacent_rows();
  }
  __device__ __forceinline__ StoreOutput(const Gemm&, const BlockRows&, const NoArguments&) {}

  template <int kGroups>
  __device__ __forceinline__ void finish(const Gemm& g, const BlockRows& rows,
                                         const PerThread<kGroups>& own_sums,
                                         const PerThread<kGroups, EpilogueOperands>& end) const {
    float seen = 0.0f;
    for_own_elements_inside<kGroups>(g, rows, [&](int t, int token, int column) {
      const EpilogueOperands of =
          kLoadsEpilogueFirst<kGroups> ? end[t] : load_epilogue_operands(g, token, column);
      seen = put(g, static_cast<int64_t>(token) * g.n + column, apply_epilogue(g, own_sums[t], of), seen);
    });
    report_amax(g, seen);
  }
};

// Calls f(token, column in the block, product, product of the other half's row) for all elements of the
// thread, also for those of tokens that are not there. Products are rounded to BF16. The other row is the
// one in the other half of the block's rows; a thread eight lanes away has its product.
template <int kGroups, class F>
__device__ __forceinline__ void for_own_pairs(const Gemm& g, const PerThread<kGroups>& own_sums,
                                              const PerThread<kGroups, EpilogueOperands>& end, const F& f) {
  static_assert(kLoadsEpilogueFirst<kGroups>);
  for_own_elements<kGroups>([&](int t, int token, int of) {
    const float product = rounded<BF16>(apply_epilogue(g, own_sums[t], end[t]));
    f(token, of, product, __shfl_xor_sync(kAllLanes, product, kRows / 2));
  });
}

// This one casts silu(gate) * up.
struct GatedOutput {
  using Arguments = GatedCast;
  const GatedCast& to;
  __device__ __forceinline__ static BlockRows rows(const Gemm& g, const GatedCast&) {
    return rows_of_gate_and_up(g);
  }
  __device__ __forceinline__ GatedOutput(const Gemm&, const BlockRows&, const GatedCast& to) : to(to) {}

  template <int kGroups>
  __device__ __forceinline__ void finish(const Gemm& g, const BlockRows& rows,
                                         const PerThread<kGroups>& own_sums,
                                         const PerThread<kGroups, EpilogueOperands>& end) const {
    const int64_t counted = to.out.counted_rows(g.m);
    const float scale = *to.scale;
    CastCounts counts;
    for_own_pairs<kGroups>(g, own_sums, end, [&](int token, int of, float gate, float up) {
      if (token >= g.m || of >= kRows / 2) return;
      const float y = gated<BF16>(gate, up);
      to.q[static_cast<int64_t>(token) * (g.n / 2) + rows[of]] = encode_one<E4M3>(y, scale);
      if (token < counted) counts.count(y, scale);
    });
    counts.report(to.out, scale);
  }
};

// This one rotates queries and keys, and writes keys and values to the caches. All rows of a block are of one
// head.
template <bool kFp8>
class RotaryOutput {
 public:
  using Arguments = Rotary;
  __device__ __forceinline__ static BlockRows rows(const Gemm&, const Rotary& r) {
    return rows_of_head(r.dim);
  }
  // Loads what the thread needs after its sum.
  __device__ __forceinline__ RotaryOutput(const Gemm& g, const BlockRows& rows, const Rotary& r)
      : r_(r), head_(rows.first / r.dim) {
    const int token = static_cast<int>(threadIdx.x) / kRows, of = static_cast<int>(threadIdx.x) % kRows;
    if (token >= g.m) return;
    element_ = rows[of] - head_ * r.dim;
    cos_ = load(static_cast<const BF16*>(r.cos)[token * r.dim + element_]);
    sin_ = load(static_cast<const BF16*>(r.sin)[token * r.dim + element_]);
    if (head_ < r.q.count) return;
    slot_ = r.slots[token];
    const float* scale = head_ < r.q.count + r.k.count ? r.k_scale : r.v_scale;
    if (kFp8 && scale != nullptr) scale_ = *scale;
  }

  template <int kGroups>
  __device__ __forceinline__ void finish(const Gemm& g, const BlockRows&, const PerThread<kGroups>& own_sums,
                                         const PerThread<kGroups, EpilogueOperands>& end) const {
    static_assert(8 * kGroups * kRows <= kThreads);  // a thread has one element
    for_own_pairs<kGroups>(g, own_sums, end, [&](int token, int of, float product, float other) {
      if (token >= g.m) return;
      const float turned_product = turned<BF16>(product, of < kRows / 2 ? -other : other, cos_, sin_);
      const int key = head_ - r_.q.count, value = key - r_.k.count;
      if (key < 0) {
        const int64_t at = (static_cast<int64_t>(token) * r_.q.count + head_) * r_.dim + element_;
        store(turned_product, static_cast<BF16*>(r_.out) + at);
      } else if (r_.is_cached(slot_)) {
        value < 0 ? write(turned_product, r_.k_cache, key) : write(product, r_.v_cache, value);
      }
    });
  }

 private:
  __device__ __forceinline__ void write(float x, void* cache, int head) const {
    const int64_t at = (slot_ * r_.k.count + head) * r_.dim + element_;
    if constexpr (kFp8) {
      static_cast<uint8_t*>(cache)[at] = encode_one<E4M3>(x, scale_);
    } else {
      store(x, static_cast<BF16*>(cache) + at);
    }
  }
  const Rotary& r_;
  int head_, element_ = 0;
  float cos_ = 0.0f, sin_ = 0.0f, scale_ = 1.0f;
  int64_t slot_ = -1;
};

template <Element kElement, int kGroups, bool kInside, class From, class Output>
__device__ __forceinline__ void compute(const Gemm& g, const BlockRows& rows,
                                        Prefetcher<kGroups, From>& prefetcher, From from,
                                        const Output& output) {
  __shared__ Sums<kGroups> sums;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int blocks = (g.k + kScaleBlock - 1) / kScaleBlock, stride = static_cast<int>(blockDim.x) / 32;
  PerThread<kGroups, EpilogueOperands> end = {};
  if (kLoadsEpilogueFirst<kGroups> && warp < kWarps) {
    for_own_elements_inside<kGroups>(
        g, rows, [&](int t, int token, int column) { end[t] = load_epilogue_operands(g, token, column); });
  }
  prefetcher.prefetch_first(from);
  float total[kGroups][4] = {};
  for (int block = warp; block < blocks; block += stride) {
    prefetcher.wait();
    float by_row[2] = {1.0f, 1.0f};
    if constexpr (kInside) {
      by_row[0] = g.b_scale.inner(rows.first + lane / 4, g.n, block);
      by_row[1] = g.b_scale.inner(rows.second + lane / 4, g.n, block);
    }
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      float sum[4] = {};
      multiply<kElement>(sum, prefetcher, from, j, block);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int of = j * 8 + lane % 4 * 2 + e % 2;
        add_block<kInside>(total[j][e], sum[e], g, by_row[e / 2], of, block);
      }
    }
    prefetcher.prefetch(from, block + prefetcher.kAhead * stride);
  }
  from.report_counts();
  PerThread<kGroups> own_sums = {};
  for (int team = 0; team < stride / kWarps; ++team) {
    if (team > 0) __syncthreads();  // the sums of the preceding team have been added
    if (warp / kWarps == team) {
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          sums[warp % kWarps][j * 8 + lane % 4 * 2 + e % 2][lane / 4 + e / 2 * 8] = total[j][e];
      }
    }
    __syncthreads();
    if (warp < kWarps) add_team<kGroups>(own_sums, sums);
  }
  if (warp < kWarps) output.template finish<kGroups>(g, rows, own_sums, end);
}

template <Element kElement, int kGroups, bool kInside, class From = RawActivations,
          class Output = StoreOutput>
__global__ void __launch_bounds__(kMostTeams* kThreads)
    gemm_stream(const __grid_constant__ Gemm g, const __grid_constant__ typename From::Arguments from,
                const __grid_constant__ typename Output::Arguments to) {
  const BlockRows rows = Output::rows(g, to);
  Prefetcher<kGroups, From> prefetcher(g, rows);
  prefetcher.prefetch_early();
  after_earlier_kernels();
  compute<kElement, kGroups, kInside>(g, rows, prefetcher, From(g, from), Output(g, rows, to));
}

template <bool kInside>
__global__ void __launch_bounds__(kMostTeams* kThreads) grouped_stream(const __grid_constant__ Grouped all) {
  after_earlier_kernels();
  const int row = static_cast<int>(blockIdx.y), expert = all.expert_of_row(row),
            before = row - all.begin(expert);
  if (before % kRowsOfExpert != 0 || before < 0 || row >= all.end(expert)) return;
  const Gemm g = from_row(all.of(expert), before);
  const BlockRows rows = adjacent_rows();
  Prefetcher<kGroupsOfExpert, RawActivations> prefetcher(g, rows);
  const NoArguments none;
  compute<Element::e4m3, kGroupsOfExpert, kInside>(g, rows, prefetcher, RawActivations(g, none),
                                                   StoreOutput(g, rows, none));
}

// Returns the threads of a block: two teams if there are fewer than three blocks per multiprocessor, K is
// long enough for both teams, and the chip has enough shared memory (not Ada and sm_120). The number of
// tokens has no influence, because it must not change the order of a sum. In the invariant mode the number of
// blocks has none, because a server joins weights that a fine-tune multiplies one by one.
int threads_for(const Gemm& g, const OnDevice& device) {
  const int64_t blocks = ceil_over(g.n, kRows), steps = ceil_over(ceil_over(g.k, kScaleBlock), kWarps);
  constexpr int kMost = kMostTeams * kWarps * Prefetcher<2, RawActivations>::kBytes + int{sizeof(Sums<2>)};
  const bool few = is_invariant() || blocks < 3 * device.multiprocessors();
  const bool both = few && steps > 1 && device.shared_bytes() >= kMost;
  return both ? kMostTeams * kThreads : kThreads;
}

unsigned blocks_for(const Gemm& g) { return static_cast<unsigned>(ceil_over(g.n, kRows)); }

template <int kGroups, class From>
int shared_bytes_for(const Gemm& g, const OnDevice& device) {
  return threads_for(g, device) / 32 * Prefetcher<kGroups, From>::kBytes + From::shared_bytes(g);
}

template <Element kElement, int kGroups, bool kInside, class From = RawActivations,
          class Output = StoreOutput>
void launch_stream(const Gemm& g, const OnDevice& device, const typename From::Arguments& from = {},
                   const typename Output::Arguments& to = {}) {
  launch_early(gemm_stream<kElement, kGroups, kInside, From, Output>, blocks_for(g), threads_for(g, device),
               shared_bytes_for<kGroups, From>(g, device), device.stream(), g, from, to);
}

// Launches the kernel for the number of rows.
template <Element kElement, bool kInside, class From = RawActivations>
void launch_for_rows(const Gemm& g, const OnDevice& device, const typename From::Arguments& from = {}) {
  if (g.m <= 8) return launch_stream<kElement, 1, kInside, From>(g, device, from);
  if (g.m <= 16) return launch_stream<kElement, 2, kInside, From>(g, device, from);
  if (g.m <= 32) return launch_stream<kElement, 4, kInside, From>(g, device, from);
  launch_stream<kElement, 8, kInside, From>(g, device, from);
}

// Launches a kernel that may cast a norm and that does not just store the product.
template <class Output>
void launch_fused(const Gemm& g, const OnDevice& device, const Normed* norm,
                  const typename Output::Arguments& to) {
  if (norm != nullptr) {
    return launch_stream<Element::e4m3, 1, false, NormedActivations, Output>(g, device, *norm, to);
  }
  if (g.m <= 8) return launch_stream<Element::e4m3, 1, false, RawActivations, Output>(g, device, {}, to);
  launch_stream<Element::e4m3, 2, false, RawActivations, Output>(g, device, {}, to);
}

}  // namespace

int skinny_warps(const Gemm& g, const OnDevice& device) { return threads_for(g, device) / 32; }

void gemm_skinny(const Gemm& g, const OnDevice& device) {
  const bool inside = g.a_scale.inside() || g.b_scale.inside();
  inside ? launch_for_rows<Element::e4m3, true>(g, device) : launch_for_rows<Element::e4m3, false>(g, device);
}

void gemm_skinny_casting(const Gemm& g, const ToCast& from, const OnDevice& device) {
  launch_for_rows<Element::e4m3, false, CastActivations>(g, device, from);
}

bool skinny_takes_norm(const Gemm& g, const OnDevice& device) {
  constexpr int kDeclared = 8 * 1024;  // more than the kernels declare
  return g.m <= kNormedRows &&
         shared_bytes_for<1, NormedActivations>(g, device) + kDeclared <= device.shared_bytes();
}

void gemm_skinny_normed(const Gemm& g, const Normed& norm, const OnDevice& device) {
  launch_stream<Element::e4m3, 1, false, NormedActivations>(g, device, norm);
}

void gemm_skinny_gated(const Gemm& g, const Normed* norm, const GatedCast& to, const OnDevice& device) {
  launch_fused<GatedOutput>(g, device, norm, to);
}

void gemm_skinny_rotary(const Gemm& g, const Normed* norm, const Rotary& r, bool fp8,
                        const OnDevice& device) {
  fp8 ? launch_fused<RotaryOutput<true>>(g, device, norm, r)
      : launch_fused<RotaryOutput<false>>(g, device, norm, r);
}

void grouped_skinny(const Grouped& g, const OnDevice& device) {
  const bool inside = g.all.a_scale.inside() || g.all.b_scale.inside();
  const dim3 grid(blocks_for(g.all), static_cast<unsigned>(g.total));
  launch_early(inside ? grouped_stream<true> : grouped_stream<false>, grid, threads_for(g.all, device),
               shared_bytes_for<kGroupsOfExpert, RawActivations>(g.all, device), device.stream(), g);
}

void gemm_skinny_bf16(const Gemm& g, const OnDevice& device) {
  launch_for_rows<Element::bf16, false>(g, device);
}

}  // namespace fp8serve
