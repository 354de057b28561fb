"""Instructions of inner loops are counted from a listing as objdump prints it."""

from benchmarks.inner_loops import count, table

X86 = """
0000000000001000 <void fp8serve::gemm::avx2_level::panel_rows<1, false>(fp8serve::gemm::Tile const&, int)>:
    1000:\tvmovups (%rdi),%ymm0
    1005:\tvfmadd231ps %ymm0,%ymm1,%ymm2
    100a:\tvfmadd231ps (%rsi),%ymm1,%ymm3
    100f:\tadd    $0x20,%rsi
    1013:\tjne    1005 <void fp8serve::gemm::avx2_level::panel_rows<1, false>(fp8serve::gemm::Tile const&, int)+0x5>
    1015:\tdec    %rax
    1018:\tjne    1000 <void fp8serve::gemm::avx2_level::panel_rows<1, false>(fp8serve::gemm::Tile const&, int)>
    101a:\tret
"""
ARM = """
0000000000002000 <void fp8serve::gemm::neonfhm_level::stream_rows<fp8serve::gemm::neonfhm_level::Fp8Source<fp8serve::\
Format<3, 7, 1138753536, 126u> >, 1, false>(fp8serve::gemm::Tile const&, unsigned char const* const*)>:
    2000:\tldrb\tw3, [x1, x2]
    2004:\tcbnz\tx3, 2000 <fp8serve::gemm::copy(int)>
    2008:\tldr\tq0, [x1, x2]
    200c:\tfmlal\tv1.4s, v0.4h, v2.4h
    2010:\tfmlal2\tv1.4s, v0.4h, v2.4h
    2014:\tb.ne\t2008 <fp8serve::gemm::copy(int)+0x8>  // b.any
    2018:\tbl\t2000 <fp8serve::gemm::copy(int)>
    201c:\tret
"""


def test_the_innermost_loop_with_most_multiply_adds_counts() -> None:
    assert count(X86) == {("avx2", "from a panel", 1): 64 * 4 / 16}
    assert count(ARM) == {("neonfhm", "in place", 1): 64 * 4 / 8}


def test_a_function_without_multiply_adds_is_left_out() -> None:
    assert count(X86.replace("vfmadd231ps", "vaddps")) == {}


def test_levels_are_rows_and_functions_are_columns() -> None:
    assert table(count(X86) | count(ARM)).splitlines() == [
        "| level | from a panel, 1 row | in place, 1 row |",
        "| --- | --- | --- |",
        "| `avx2` | 16.0 |  |",
        "| `neonfhm` |  | 32.0 |",
    ]
