"""The table of tiles: the kernels look up what Python writes."""

import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import gpu_tiles
from benchmarks.gpu_tiles import CHIPS, HEADER, SCALES, SHAPES, TileChoice, TileEntry, chosen
from fp8serve.fp8.selfcheck.candidates import TILES

ODD = [(1, 1, 16), (65, 48, 64), (100, 5120, 2048), (777, 11008, 4096), (3000, 3000, 3000), (1 << 20, 128, 1 << 18)]

LOOKUP = """
#include "cuda/gemm_tiles.h"
#include <cstdio>
int main() {
  const char* names[] = {"large", "medium", "small", "thin128", "thin64", "thin32", "cublaslt"};
  int chip, scales, m, n, k;
  while (scanf("%d %d %d %d %d", &chip, &scales, &m, &n, &k) == 5) {
    const auto found = fp8serve::tile_for(chip, static_cast<fp8serve::Scales>(scales), m, n, k);
    printf("%s %d\\n", names[static_cast<int>(found.tile)], found.swizzle);
  }
}
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_the_kernels_look_up_what_python_does(tmp_path: Path) -> None:
    (tmp_path / "lookup.cpp").write_text(LOOKUP)
    command = ["c++", "-std=c++20", "-Werror", "-Wall", f"-I{HEADER.parents[1]}", "lookup.cpp", "-o", "lookup"]
    subprocess.run(command, cwd=tmp_path, check=True)
    tables = {number: entries for number, (_, entries) in gpu_tiles.parsed(HEADER.read_text()).items()}
    asked = [(chip, scales, *shape) for chip in CHIPS for scales in range(len(SCALES)) for shape in [*SHAPES, *ODD]]
    words = "\n".join(" ".join(map(str, question)) for question in asked)
    answers = subprocess.run([tmp_path / "lookup"], input=words, capture_output=True, text=True, check=True).stdout
    found = [TileChoice(tile, int(swizzle)) for tile, swizzle in map(str.split, answers.splitlines())]
    assert found == [chosen(tables[chip], SCALES[scales], *shape) for chip, scales, *shape in asked]


def test_every_chip_has_a_table_and_says_where_it_is_from() -> None:
    tables = gpu_tiles.parsed(HEADER.read_text())
    assert set(tables) == set(CHIPS)
    for number, (origin, entries) in tables.items():
        if origin.startswith("predicted"):
            assert entries == gpu_tiles.predicted_table(CHIPS[number])
        else:
            assert origin.startswith("measured on ")
        assert {entry.scales for entry in entries} >= {"tensor", "block"}
        for entry in entries:
            assert entry.choice in gpu_tiles.candidates(CHIPS[number], entry.scales)


def test_tiles_are_those_of_the_kernels() -> None:
    for number, chip in CHIPS.items():
        source = (HEADER.parent / f"gemm_sm{number}.cu").read_text()
        assert {name for name in TILES if f"Tile::{name};" in source} == set(chip.tiles)
        for rows, columns, _ in chip.tiles.values():
            assert f"using Tile = Shape<_{rows}, _{columns}, _128>;" in source


def test_a_line_that_changes_no_answer_is_left_out() -> None:
    same = [TileEntry("tensor", m, 4096, 4096, TileChoice("large", 1)) for m in (64, 256, 1024)]
    other = TileEntry("tensor", 4096, 4096, 4096, TileChoice("small", 4))
    assert gpu_tiles.thinned([*same, other]) == [same[-1], other]


@pytest.mark.parametrize(("blas", "best"), [(1.0, TileChoice("small", 2)), (-0.5, gpu_tiles.BLAS)])
def test_the_fastest_tile_wins_and_refusals_do_not_count(blas: float, best: TileChoice) -> None:
    def measure(scales: str, m: int, n: int, k: int, choice: TileChoice) -> float:
        if choice.tile == "large":
            raise RuntimeError("kernel: is large, which does not multiply this here")
        return {"medium": 2.0, "small": 1.0, "cublaslt": blas}.get(choice.tile, 3.0) + abs(choice.swizzle - 2)

    assert gpu_tiles.fastest(CHIPS[90], measure, "row", 64, 64, 64).choice == best


def test_cublaslt_is_tried_where_it_can_multiply_and_never_predicted() -> None:
    for chip in CHIPS.values():
        assert gpu_tiles.BLAS in gpu_tiles.candidates(chip, "row")
        assert gpu_tiles.BLAS not in gpu_tiles.candidates(chip, "block")
        assert gpu_tiles.BLAS not in {entry.choice for entry in gpu_tiles.predicted_table(chip)}


def test_when_nothing_answers_it_says_why() -> None:
    def measure(*_: object) -> float:
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="No tile multiplies 64x64x64: no such kernel"):
        gpu_tiles.fastest(CHIPS[90], measure, "row", 64, 64, 64)


def test_a_table_is_written_in_its_place_and_read_back() -> None:
    text = HEADER.read_text()
    measured = [
        TileEntry("block", 64, 128, 256, TileChoice("medium", 8)),
        TileEntry("tensor", 1, 2, 3, TileChoice("small", 1)),
        TileEntry("tensor", 4, 5, 6, gpu_tiles.BLAS),
    ]
    tables = gpu_tiles.parsed(text) | {90: ("measured on a GPU, 2026-11-21", measured)}
    written = gpu_tiles.rewritten(text, tables)
    assert gpu_tiles.parsed(written) == tables
    assert gpu_tiles.rewritten(written, gpu_tiles.parsed(text)) == text


def test_thin_tiles_are_predicted_for_few_rows_only() -> None:
    """docs/cuda.md gives the first figure."""
    cost = gpu_tiles.predicted(CHIPS[90])
    small, thin = (cost("tensor", 64, 4096, 4096, TileChoice(tile, 1)) for tile in ("small", "thin64"))
    assert round(thin / small, 1) == 0.3
    with pytest.raises(RuntimeError, match="thin tiles take at most 128 rows"):
        cost("tensor", 129, 4096, 4096, TileChoice("thin128", 1))
    entries = gpu_tiles.predicted_table(CHIPS[90])
    rows = {(m, n) for _, m, n, _, choice in entries if gpu_tiles.is_thin(choice.tile)}
    assert {m for m, _ in rows} == {32, 64, 128}
    assert not any(gpu_tiles.is_thin(entry.choice.tile) for entry in entries if entry.scales == "block")
    text = (HEADER.parent / "gemm.h").read_text()
    assert f"kThinRows = {gpu_tiles.THIN_ROWS};" in text
