// look_up: a function of one BF16 value, by a table of its 65,536 results. A model's activations use a few
// thousand entries, which a processor keeps in its first-level cache. A load for each element then takes less
// time than computing GELU, and gives the same bits at every place in a tensor.
#include <torch/csrc/stable/library.h>

#include "check.h"
#include "cpu/features.h"
#include "cpu/rows.h"
#include "cpu/tensors.h"

namespace fp8serve {
namespace {

constexpr int64_t kPlaces = 1 << 16;

// Four elements a load and a store: the processor has two loads a cycle, and the table needs one for each.
void look_up_row(const BF16* x, const uint16_t* table, BF16* y, int64_t n) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    uint64_t four;
    std::memcpy(&four, x + i, sizeof(four));
    const uint64_t values = table[four & 0xffff] | uint64_t{table[four >> 16 & 0xffff]} << 16 |
                            uint64_t{table[four >> 32 & 0xffff]} << 32 | uint64_t{table[four >> 48]} << 48;
    std::memcpy(y + i, &values, sizeof(values));
  }
  for (; i < n; ++i) y[i].bits = table[x[i].bits];
}

Tensor look_up(const Tensor& x, const Tensor& table_in) {
  const Contract check("look_up");
  check.rank("x", x, 2);
  check.tensor("x", x, {ScalarType::BFloat16}, {Size{"M", x.size(0)}, Size{"K", x.size(1)}});
  check.tensor("table", table_in, {ScalarType::BFloat16}, {exactly(kPlaces)});
  const Tensor dense_table = dense(table_in), y = empty({x.size(0), x.size(1)}, ScalarType::BFloat16);
  const Rows rows = rows_of(x);
  const uint16_t* table = data<const uint16_t>(dense_table);
  parallel_rows(rows.count, rows.width, [&](int64_t r) {
    look_up_row(data<const BF16>(rows.tensor) + r * rows.stride, table, data<BF16>(y) + r * rows.width,
                rows.width);
  });
  return y;
}

}  // namespace
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("look_up", TORCH_BOX(&fp8serve::look_up));
  fp8serve::report<fp8serve::kPlain>("look_up");
}
