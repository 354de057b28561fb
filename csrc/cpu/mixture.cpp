// The steps of a mixture of experts before and after its products: sort_by_expert sorts rows by expert and
// counts them; add_weighted adds up the outputs of a token's experts, in the order of the experts, rounding
// as the separate ops of a BF16 model would. Composed of torch's ops, they took longer than the products of
// a decoding step's experts.
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <utility>

#include "check.h"
#include "cpu/features.h"
#include "cpu/parts.h"
#include "cpu/rows.h"
#include "cpu/tensors.h"

namespace fp8serve {

std::tuple<Tensor, Tensor, Tensor> sort_by_expert(const Tensor& chosen_in, const Tensor& tokens) {
  const Contract check("sort_by_expert");
  check.rank("chosen", chosen_in, 2);
  check.tensor("chosen", chosen_in, {ScalarType::Long},
               {Size{"T", chosen_in.size(0)}, Size{"k", chosen_in.size(1)}});
  check.rank("tokens", tokens, 1);
  const Size experts{"E", tokens.size(0)};
  check.tensor("tokens", tokens, {ScalarType::Long}, {experts});
  check.require(tokens.is_contiguous(), "tokens", "must be contiguous");
  const Tensor chosen = dense(chosen_in);
  const int64_t k = chosen.size(1), count = chosen.size(0) * k;
  const int64_t* expert = data<const int64_t>(chosen);
  // The number of rows of each expert, then its next free row.
  std::vector<int64_t> next(static_cast<size_t>(experts.value()));
  for (int64_t i = 0; i < count; ++i) {
    check.require(expert[i] >= 0 && expert[i] < experts.value(), "chosen", "names expert ", expert[i],
                  ", must be below E = ", experts.value());
    ++next[static_cast<size_t>(expert[i])];
  }
  const Tensor rows = empty({count}, ScalarType::Long), places = empty({count}, ScalarType::Long),
               offsets = empty({experts.value()}, ScalarType::Int);
  int64_t end = 0;
  for (int64_t e = 0; e < experts.value(); ++e) {
    const int64_t own = std::exchange(next[static_cast<size_t>(e)], end);
    data<int64_t>(tokens)[e] += own;
    data<int32_t>(offsets)[e] = static_cast<int32_t>(end += own);
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = next[static_cast<size_t>(expert[i])]++;
    data<int64_t>(places)[i] = row;
    data<int64_t>(rows)[row] = i / k;
  }
  return {rows, places, offsets};
}

namespace {

// One token's columns, a few at a time, whose sums stay in registers or the first cache.
struct AddWeighted {
  static constexpr int64_t kColumns = 128;

  template <class T>
  static FP8_INLINE void run(const T* outputs, const int64_t* places, const float* weights, int64_t k, T* out,
                             int64_t n) {
    for (int64_t begin = 0; begin < n; begin += kColumns) {
      const int64_t columns = std::min(kColumns, n - begin);
      float sums[kColumns];
      for (int64_t j = 0; j < k; ++j) {
        const T* row = outputs + places[j] * n + begin;
        const float weight = weights[j];
        if (j == 0) {
          for (int64_t c = 0; c < columns; ++c) sums[c] = rounded<T>(load(row[c]) * weight);
        } else {
          for (int64_t c = 0; c < columns; ++c)
            sums[c] = rounded<T>(sums[c] + rounded<T>(load(row[c]) * weight));
        }
      }
      for (int64_t c = 0; c < columns; ++c) store(sums[c], out + begin + c);
    }
  }
};

// Each token's rows, in ascending order, and their weights.
struct Terms {
  std::vector<int64_t> rows;
  std::vector<float> weights;
};

std::vector<float> as_floats(const Tensor& x) {
  std::vector<float> floats(static_cast<size_t>(x.numel()));
  with_element(x.scalar_type(), [&](auto element) {
    const auto* values = data<const typename decltype(element)::type>(x);
    for (size_t i = 0; i < floats.size(); ++i) floats[i] = load(values[i]);
  });
  return floats;
}

// Sorts the terms of a token by insertion: there are few.
Terms terms_of(const Contract& check, const Tensor& places, const Tensor& weights) {
  const auto* place = data<const int64_t>(places);
  const int64_t count = places.numel(), k = weights.size(1);
  Terms terms{{place, place + count}, as_floats(dense(weights))};
  int64_t* rows = terms.rows.data();
  float* values = terms.weights.data();
  for (int64_t i = 0; i < count; ++i) {
    check.require(place[i] >= 0 && place[i] < count, "places", "names row ", place[i],
                  ", must be below T * k = ", count);
    for (int64_t j = i; j % k > 0 && rows[j - 1] > rows[j]; --j) {
      std::swap(rows[j - 1], rows[j]);
      std::swap(values[j - 1], values[j]);
    }
  }
  return terms;
}

}  // namespace

Tensor add_weighted(const Tensor& outputs_in, const Tensor& places_in, const Tensor& weights_in) {
  const Contract check("add_weighted");
  check.rank("outputs", outputs_in, 2);
  check.rank("weights", weights_in, 2);
  const Size t{"T", weights_in.size(0)}, k{"k", weights_in.size(1)}, n{"N", outputs_in.size(1)};
  const Size rows{"T * k", t.value() * k.value()};
  check.tensor("outputs", outputs_in, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half}, {rows, n});
  check.tensor("places", places_in, {ScalarType::Long}, {rows});
  check.tensor("weights", weights_in, {outputs_in.scalar_type(), ScalarType::Float}, {t, k});
  check.require(k.value() > 0, "weights", "has no column, must have one for each expert of a token");
  const Tensor outputs = dense(outputs_in), places = dense(places_in);
  const Terms terms = terms_of(check, places, weights_in);
  const Tensor out = empty({t.value(), n.value()}, outputs.scalar_type());
  with_element(outputs.scalar_type(), [&](auto element) {
    using T = typename decltype(element)::type;
    parallel_rows(t.value(), k.value() * n.value(), [&](int64_t r) {
      dispatch<AddWeighted>(data<const T>(outputs), terms.rows.data() + r * k.value(),
                            terms.weights.data() + r * k.value(), k.value(), data<T>(out) + r * n.value(),
                            n.value());
    });
  });
  return out;
}

}  // namespace fp8serve

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("sort_by_expert", TORCH_BOX(&fp8serve::sort_by_expert));
  m.impl("add_weighted", TORCH_BOX(&fp8serve::add_weighted));
  fp8serve::report<fp8serve::kPlain>("sort_by_expert");
  fp8serve::report<fp8serve::kVector<fp8serve::Numerics::exact>>("add_weighted");
}
