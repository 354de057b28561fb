// Tensor contracts. An op states the dtypes and shapes that it takes, in named sizes, and the error text is
// made from them.
//
//   Contract check("scaled_mm");
//   const Size M{"M", a.size(0)}, K{"K", a.size(1)};
//   check.tensor("b_scale_inv", s, {kFloat}, {ceil_div(N, 128), ceil_div(K, 128)});
//   -> fp8serve::scaled_mm: b_scale_inv: dim 1 is 31, must be ceil(K=4096 / 128) = 32
//
// The text is only built when a check fails: a passing contract costs a few C calls per tensor.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

namespace fp8serve {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The expected extent of a dimension, and its name in error messages. Without a name they show the number
// alone.
struct Size {
  const char* name;
  int64_t extent;
  int64_t divisor = 1;  // the dimension holds ceil(extent / divisor)

  int64_t value() const { return (extent + divisor - 1) / divisor; }
  std::string text() const {
    std::ostringstream out;
    if (name == nullptr) {
      out << value();
    } else if (divisor == 1) {
      out << name << " = " << extent;
    } else {
      out << "ceil(" << name << "=" << extent << " / " << divisor << ") = " << value();
    }
    return out.str();
  }
};

inline Size exactly(int64_t value) { return {nullptr, value}; }
inline Size ceil_div(Size size, int64_t divisor) { return {size.name, size.extent, divisor}; }

class Contract {
 public:
  explicit Contract(const char* op) : op_(op) {}

  template <class... Parts>
  [[noreturn]] void fail(const char* arg, const Parts&... parts) const {
    std::ostringstream out;
    out << "fp8serve::" << op_ << ": " << arg << ": ";
    ((out << parts), ...);
    throw std::runtime_error(out.str());
  }

  template <class... Parts>
  void require(bool holds, const char* arg, const Parts&... parts) const {
    if (!holds) fail(arg, parts...);
  }

  void dtype(const char* arg, const Tensor& t, std::initializer_list<ScalarType> allowed) const {
    const ScalarType actual = t.scalar_type();
    for (ScalarType a : allowed) {
      if (a == actual) return;
    }
    std::string list;
    for (ScalarType a : allowed) {
      list += (list.empty() ? "" : " or ") + std::string(torch::headeronly::toString(a));
    }
    fail(arg, "dtype is ", torch::headeronly::toString(actual), ", must be ", list);
  }

  void rank(const char* arg, const Tensor& t, int64_t rank) const {
    if (t.dim() != rank) fail(arg, "has ", t.dim(), " dimensions, must have ", rank);
  }

  void shape(const char* arg, const Tensor& t, std::initializer_list<Size> sizes) const {
    rank(arg, t, static_cast<int64_t>(sizes.size()));
    int64_t dim = 0;
    for (const Size& size : sizes) {
      if (t.size(dim) != size.value()) {
        fail(arg, "dim ", dim, " is ", t.size(dim), ", must be ", size.text());
      }
      ++dim;
    }
  }

  void tensor(const char* arg, const Tensor& t, std::initializer_list<ScalarType> dtypes,
              std::initializer_list<Size> sizes) const {
    cpu(arg, t);
    dtype(arg, t, dtypes);
    shape(arg, t, sizes);
  }

  void cpu(const char* arg, const Tensor& t) const {
    if (!t.is_cpu()) fail(arg, "is not on the CPU, where the other arguments are");
  }

 private:
  const char* op_;
};

}  // namespace fp8serve
