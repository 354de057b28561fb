// Whether the driver encoded a descriptor of the tensor memory accelerator. CUTLASS zeroes it, asks the
// driver and, if built without assertions, ignores a failure. An encoded one is never all zeros.
#pragma once

#include <algorithm>

namespace fp8serve {

template <class Descriptor>
bool is_encoded(const Descriptor& descriptor) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(&descriptor);
  return std::any_of(bytes, bytes + sizeof(Descriptor), [](unsigned char byte) { return byte != 0; });
}

}  // namespace fp8serve
