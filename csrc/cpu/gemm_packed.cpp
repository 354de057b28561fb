// pack_weight brings a weight into the order of gemm_packed.h; unpack_block brings it back for levels that
// read rows.
#include "cpu/gemm_packed.h"

#include <torch/csrc/stable/library.h>

#include <cstring>

#include "check.h"
#include "cpu/tensors.h"

namespace fp8serve::gemm {
namespace {

// Calls f(row, offset in the row, offset in the block) for every four values of 16 rows. Offsets are in
// bytes, and a value has Size bytes. Row by row, so that a row is read in order and the written block stays
// in the first-level cache.
template <int64_t Size, class F>
void each_four(int64_t k, Kind kind, const F& f) {
  constexpr int64_t kFour = kHalfRun * Size;
  const int64_t half = k * kGroup / 2 * Size;
  for (int64_t c = 0; c < kGroup; ++c) {
    const int64_t place = place_of(c, kind) * kFour;
    for (int64_t run = 0; run < k / kRun; ++run) {
      f(c, 2 * run * kFour, place + run * kGroup * kFour);
      f(c, (2 * run + 1) * kFour, place + half + run * kGroup * kFour);
    }
  }
}

template <int64_t Size>
void pack_values(const char* rows, int64_t stride, int64_t k, Kind kind, char* packed) {
  each_four<Size>(k, kind, [&](int64_t c, int64_t from, int64_t to) {
    std::memcpy(packed + to, rows + c * stride + from, kHalfRun * Size);
  });
}

template <int64_t Size>
void unpack_values(const char* packed, int64_t k, Kind kind, int64_t stride, char* rows) {
  each_four<Size>(k, kind, [&](int64_t c, int64_t to, int64_t from) {
    std::memcpy(rows + c * stride + to, packed + from, kHalfRun * Size);
  });
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
  const Tensor dense_weight = dense(weight);
  const Kind kind = weight.scalar_type() == ScalarType::BFloat16 ? Kind::bf16 : Kind::e4m3;
  const int64_t stride = k.value() * bytes_of(kind);
  parallel_tasks(n.value() / kGroup, [&](int64_t group) {
    const char* rows = data<const char>(dense_weight) + group * kGroup * stride;
    char* packed = data<char>(out) + group * kGroup * stride;
    for (int64_t begin = 0; begin < k.value(); begin += kBlock) {
      pack_block(rows + begin * bytes_of(kind), stride, std::min(kBlock, k.value() - begin), kind,
                 packed + begin * kGroup * bytes_of(kind));
    }
  });
}

}  // namespace

void pack_block(const char* rows, int64_t stride, int64_t k, Kind kind, char* packed) {
  kind == Kind::bf16 ? pack_values<2>(rows, stride, k, kind, packed)
                     : pack_values<1>(rows, stride, k, kind, packed);
}

void unpack_block(const char* packed, int64_t k, Kind kind, int64_t stride, char* rows) {
  kind == Kind::bf16 ? unpack_values<2>(packed, k, kind, stride, rows)
                     : unpack_values<1>(packed, k, kind, stride, rows);
}

}  // namespace fp8serve::gemm

STABLE_TORCH_LIBRARY_IMPL(fp8serve, CPU, m) {
  m.impl("pack_weight", TORCH_BOX(&fp8serve::gemm::pack_weight));
  fp8serve::report<fp8serve::kPlain>("pack_weight");
}
