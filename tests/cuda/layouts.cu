// A program for the host that prints where CuTe places the operands of the instructions that our kernels use.
// test_layouts.py compares the lines with the emulator.
//
//   mma NAME OPERAND thread value offset    offset = row + rows * column of the element
//   load NAME source lane bit offset        16 bits of the 16 bytes at a lane's address
//   load NAME target thread bit offset      where ldmatrix brings them: to the place of the same offset
//   tile NAME WHOSE row column offset       element [row][column] of a swizzled tile in shared memory
//   matrix NAME WHOSE step start bits       a product's matrix there: its first element, and its descriptor's
//                                           upper 50 bits as a number (leading offset, stride, swizzle)
//
// WHOSE: cute, or ours (cuda/wgmma_matrix.h).
#include <cinttypes>
#include <cstdio>
#include <cute/atom/copy_traits_sm75.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/atom/mma_traits_sm89.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

#include "cuda/wgmma_matrix.h"

using namespace cute;

template <class Layout>
void list(const char* kind, const char* name, const char* operand, int step, const Layout& layout) {
  for (int thread = 0; thread < int(size<0>(layout)); ++thread) {
    for (int value = 0; value < int(size<1>(layout)); value += step) {
      std::printf("%s %s %s %d %d %d\n", kind, name, operand, thread, value, int(layout(thread, value)));
    }
  }
}

template <class Instruction>
void mma(const char* name) {
  using Traits = MMA_Traits<Instruction>;
  list("mma", name, "a", 1, typename Traits::ALayout{});
  list("mma", name, "b", 1, typename Traits::BLayout{});
  list("mma", name, "c", 1, typename Traits::CLayout{});
}

template <class Instruction>
void load(const char* name) {
  using Traits = Copy_Traits<Instruction>;
  list("load", name, "source", 16, typename Traits::SrcLayout{});
  list("load", name, "target", 16, typename Traits::DstLayout{});
}

// The fragments of a warpgroup's product: sums, and the left operand in registers.
template <class Shared, class Registers>
void wgmma(const char* name) {
  list("mma", name, "a", 1, typename MMA_Traits<Registers>::ALayout{});
  list("mma", name, "c", 1, typename MMA_Traits<Shared>::CLayout{});
  static_assert(is_same_v<typename MMA_Traits<Shared>::CLayout, typename MMA_Traits<Registers>::CLayout>);
}

// A tile of BF16 with `rows` rows, the dimension `columns` contiguous, in panels of 64 columns.
template <class Layout>
void tile(const char* name, int rows, int columns, const Layout& cute) {
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; ++column) {
      const auto chunk = fp8serve::swizzled_chunk(uint32_t(rows), uint32_t(row), uint32_t(column) / 8);
      std::printf("tile %s cute %d %d %d\n", name, row, column, int(cute(row, column)));
      std::printf("tile %s ours %d %d %d\n", name, row, column, int(8 * chunk) + column % 8);
    }
  }
}

void matrix(const char* name, const char* whose, int step, int start, uint64_t descriptor) {
  std::printf("matrix %s %s %d %d %" PRIu64 "\n", name, whose, step, start, descriptor >> 14);
}
// The matrix of every product in a tile of CuTe, by its descriptor. (The host has no addresses of shared
// memory: CuTe warns, and uses 0.)
template <GMMA::Major kMajor, class Product, class Layout>
void cute_matrices(const char* name, int steps, const Layout& layout) {
  alignas(1024) static bfloat16_t memory[128 * 128];
  const auto whole = make_tensor(make_smem_ptr(memory), layout);
  for (int step = 0; step < steps; ++step) {
    const auto one = local_tile(whole, Product{}, make_coord(0, step));
    matrix(name, "cute", step, int(raw_pointer_cast(one.data()) - memory), GMMA::make_gmma_desc<kMajor>(one));
  }
}
int start_of(uint64_t descriptor) { return int(descriptor & 0x3fff) * 8; }

// Rows of M or N, columns of K: a product takes 64 rows and 16 columns.
template <int kRows, int kColumns>
void k_columns(const char* name) {
  const auto layout =
      tile_to_shape(GMMA::Layout_K_SW128_Atom<bfloat16_t>{}, Shape<Int<kRows>, Int<kColumns>>{});
  tile(name, kRows, kColumns, as_position_independent_swizzle_layout(layout));
  cute_matrices<GMMA::Major::K, Shape<_64, _16>>(name, kColumns / 16, layout);
  for (uint32_t step = 0; step < kColumns / 16; ++step) {
    const uint64_t ours = fp8serve::k_columns(0, kRows, step);
    matrix(name, "ours", int(step), start_of(ours), ours);
  }
}

// Rows of K, columns of N: a product takes 16 rows and all columns.
template <int kRows, int kColumns>
void k_rows(const char* name) {
  const auto layout = tile_to_shape(GMMA::Layout_MN_SW128_Atom<bfloat16_t>{},
                                    Shape<Int<kColumns>, Int<kRows>>{}, Step<_2, _1>{});
  const auto places = as_position_independent_swizzle_layout(layout);
  tile(name, kRows, kColumns, [&](int row, int column) { return places(column, row); });
  cute_matrices<GMMA::Major::MN, Shape<Int<kColumns>, _16>>(name, kRows / 16, layout);
  for (uint32_t step = 0; step < kRows / 16; ++step) {
    const uint64_t ours = fp8serve::k_rows(16 * step * fp8serve::kPanelRow, kRows, kColumns);
    matrix(name, "ours", int(step), start_of(ours), ours);
  }
}

int main() {
  mma<SM89_16x8x32_F32E4M3E4M3F32_TN>("e4m3-e4m3");
  mma<SM89_16x8x32_F32E4M3E5M2F32_TN>("e4m3-e5m2");
  mma<SM89_16x8x32_F32E5M2E4M3F32_TN>("e5m2-e4m3");
  mma<SM89_16x8x32_F32E5M2E5M2F32_TN>("e5m2-e5m2");
  mma<SM80_16x8x16_F32BF16BF16F32_TN>("bf16");
  load<SM75_U32x4_LDSM_N>("as-it-lies");
  load<SM75_U16x8_LDSM_T>("transposed");
  constexpr auto kK = GMMA::Major::K, kN = GMMA::Major::MN;
  wgmma<SM90_64x64x16_F32BF16BF16_SS<kK, kK>, SM90_64x64x16_F32BF16BF16_RS<kK, kN>>("warpgroup-64");
  wgmma<SM90_64x128x16_F32BF16BF16_SS<kK, kK>, SM90_64x128x16_F32BF16BF16_RS<kK, kN>>("warpgroup-128");
  k_columns<64, 64>("keys-64");
  k_columns<64, 128>("keys-128");
  k_columns<128, 128>("queries-128");
  k_rows<64, 64>("values-64");
  k_rows<64, 128>("values-128");
}
