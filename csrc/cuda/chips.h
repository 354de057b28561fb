// Which chips run which CUTLASS kernels. Code for "sm_100a" runs on that chip alone. Code for its family,
// "sm_100f", also runs on later members (sm_103; for "sm_120f", sm_121).
#pragma once

namespace fp8serve {

// Returns the architecture whose kernels run on a chip of that compute capability (10 * major + minor).
constexpr int family_of(int capability) {
  const int major = capability / 10;
  return major == 9 || major == 10 || major == 12 ? 10 * major : capability;
}

// Returns whether kernels that were built for `chip`, or for its family, run on a chip of that capability.
constexpr bool runs_on(int capability, int chip, bool for_family) {
  return capability == chip || (for_family && family_of(capability) == chip);
}

// Returns the bytes of shared memory that a block may have on such a chip (CUDA's programming guide).
constexpr int shared_bytes_of(int capability) {
  const int family = family_of(capability);
  return (family == 90 || family == 100 ? 227 : 99) * 1024;
}

}  // namespace fp8serve
