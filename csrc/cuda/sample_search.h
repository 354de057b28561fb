// How a block finds the item at which a running sum reaches a goal: every thread adds up its own consecutive
// items, and the thread whose items reach the goal goes through them again.
#pragma once

#include "cuda/sample_mass.h"

namespace fp8serve {
namespace sampling {

constexpr uint32_t kBins = 1024, kNone = 0xffffffffu;

// An item's index, its own sum (`inside`), and the sum of all items before it.
struct Found {
  uint32_t index;  // kNone: no sum reaches the goal
  Sum before, inside;
};

struct Shared {
  Sum bins[kBins];
  Sum warps[32];
  Found found;
  int largest, depth;
  bool last;
};

// The sum of the preceding threads' items, and the sum of all threads' items.
struct Scan {
  Sum before, total;
};

__device__ __forceinline__ Sum from_below(const Sum& sum, int step) {
  return {{__shfl_up_sync(kAllLanes, sum.mass.high, step), __shfl_up_sync(kAllLanes, sum.mass.low, step)},
          __shfl_up_sync(kAllLanes, sum.count, step)};
}

__device__ inline Scan scan(Shared& shared, const Sum& mine) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  Sum up_to = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const Sum below = from_below(up_to, step);
    if (lane >= step) up_to = up_to + below;
  }
  if (lane == 31) shared.warps[warp] = up_to;
  __syncthreads();
  Scan found{up_to - mine, {{0, 0}, 0}};
  for (int w = 0; w < warps; ++w) {
    if (w < warp) found.before = found.before + shared.warps[w];
    found.total = found.total + shared.warps[w];
  }
  return found;
}

// Returns the first of `count` items with which the running sum, which starts at `before`, reaches the goal.
// goal_of(total of the items) returns the goal.
template <class Item, class GoalOf>
__device__ Found search(Shared& shared, uint32_t count, const Sum& before, const Item& item,
                        const GoalOf& goal_of) {
  const uint32_t own = (count + blockDim.x - 1) / blockDim.x;
  const uint32_t first = min(count, threadIdx.x * own), end = min(count, first + own);
  Sum mine{{0, 0}, 0};
  for (uint32_t i = first; i < end; ++i) mine = mine + item(i);
  const Scan sums = scan(shared, mine);
  const auto goal = goal_of(sums.total);
  const bool is_there = goal.reached(before + sums.total);
  Sum at = before + sums.before;
  if (is_there && first < end && goal.reached(at + mine) && (first == 0 || !goal.reached(at))) {
    uint32_t i = first;
    Sum inside = own == 1 ? mine : item(i);
    while (i + 1 < end && !goal.reached(at + inside)) {
      at = at + inside;
      inside = item(++i);
    }
    shared.found = {i, at, inside};
  }
  __syncthreads();
  return is_there ? shared.found : Found{kNone, {{0, 0}, 0}, {{0, 0}, 0}};
}

}  // namespace sampling
}  // namespace fp8serve
