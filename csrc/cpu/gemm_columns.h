// Reads `b` for the tiles, packed or not, in blocks of 16 columns and 1024 of K.
#pragma once

#include "cpu/gemm.h"
#include "cpu/gemm_run.h"

namespace fp8serve::gemm {

// Block kb of K of the 16 columns from n.
struct BlockIndex {
  int64_t n, kb;
};

class Columns {
 public:
  Columns(const Problem& problem, const Level& level);

  // With at most this many rows the columns are streamed, otherwise unpacked to a panel.
  int64_t stream_rows() const {
    if (!reads_packed_) return level_.stream_rows;
    return has_4_bits(p_.b.kind) ? level_.rows_4bit : level_.packed_rows;
  }

  // Multiplies the block `at` without a panel and prefetches the block `next`.
  void stream(Tile tile, BlockIndex at, BlockIndex next) const;

  // The smallest part of K that is unpacked at a time. Columns that are not packed are each in another page,
  // so a small part would not be worth a page access.
  int64_t piece() const { return reads_packed_ ? kChunk : kBlock; }

  // Unpacks k = begin to end of a block to the same k of its panel. Both are multiples of kChunk, or `end` is
  // the end of the block.
  void unpack(BlockIndex at, int64_t begin, int64_t end, std::byte* panel) const;

  // Prefetches the memory that unpack() will read, into the second-level cache.
  void prefetch(BlockIndex at, int64_t begin, int64_t end) const;

 private:
  int64_t row_bytes() const { return bytes_of(p_.b.panel_kind()); }
  const char* block(BlockIndex at) const { return p_.b.block(at.n, at.kb * kBlock); }
  void get_pointers(BlockIndex at, const void** b) const;
  void unpack_to_rows(BlockIndex at) const;
  void compute_shifts(BlockIndex at) const;

  const Problem& p_;
  const Level& level_;
  bool reads_packed_;
  char* rows_ = nullptr;        // buffer of rows that the level reads, if it cannot read `b` directly
  char* codes_ = nullptr;       // buffer of rows of packed columns in MX blocks
  uint16_t* shifts_ = nullptr;  // of packed columns in MX blocks, for a level that reads these
};

}  // namespace fp8serve::gemm
