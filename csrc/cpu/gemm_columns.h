// Sixteen columns of `b`, a block of K at a time: their place, packed or not, and their way to the tiles.
#pragma once

#include "cpu/gemm.h"
#include "cpu/gemm_run.h"

namespace fp8serve::gemm {

// Block kb of K of the 16 columns from n.
struct Place {
  int64_t n, kb;
};

class Columns {
 public:
  Columns(const Problem& problem, const Level& level);

  // With at most this many rows the columns are streamed, otherwise unpacked to a panel.
  int64_t stream_rows() const { return reads_packed_ ? level_.packed_rows : level_.stream_rows; }

  // Multiplies them in place; those of `next` are prefetched meanwhile.
  void stream(Tile tile, Place at, Place next) const;

  // The smallest part of K that is worth unpacking separately: each row is in another page, and a part
  // should use it well.
  int64_t piece() const { return reads_packed_ ? kChunk : kBlock; }

  // Their values from k = begin to end, multiples of kChunk or the block's end, to their place in its panel.
  void unpack(Place at, int64_t begin, int64_t end, std::byte* panel) const;

  // Prefetches what unpack() will read into the second-level cache.
  void fetch(Place at, int64_t begin, int64_t end) const;

 private:
  int64_t row_bytes() const { return bytes_of(p_.b.panel_kind()); }
  const char* block(Place at) const { return p_.b.block(at.n, at.kb * kBlock); }
  void point(Place at, const void** b) const;
  void lay_out(Place at) const;
  void compute_shifts(Place at) const;

  const Problem& p_;
  const Level& level_;
  bool reads_packed_;
  char* rows_ = nullptr;   // where packed columns, or those in MX blocks, become rows that the level reads
  char* codes_ = nullptr;  // where packed columns in MX blocks become rows
  uint16_t* shifts_ = nullptr;  // of packed columns in MX blocks, for a level that reads these
};

}  // namespace fp8serve::gemm
