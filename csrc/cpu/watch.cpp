// count_saturated: what serving keeps of every FP8 input, its largest magnitude and how many elements were
// cut off. The codes are read only in the rare step whose amax lies beyond the limit.
#include "watch.h"

#include <torch/csrc/stable/library.h>

#include "check.h"
#include "cpu/isa.h"
#include "cpu/tensors.h"

namespace fp8serve {
namespace {

struct CountAtEnd {
  static FP8_INLINE void run(const uint8_t* codes, int64_t count, int64_t* found) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i) total += (codes[i] & 0x7f) == 0x7e;
    *found = total;
  }
};

void count_saturated(const Tensor& q_in, const Tensor& amax, const Tensor& seen, const Tensor& saturated,
                     double limit, const std::optional<Tensor>& rows) {
  const Contract check("count_saturated");
  check_counters(check, q_in, amax, seen, saturated, rows);
  const float here = *data<const float>(amax);
  float& most = *data<float>(seen);
  if (here > most) most = here;
  if (!(here > static_cast<float>(limit))) return;
  const Tensor q = dense(q_in);
  const int64_t live = rows ? std::min(q.numel(), *data<const int64_t>(*rows) * q.size(1)) : q.numel();
  int64_t found = 0;
  dispatch<CountAtEnd>(data<const uint8_t>(q), live, &found);
  *data<int64_t>(saturated) += found;
}

}  // namespace
}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("count_saturated", TORCH_BOX(&fp8serve::count_saturated));
}
