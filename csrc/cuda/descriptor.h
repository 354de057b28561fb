// Tells whether the driver encoded a descriptor of the tensor memory accelerator. CUTLASS zeroes the
// descriptor, asks the driver to encode it and, if built without assertions, ignores a failure. An encoded
// descriptor is never all zeros.
#pragma once

#include <algorithm>

namespace fp8serve {

template <class Descriptor>
bool is_encoded(const Descriptor& descriptor) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(&descriptor);
  return std::any_of(bytes, bytes + sizeof(Descriptor), [](unsigned char byte) { return byte != 0; });
}

}  // namespace fp8serve
