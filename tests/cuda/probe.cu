// A kernel that applies the rotary embedding in FP32. A test reads its instructions.
#include "cuda/rows.h"

__global__ void probe_rotated(const float* head, const float* cos, const float* sin, float* out) {
  const auto load = [&](const float* from) { return fp8serve::load_pairs<true>(from, threadIdx.x * 8, 32); };
  const fp8serve::Pairs y = fp8serve::rotated<float>(load(head), load(cos), load(sin));
  fp8serve::store_pairs<true>(y, out, threadIdx.x * 8, 32);
}
