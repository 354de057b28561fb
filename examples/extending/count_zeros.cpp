// count_zeros: a CPU kernel for the op that op.py defines. docs/extending/kernel.md explains it.
#include <torch/csrc/stable/library.h>

#include "check.h"
#include "cpu/tensors.h"

namespace fp8serve {
namespace {

Tensor count_zeros(const Tensor& q) {
  const Contract check("count_zeros");
  check.cpu("q", q);
  check.rank("q", q, 2);
  check.dtype("q", q, {ScalarType::Float8_e4m3fn, ScalarType::Float8_e5m2});
  const Tensor held = dense(q);
  const uint8_t* bytes = data<const uint8_t>(held);
  const int64_t n = held.size(0) * held.size(1);
  int64_t zeros = 0;
  // Of the two zeros only the sign bit differs; a loop without a branch is one that the compiler vectorises.
  for (int64_t i = 0; i < n; ++i) zeros += (bytes[i] & 0x7f) == 0;
  Tensor found = empty({}, ScalarType::Long);
  *data<int64_t>(found) = zeros;
  return found;
}

}  // namespace
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) { m.impl("count_zeros", TORCH_BOX(&fp8serve::count_zeros)); }
