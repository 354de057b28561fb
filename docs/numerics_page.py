"""docs/numerics-classes.md, made from the table of numerics classes: `make numerics`."""

from collections.abc import Iterable, Sequence

from fp8serve.fp8.numerics_classes import AMX, CHIPS, CLASSES, INVARIANT, LEVELS, REFERENCE, ROWS

HEAD = """# Numerics classes

Made by `make numerics` from `fp8serve/fp8/numerics_classes.py`. A kernel that sums belongs to a *numerics class*, which
says what is exact and in which order it adds. **In one row of a table below, cells with the same class are equal to the
bit**, with any number of threads and in any batch, if the class is one of the first table. `fp8serve doctor` prints the
column of the machine and the processors with the same bits. [Numerics](numerics.md) specifies the numbers themselves.
"""
CPU = """## On a CPU

The columns are the levels of the CPU library: `portable` runs everywhere, `avx2`, `avx512` and `avx512bf16` (with VBMI)
on x86, `neon`, `neonfhm` and `neonbf16` on 64-bit ARM. Columns with the same classes are one. `amx` has products on
tiles of BF16; no machine with AMX has measured them, so they run only after `torch.ops.fp8serve.cpu_isa("amx")`.
`reference` is plain PyTorch, which serves an op where there is no kernel.
"""
ON_CPU = """`avx512bf16` differs in two ways. Attention of BF16 queries takes 64 keys at a time there and rounds its
weights to BF16. And its products of BF16 take values and sums that are subnormal in FP32 (below 2^-126) as zero.
On the other levels, products of BF16 values below 2^-126 are rounded before they are added (`portable`) or with the
sum, so `four_lanes` does not promise their bits. Products of two FP8 or MX operands never come so low.

ARM's I8MM has no level, as VNNI has none: INT8 holds E4M3 numbers of four neighboring exponents only, so an exact
product takes three INT8 products or more (`benchmarks/int8_groups.py`). Nor do `BFDOT` and `BFMMLA` give the bits of
any class: they round sums to odd, or add two products to each other first. SVE has no level because
[it saves no instructions](performance-log.md#2026-11-28-instructions-of-a-product-on-arm) where its registers are those
of NEON.
"""
GPU = """## On a GPU

The columns are the chips that the library has code for, and any of them with
[`--invariant`](cuda.md#the-invariant-mode). Apart from `exact`, bits are promised on one chip only. The last column
names the row of [what has run where](cuda.md#what-has-run-where) that says on which chips the kernels have run; `none`
stands for a row that PyTorch computes.
"""
PROOF = (
    (
        "x86, `reference`",
        "`tests/csrc/test_numerics.py` runs every case of every op and the edges of each row (subnormal values, "
        "infinities, NaN, several blocks of K) at all levels of the machine. Levels of one class must be equal, levels "
        "of two classes must differ in some case, and each must be as near to the reference as its class allows. What "
        "kernels report must be the classes of this page. `tests/csrc/test_order_of_sums.py` compares the bits of "
        "every level with models of `four_lanes` and `pairs_bf16` in NumPy",
    ),
    (
        "`amx`",
        "the same tests, with the instructions where the processor has them, and with what Intel's manual says that "
        "they do (`emulated_amx`)",
    ),
    (
        "`neon`, `neonfhm`, `neonbf16`",
        "`make arm` repeats these cases in an emulator and compares the bits with those of x86",
    ),
    ("chips, `invariant`", "the tests of `tests/cuda`, on the emulated GPU and on the chips that cuda.md names"),
    ("this page", "`tests/test_site.py::test_the_page_of_numerics_classes_is_up_to_date`"),
)
PARTS = "An op that is not listed is a sequence of listed ones, and has the classes of its parts.\n"


def page() -> str:
    """The whole text."""
    universal = [(f"`{name}`", c.promise) for name, c in CLASSES.items() if c.error is not None]
    local = [(f"`{name}`", c.promise) for name, c in CLASSES.items() if c.error is None]
    return "\n".join(
        [
            HEAD,
            "## The classes\n",
            "The same bits on every machine:\n",
            _table(("class", "what is exact, and the order of summation"), universal),
            "The same bits on one machine; another may give others:\n",
            _table(("class", "what is exact, and the order of summation"), local),
            CPU,
            _cells_table((*LEVELS, AMX, REFERENCE), ("ops",), [(_code(row.ops),) for row in ROWS]),
            ON_CPU,
            GPU,
            _cells_table((*CHIPS, INVARIANT), ("what has run where",), [(row.evidence or "none",) for row in ROWS]),
            "## What proves it\n",
            _table(("cells", "proof"), PROOF),
            PARTS,
        ]
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, ["---"] * len(header), *rows))


def _cells_table(columns: Sequence[str], last: tuple[str], last_cells: Sequence[tuple[str]]) -> str:
    """Returns the cells of all rows. Columns with the same cells are joined."""
    joined: dict[tuple[str, ...], list[str]] = {}
    for column in columns:
        joined.setdefault(tuple(row.cells[column] for row in ROWS), []).append(column)
    header = ("operation", "format", *map(_code, joined.values()), *last)
    cells = zip(*joined, strict=True)
    rows = zip(ROWS, cells, last_cells, strict=True)
    return _table(header, [(r.operation, r.format, *(f"`{c}`" for c in own), *end) for r, own, end in rows])


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    print(page(), end="")
