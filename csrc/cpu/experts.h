// Rows that are sorted by expert, as the grouped products read them.
#pragma once

#include <vector>

#include "check.h"
#include "cpu/tensors.h"

namespace fp8serve {

// offsets int32 [E]: where the rows of each expert end; they begin where those of the one before end.
struct Experts {
  Tensor held;
  int64_t count;

  int64_t begin(int64_t expert) const { return expert == 0 ? 0 : end(expert - 1); }
  int64_t end(int64_t expert) const { return data<const int32_t>(held)[expert]; }
  std::vector<int64_t> with_rows() const {
    std::vector<int64_t> experts;
    for (int64_t e = 0; e < count; ++e)
      if (end(e) > begin(e)) experts.push_back(e);
    return experts;
  }
};

inline Experts experts_of(const Contract& check, const Tensor& offsets, Size count, int64_t rows) {
  check.tensor("offsets", offsets, {ScalarType::Int}, {count});
  const Experts experts{dense(offsets), count.value()};
  for (int64_t e = 0; e < experts.count; ++e)
    check.require(experts.begin(e) <= experts.end(e), "offsets", "falls from ", experts.begin(e), " to ",
                  experts.end(e));
  const int64_t last = experts.count == 0 ? 0 : experts.end(experts.count - 1);
  check.require(last == rows && (experts.count == 0 || experts.end(0) >= 0), "offsets", "ends at ", last,
                ", must end at the number of rows, ", rows);
  return experts;
}

}  // namespace fp8serve
