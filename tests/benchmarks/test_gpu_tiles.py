"""The table of GEMM tiles: Python writes it as a C++ header, and the kernels' lookup gives the same choices."""

import shutil
import subprocess
from collections.abc import Callable

import pytest

from benchmarks import gpu_tiles
from benchmarks.gpu_tiles import BLAS, CHIPS, HEADER, JOINED_SHAPES, SCALES, SHAPES, TileChoice, TileEntry, chosen
from fp8serve.fp8.selfcheck.switches import TILES

ODD = [(1, 1, 16), (65, 48, 64), (100, 5120, 2048), (777, 11008, 4096), (3000, 3000, 3000), (1 << 20, 128, 1 << 18)]

LOOKUP = """
#include "cuda/gemm_tiles.h"
#include <cstdio>
int main() {
  const char* names[] = {"large", "medium", "small", "thin128", "thin64", "thin32", "cublaslt", "skinny"};
  int chip, scales, m, n, k, multiprocessors;
  while (scanf("%d %d %d %d %d %d", &chip, &scales, &m, &n, &k, &multiprocessors) == 6) {
    const auto found = fp8serve::tile_for(chip, static_cast<fp8serve::Scales>(scales), m, n, k, multiprocessors);
    const auto other = fp8serve::tile_by_shape(chip, m, n, multiprocessors);
    printf("%s %d %s %d\\n", names[static_cast<int>(found.tile)], found.swizzle,
           names[static_cast<int>(other.tile)], other.swizzle);
  }
}
"""
Lookup = Callable[[list[tuple[int, str, int, int, int]]], list[tuple[TileChoice, TileChoice]]]
"""For chips, kinds of scales and shapes, returns the choice of the header's table, and the choice by shape alone."""


@pytest.fixture(scope="module")
def compile_lookup(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Lookup]:
    """Compiles a text of the header."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")

    def compiled(header: str) -> Lookup:
        folder = tmp_path_factory.mktemp("lookup")
        (folder / "cuda").mkdir()
        (folder / "cuda/gemm_tiles.h").write_text(header)
        (folder / "lookup.cpp").write_text(LOOKUP)
        places = [f"-I{folder}", f"-I{HEADER.parents[1]}"]
        command = ["c++", "-std=c++20", "-Werror", "-Wall", *places, "lookup.cpp", "-o", "lookup"]
        subprocess.run(command, cwd=folder, check=True)

        def look_up(questions: list[tuple[int, str, int, int, int]]) -> list[tuple[TileChoice, TileChoice]]:
            lines = [
                " ".join(map(str, (chip, SCALES.index(scales), *shape, CHIPS[chip].multiprocessors)))
                for chip, scales, *shape in questions
            ]
            command = [folder / "lookup"]
            answers = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=True).stdout
            words = [line.split() for line in answers.splitlines()]
            return [(TileChoice(a, int(b)), TileChoice(c, int(d))) for a, b, c, d in words]

        return look_up

    return compiled


@pytest.fixture(scope="module")
def look_up(compile_lookup: Callable[[str], Lookup]) -> Lookup:
    return compile_lookup(HEADER.read_text())


def entries_of(tables: gpu_tiles.Tables, number: int) -> list[TileEntry]:
    return [entry for (chip, _), table in tables.items() if chip == number for entry in table.entries]


def test_the_kernels_and_python_choose_the_same_tiles(look_up: Lookup) -> None:
    tables = gpu_tiles.parsed(HEADER.read_text())
    questions = [
        (chip, scales, *shape) for chip in CHIPS for scales in SCALES for shape in [*SHAPES, *JOINED_SHAPES, *ODD]
    ]
    expected = [
        (chosen(entries_of(tables, chip), chip, scales, *shape), gpu_tiles.by_shape(chip, *shape[:2]))
        for chip, scales, *shape in questions
    ]
    assert look_up(questions) == expected


def test_mixed_scales_without_entries_use_those_of_rows_or_a_thin_tile(compile_lookup: Callable[[str], Lookup]) -> None:
    """cuBLASLt entries are used from 129 rows on: for fewer, expanding the single scale takes as long as the
    product."""
    lines = [
        TileEntry("row", 32, 4096, 4096, BLAS),
        TileEntry("row", 128, 4096, 4096, TileChoice("thin32", 8)),
        TileEntry("row", 256, 4096, 4096, BLAS),
    ]
    text = gpu_tiles.rewritten(HEADER.read_text(), {(90, "row"): gpu_tiles.Table("measured on a GPU", lines)})
    questions = [(90, "mixed", m, 4096, 4096) for m in (17, 32, 100, 128, 256, 4096)]
    choices = [choice for choice, _ in compile_lookup(text)(questions)]
    assert choices == [TileChoice("thin32", 1)] * 2 + [TileChoice("thin32", 8)] * 2 + [BLAS] * 2


@pytest.mark.parametrize(
    ("chip", "m", "n", "tile"),
    [
        (90, 17, 2560, "thin32"),
        (90, 64, 28672, "thin32"),
        (90, 65, 28672, "thin64"),
        (90, 128, 6144, "thin64"),
        (90, 256, 4096, "small"),  # 64 tiles of 128x128 for 132 multiprocessors
        (90, 256, 28672, "medium"),
        (90, 1024, 6144, "medium"),
        (100, 32, 6144, "small"),
        (100, 4096, 6144, "large"),
        (120, 1024, 6144, "large"),
        (120, 256, 6144, "small"),
    ],
)
def test_the_fallback_tile_is_chosen_by_shape(look_up: Lookup, chip: int, m: int, n: int, tile: str) -> None:
    assert look_up([(chip, "mixed", m, n, 4096)])[0][1] == TileChoice(tile, 1)


def test_every_chip_has_a_table_with_its_origin() -> None:
    tables, predicted = gpu_tiles.parsed(HEADER.read_text()), gpu_tiles.predicted_tables()
    assert set(tables) >= set(predicted)
    for (number, scales), (origin, entries) in tables.items():
        if origin.startswith("predicted"):
            assert entries == predicted[number, scales].entries
        else:
            assert origin.startswith("measured on ")
        for entry in entries:
            assert entry.scales == scales
            assert entry.choice in gpu_tiles.candidates(CHIPS[number], scales)


def test_tiles_are_those_that_the_kernels_instantiate() -> None:
    for number, chip in CHIPS.items():
        source = (HEADER.parent / f"gemm_sm{number}.cu").read_text()
        assert {name for name in TILES if f"Tile::{name};" in source} == set(chip.tiles)
        for rows, columns, _ in chip.tiles.values():
            assert f"using Tile = Shape<_{rows}, _{columns}, _128>;" in source


def test_redundant_entries_are_removed() -> None:
    same = [TileEntry("tensor", m, 4096, 4096, TileChoice("large", 1)) for m in (64, 256, 1024)]
    other = TileEntry("tensor", 4096, 4096, 4096, TileChoice("small", 4))
    assert gpu_tiles.thinned([*same, other]) == [same[-1], other]


@pytest.mark.parametrize(("blas", "best"), [(1.0, TileChoice("small", 2)), (-0.5, gpu_tiles.BLAS)])
def test_the_fastest_tile_that_is_not_refused_is_chosen(blas: float, best: TileChoice) -> None:
    def measure(scales: str, m: int, n: int, k: int, choice: TileChoice) -> float:
        if choice.tile == "large":
            raise RuntimeError("kernel: is large, which does not multiply this here")
        return {"medium": 2.0, "small": 1.0, "cublaslt": blas}.get(choice.tile, 3.0) + abs(choice.swizzle - 2)

    assert gpu_tiles.fastest(CHIPS[90], measure, "row", 64, 64, 64).choice == best


def test_cublaslt_is_tried_where_it_can_multiply_and_never_predicted() -> None:
    for chip in CHIPS.values():
        assert {BLAS, gpu_tiles.SKINNY} <= set(gpu_tiles.candidates(chip, "row"))
        assert BLAS in gpu_tiles.candidates(chip, "mixed")
        assert BLAS not in gpu_tiles.candidates(chip, "block")
    for table in gpu_tiles.predicted_tables().values():
        assert not {BLAS, gpu_tiles.SKINNY} & {entry.choice for entry in table.entries}


def test_if_every_tile_is_refused_the_reason_is_given() -> None:
    def measure(*_: object) -> float:
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="No tile multiplies 64x64x64: no such kernel"):
        gpu_tiles.fastest(CHIPS[90], measure, "row", 64, 64, 64)


def test_written_tables_are_read_back() -> None:
    text = HEADER.read_text()
    mixed = [TileEntry("mixed", 1, 2, 3, TileChoice("small", 1)), TileEntry("mixed", 4, 5, 6, BLAS)]
    measured = {
        (90, "block"): [TileEntry("block", 64, 128, 256, TileChoice("medium", 8))],
        (90, "mixed"): mixed,
        (120, "row"): [TileEntry("row", 4, 5, 6, gpu_tiles.SKINNY)],
    }
    tables = gpu_tiles.parsed(text) | {
        key: gpu_tiles.Table("measured on a GPU, 2026-11-21", entries) for key, entries in measured.items()
    }
    rewritten = gpu_tiles.rewritten(text, tables)
    assert gpu_tiles.parsed(rewritten) == tables
    assert gpu_tiles.rewritten(rewritten, gpu_tiles.parsed(text)) == text


def test_thin_tiles_are_predicted_for_few_rows_only() -> None:
    """docs/cuda.md gives the first figure."""
    cost = gpu_tiles.predicted(CHIPS[90])
    small, thin = (cost("tensor", 64, 4096, 4096, TileChoice(tile, 1)) for tile in ("small", "thin64"))
    assert round(thin / small, 1) == 0.3
    with pytest.raises(RuntimeError, match="thin tiles take at most 128 rows"):
        cost("tensor", 129, 4096, 4096, TileChoice("thin128", 1))
    tables = gpu_tiles.predicted_tables()
    entries = entries_of(tables, 90)
    rows = {(m, n) for _, m, n, _, choice in entries if gpu_tiles.is_thin(choice.tile)}
    assert {m for m, _ in rows} == {32, 64, 128}
    assert not any(gpu_tiles.is_thin(entry.choice.tile) for entry in entries if entry.scales == "block")
    text = (HEADER.parent / "tile_choice.h").read_text()
    assert f"kThinRows = {gpu_tiles.THIN_ROWS};" in text
