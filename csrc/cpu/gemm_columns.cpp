#include "cpu/gemm_columns.h"

#include "cpu/gemm_packed.h"
#include "cpu/scratch.h"
#include "cpu/tensors.h"

namespace fp8serve::gemm {

Columns::Columns(const Problem& problem, const Level& level)
    : p_(problem), level_(level), reads_packed_(problem.b.packed && level.stream_packed != nullptr) {
  thread_local Scratch scratch;
  if (p_.b.packed && !reads_packed_) rows_ = scratch.get<char>(kGroup * kBlock * bytes_of(p_.b.kind));
}

void Columns::stream(Tile tile, Place at, Place next) const {
  if (reads_packed_) {
    tile.b = block(at);
    return level_.stream_packed(tile, p_.b.kind);
  }
  const void *b[kGroup], *ahead[kGroup];
  if (rows_ != nullptr) lay_out(at);
  point(at, b);
  point(next, ahead);
  level_.stream(tile, b, ahead, p_.b.kind);
}

void Columns::unpack(Place at, int64_t begin, int64_t end, std::byte* panel) const {
  if (reads_packed_) return level_.unpack_packed(block(at), p_.k_count(at.kb), begin, end, p_.b.kind, panel);
  const void* b[kGroup];
  if (rows_ != nullptr && begin == 0) lay_out(at);
  point(at, b);
  for (const void*& column : b) column = static_cast<const char*>(column) + begin * bytes_of(p_.b.kind);
  level_.unpack_columns(b, end - begin, p_.b.kind, panel + begin * kGroup * level_.element_size);
}

void Columns::fetch(Place at, int64_t begin, int64_t end) const {
  const auto lines = [](const char* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
  };
  const int64_t bytes = bytes_of(p_.b.kind);
  if (p_.b.packed) {
    const int64_t half = kGroup / 2 * bytes;  // a block is two halves of each k
    lines(block(at) + begin * half, (end - begin) * half);
    return lines(block(at) + (p_.k_count(at.kb) + begin) * half, (end - begin) * half);
  }
  const void* b[kGroup];
  point(at, b);
  for (const void* column : b) lines(static_cast<const char*>(column) + begin * bytes, (end - begin) * bytes);
}

// A ragged group repeats its last column.
void Columns::point(Place at, const void** b) const {
  const int64_t row = kBlock * bytes_of(p_.b.kind);
  for (int64_t c = 0; c < kGroup; ++c)
    b[c] = rows_ != nullptr ? rows_ + c * row : p_.b.at(std::min(at.n + c, p_.n - 1), at.kb * kBlock);
}

void Columns::lay_out(Place at) const {
  unpack_block(block(at), p_.k_count(at.kb), p_.b.kind, kBlock * bytes_of(p_.b.kind), rows_);
}

}  // namespace fp8serve::gemm
