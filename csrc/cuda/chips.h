// Which chips run which CUTLASS kernels. Code for "sm_100a" runs on that chip alone; for the family,
// "sm_100f", on its younger members, too (sm_103, as sm_121 of sm_120f).
#pragma once

namespace fp8serve {

// The architecture whose kernels a chip of that compute capability (10 * major + minor) runs.
constexpr int family_of(int capability) {
  const int major = capability / 10;
  return major == 9 || major == 10 || major == 12 ? 10 * major : capability;
}

// Whether kernels that were built for `chip`, for its family or for it alone, run on a chip of that
// capability.
constexpr bool runs_on(int capability, int chip, bool for_family) {
  return capability == chip || (for_family && family_of(capability) == chip);
}

// Bytes of shared memory that a block may have there (CUDA's programming guide).
constexpr int shared_bytes_of(int capability) {
  const int family = family_of(capability);
  return (family == 90 || family == 100 ? 227 : 99) * 1024;
}

}  // namespace fp8serve
