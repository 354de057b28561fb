#include "cpu/gemm_columns.h"

#include "cpu/gemm_4bit.h"
#include "cpu/gemm_packed.h"
#include "cpu/mx.h"
#include "cpu/scratch.h"
#include "cpu/tensors.h"

namespace fp8serve::gemm {

Columns::Columns(const Problem& problem, const Level& level)
    : p_(problem), level_(level), reads_packed_(problem.b.packed && level.unpack_packed != nullptr) {
  thread_local Scratch rows, codes, shifts;
  const bool mx = p_.b.mx_codes != nullptr && !has_4_bits(p_.b.kind);
  if (!reads_packed_ && (p_.b.panel_kind() != p_.b.kind || p_.b.packed))
    rows_ = rows.get<char>(kGroup * kBlock * row_bytes());
  if (!reads_packed_ && mx && p_.b.packed) codes_ = codes.get<char>(kGroup * kBlock);
  if (reads_packed_ && mx) shifts_ = shifts.get<uint16_t>(kGroup * kBlock / kMxBlock);
}

void Columns::stream(Tile tile, BlockIndex at, BlockIndex next) const {
  if (reads_packed_) {
    tile.b = block(at);
    if (has_4_bits(p_.b.kind)) {
      tile.distances = distances_of(p_.b, at.n, at.kb * kBlock);
      return level_.stream_4bit(tile, p_.b.kind);
    }
    if (shifts_ != nullptr) compute_shifts(at);
    tile.mx_shifts = shifts_;
    return level_.stream_packed(tile, p_.b.kind);
  }
  const void *b[kGroup], *next_b[kGroup];
  if (rows_ != nullptr) unpack_to_rows(at);
  get_pointers(at, b);
  get_pointers(next, next_b);
  level_.stream(tile, b, next_b, p_.b.panel_kind());
}

void Columns::unpack(BlockIndex at, int64_t begin, int64_t end, std::byte* panel) const {
  if (reads_packed_) {
    if (has_4_bits(p_.b.kind)) {
      const uint8_t* distances = distances_of(p_.b, at.n, at.kb * kBlock);
      return level_.unpack_4bit(block(at), distances, begin, end, p_.b.kind, panel);
    }
    if (shifts_ != nullptr && begin == 0) compute_shifts(at);
    return level_.unpack_packed(block(at), p_.k_count(at.kb), begin, end, p_.b.kind, shifts_, panel);
  }
  const void* b[kGroup];
  if (rows_ != nullptr && begin == 0) unpack_to_rows(at);
  get_pointers(at, b);
  for (const void*& column : b) column = static_cast<const char*>(column) + begin * row_bytes();
  level_.unpack_columns(b, end - begin, p_.b.panel_kind(), panel + begin * kGroup * level_.element_size);
}

void Columns::prefetch(BlockIndex at, int64_t begin, int64_t end) const {
  const auto lines = [](const char* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
  };
  const int64_t bytes = bytes_of(p_.b.kind);
  if (has_4_bits(p_.b.kind) && p_.b.packed) {
    const uint8_t* distances = distances_of(p_.b, at.n, at.kb * kBlock + begin);
    lines(reinterpret_cast<const char*>(distances), (end - begin) / block_of(p_.b.kind) * kGroup);
    return lines(block(at) + begin * (kGroup / 2), (end - begin) * (kGroup / 2));
  }
  if (p_.b.packed) {
    const int64_t half = kGroup / 2 * bytes;  // a block is two halves of each k
    lines(block(at) + begin * half, (end - begin) * half);
    return lines(block(at) + (p_.k_count(at.kb) + begin) * half, (end - begin) * half);
  }
  for (int64_t c = 0; c < kGroup; ++c)
    lines(p_.b.at(std::min(at.n + c, p_.n - 1), at.kb * kBlock + begin), bytes_of(p_.b.kind, end - begin));
}

// If `b` has fewer than 16 columns left, the last one is repeated.
void Columns::get_pointers(BlockIndex at, const void** b) const {
  const int64_t row = kBlock * row_bytes();
  for (int64_t c = 0; c < kGroup; ++c)
    b[c] = rows_ != nullptr ? rows_ + c * row : p_.b.at(std::min(at.n + c, p_.n - 1), at.kb * kBlock);
}

void Columns::unpack_to_rows(BlockIndex at) const {
  const int64_t k = p_.k_count(at.kb);
  if (has_4_bits(p_.b.kind)) {
    for (int64_t c = 0; c < std::min(kGroup, p_.n - at.n); ++c)
      widen_4bit(p_.b, at.n + c, at.kb * kBlock, k, reinterpret_cast<uint16_t*>(rows_) + c * kBlock);
    return;
  }
  if (p_.b.mx_codes == nullptr) return unpack_block(block(at), k, p_.b.kind, kBlock * row_bytes(), rows_);
  if (codes_ != nullptr) unpack_block(block(at), k, p_.b.kind, kBlock, codes_);
  for (int64_t c = 0; c < std::min(kGroup, p_.n - at.n); ++c) {
    const void* from = codes_ != nullptr ? codes_ + c * kBlock : p_.b.at(at.n + c, at.kb * kBlock);
    widen_row(p_.b, from, at.n + c, at.kb * kBlock, k, reinterpret_cast<uint16_t*>(rows_) + c * kBlock);
  }
}

void Columns::compute_shifts(BlockIndex at) const {
  const int64_t k = p_.k_count(at.kb), first = at.n * p_.b.mx_blocks + at.kb * (kBlock / kMxBlock);
  level_.compute_mx_shifts(p_.b.mx_codes + first, p_.b.mx_blocks, p_.b.mx_rows + at.n, k / kMxBlock,
                           p_.b.kind, shifts_);
}

}  // namespace fp8serve::gemm
