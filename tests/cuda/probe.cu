// A kernel around the rotary embedding in FP32, for its test to read the instructions of.
#include "cuda/rows.h"

__global__ void probe_turned(const float* head, const float* cos, const float* sin, float* out) {
  out[threadIdx.x] = fp8serve::turned(head, cos, sin, static_cast<int>(threadIdx.x), 64);
}
