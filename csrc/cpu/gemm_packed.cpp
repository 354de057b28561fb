// pack_weight: a weight into the order of gemm_packed.h; and back, for levels that have no kernel for it.
#include "cpu/gemm_packed.h"

#include <torch/csrc/stable/library.h>

#include <cstring>

#include "check.h"
#include "cpu/tensors.h"

namespace fp8serve::gemm {
namespace {

// f(row's four values, their place) for every half run of 16 rows; `bytes` of one value.
template <class F>
void each_piece(int64_t k, int64_t bytes, Kind kind, const F& f) {
  const int64_t piece = kHalfRun * bytes;
  for (int64_t half = 0; half < 2; ++half) {
    for (int64_t run = 0; run < k / kRun; ++run) {
      const int64_t at = (half * (k / kRun) + run) * kGroup * piece,
                    from = (run * kRun + half * kHalfRun) * bytes;
      for (int64_t c = 0; c < kGroup; ++c) f(c, from, at + place_of(c, kind) * piece);
    }
  }
}

constexpr auto kKinds = {ScalarType::Float8_e4m3fn, ScalarType::Float8_e5m2, ScalarType::BFloat16};

void pack_weight(const Tensor& weight, const Tensor& out) {
  const Contract check("pack_weight");
  check.rank("weight", weight, 2);
  const Size n{"N", weight.size(0)}, k{"K", weight.size(1)};
  check.tensor("weight", weight, kKinds, {n, k});
  check.require(n.value() % kGroup == 0 && k.value() % kRun == 0, "weight", "is [", n.value(), ", ",
                k.value(), "], must have a multiple of 16 rows of a multiple of 8 values");
  check.tensor("out", out, {weight.scalar_type()},
               {{"N / 16", n.value() / kGroup}, {"K / 8", k.value() / kRun}, {"128", 128}});
  check.require(out.is_contiguous(), "out", "must be contiguous");
  const Tensor held = dense(weight);
  const Kind kind = weight.scalar_type() == ScalarType::BFloat16 ? Kind::bf16 : Kind::e4m3;
  const int64_t stride = k.value() * bytes_of(kind);
  parallel_tasks(n.value() / kGroup, [&](int64_t group) {
    const char* rows = data<const char>(held) + group * kGroup * stride;
    char* packed = data<char>(out) + group * kGroup * stride;
    for (int64_t begin = 0; begin < k.value(); begin += kBlock) {
      pack_block(rows + begin * bytes_of(kind), stride, std::min(kBlock, k.value() - begin), kind,
                 packed + begin * kGroup * bytes_of(kind));
    }
  });
}

}  // namespace

void pack_block(const char* rows, int64_t stride, int64_t k, Kind kind, char* packed) {
  if (kind == Kind::bf16) {
    return each_piece(k, 2, kind, [&](int64_t c, int64_t from, int64_t to) {
      std::memcpy(packed + to, rows + c * stride + from, kHalfRun * 2);
    });
  }
  each_piece(k, 1, kind, [&](int64_t c, int64_t from, int64_t to) {
    std::memcpy(packed + to, rows + c * stride + from, kHalfRun);
  });
}

void unpack_block(const char* packed, int64_t k, Kind kind, int64_t stride, char* rows) {
  const int64_t bytes = bytes_of(kind);
  each_piece(k, bytes, kind, [&](int64_t c, int64_t to, int64_t from) {
    std::memcpy(rows + c * stride + to, packed + from, static_cast<size_t>(kHalfRun * bytes));
  });
}

}  // namespace fp8serve::gemm

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("pack_weight", TORCH_BOX(&fp8serve::gemm::pack_weight));
}
