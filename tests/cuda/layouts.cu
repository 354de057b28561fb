// Where CuTe says that the operands of the instructions lie which our kernels use: a program for the host,
// whose lines test_layouts.py compares with the emulator.
//
//   mma NAME OPERAND thread value offset    offset = row + rows * column of the element
//   load NAME source lane bit offset        16 bits of the 16 bytes at a lane's address
//   load NAME target thread bit offset      where ldmatrix brings them: to the place of the same offset
#include <cstdio>
#include <cute/atom/copy_traits_sm75.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/atom/mma_traits_sm89.hpp>

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

int main() {
  mma<SM89_16x8x32_F32E4M3E4M3F32_TN>("e4m3-e4m3");
  mma<SM89_16x8x32_F32E4M3E5M2F32_TN>("e4m3-e5m2");
  mma<SM89_16x8x32_F32E5M2E4M3F32_TN>("e5m2-e4m3");
  mma<SM89_16x8x32_F32E5M2E5M2F32_TN>("e5m2-e5m2");
  mma<SM80_16x8x16_F32BF16BF16F32_TN>("bf16");
  load<SM75_U32x4_LDSM_N>("as-it-lies");
  load<SM75_U16x8_LDSM_T>("transposed");
}
