"""Chooses the CUTLASS tile, or cuBLASLt, for each shape: writes a chip's lines of csrc/cuda/gemm_tiles.h.

    python -m benchmarks.gpu_measure tiles --tune --out OUT.json     times every compiled tile on this machine's GPU
    python benchmarks/gpu_tiles.py                                   predicts the lines of chips that were not measured

A prediction counts waves of tiles over the multiprocessors; a wave takes the products of a tile divided by the rate of
tiles of that size. Thin tiles, of 128 rows of the weights and few of the activations, are cut along K, so that the
multiprocessors share them evenly. A line is left out if the other lines of its kind of scales give its shape the same
choice. The tiles themselves are in csrc/cuda/gemm_sm*.cu; this module does not use torch.
"""

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NamedTuple

HEADER = Path(__file__).parents[1] / "csrc/cuda/gemm_tiles.h"
BEGIN, END = "    // begin of the table\n", "    // end of the table\n"


class TileChoice(NamedTuple):
    tile: str
    swizzle: int


class TileEntry(NamedTuple):
    scales: str
    m: int
    n: int
    k: int
    choice: TileChoice


class Chip(NamedTuple):
    multiprocessors: int
    tiles: dict[str, tuple[int, int, float]]  # rows, columns, share of the chip's rate (an estimate)
    inside: tuple[str, ...]  # tiles that were compiled for block scales

    def costs(self, tile: str, m: int, n: int) -> float:
        """The products of one multiprocessor for each index along K, divided by the rate of the tile. Thin tiles are
        cut along K, so a multiprocessor may have a fraction of one; of other tiles it has whole ones."""
        rows, columns, rate = self.tiles[tile]
        if is_thin(tile):
            return -(-n // rows) * -(-m // columns) / self.multiprocessors * rows * columns / rate
        return self.waves(tile, m, n) * rows * columns / rate

    def waves(self, tile: str, m: int, n: int) -> int:
        rows, columns, _ = self.tiles[tile]
        return -(-(-(-m // rows) * -(-n // columns)) // self.multiprocessors)


def is_thin(tile: str) -> bool:
    return tile.startswith("thin")


CHIPS = {
    90: Chip(
        132,
        {
            "medium": (128, 128, 0.92),
            "small": (64, 128, 0.75),
            "thin128": (128, 128, 0.85),
            "thin64": (128, 64, 0.6),
            "thin32": (128, 32, 0.35),
        },
        ("medium", "small"),
    ),
    100: Chip(148, {"large": (256, 128, 1.0), "small": (128, 128, 0.85)}, ("large", "small")),
    120: Chip(188, {"large": (128, 128, 1.0), "small": (64, 128, 0.85)}, ("large",)),
}
Shape = tuple[int, int, int]
# Tokens by the linears of Llama 8B (query, key and value as one; gate and up as one) and of wider models.
SHAPES: list[Shape] = [
    (m, n, k)
    for m, (n, k) in product(
        (32, 64, 128, 256, 1024, 4096, 8192), ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192))
    )
]
# Tokens by the joined linears of models of 1.1 and 8 billion parameters: query, key and value; gate and up.
JOINED_SHAPES: list[Shape] = [
    (m, n, k)
    for m, (n, k) in product(
        (1, 16, 24, 32, 48, 64, 96, 128, 256, 1024, 4096), ((2560, 2048), (11264, 2048), (6144, 4096), (28672, 4096))
    )
]
SWIZZLES = (1, 2, 4, 8)
SCALES = ("tensor", "row", "mixed", "block")  # as in csrc/cuda/tile_choice.h
THIN_ROWS = 128  # the most that a thin tile's kernel takes, of activations
Measure = Callable[[str, int, int, int, TileChoice], float]  # seconds; raises RuntimeError if the kernel refuses


def sixteenths(value: int) -> int:
    """16 log2(value), between powers of two on a straight line: as in the header."""
    octave = value.bit_length() - 1
    return 16 * octave + (value * 16 >> octave) - 16


def nearest(entries: list[TileEntry], scales: str, m: int, n: int, k: int) -> TileChoice | None:
    """The choice of the nearest entry of a kind of scales, the first among equally near ones; None without entries."""

    def distance(entry: TileEntry) -> int:
        apart = [abs(sixteenths(a) - sixteenths(b)) for a, b in ((m, entry.m), (n, entry.n), (k, entry.k))]
        return 2 * apart[0] + 2 * apart[1] + apart[2]

    of_kind = [e for e in entries if e.scales == scales]
    return min(of_kind, key=distance).choice if of_kind else None


def by_shape(number: int, m: int, n: int) -> TileChoice:
    """Returns the choice for a shape without an entry, or whose entry's kernel does not take it, as in the header."""
    if number == 90 and m <= THIN_ROWS:
        return TileChoice("thin32" if m <= THIN_ROWS // 2 else "thin64", 1)
    fills = -(-m // 128) * -(-n // 128) >= CHIPS[number].multiprocessors
    larger = "medium" if number == 90 else "large"
    return TileChoice(larger if fills else "small", 1)


def chosen(entries: list[TileEntry], number: int, scales: str, m: int, n: int, k: int) -> TileChoice:
    """The choice that a chip's kernels look up, as in the header: the nearest entry's; if this kind of scales has no
    entries, that of another kind or `by_shape`."""
    if best := nearest(entries, scales, m, n, k):
        return best
    if scales == "mixed":
        of_rows = chosen(entries, number, "row", m, n, k)
        return by_shape(number, m, n) if of_rows == BLAS and m <= THIN_ROWS else of_rows
    return chosen(entries, number, "tensor", m, n, k) if scales == "row" else by_shape(number, m, n)


BLAS, SKINNY = TileChoice("cublaslt", 1), TileChoice("skinny", 1)


def predicted(chip: Chip) -> Measure:
    """Returns a time, in products of one multiprocessor, for every tile that was compiled."""

    def cost(scales: str, m: int, n: int, k: int, choice: TileChoice) -> float:
        if choice in (BLAS, SKINNY):
            raise RuntimeError("only tiles are predicted")
        if is_thin(choice.tile) and m > THIN_ROWS:
            raise RuntimeError(f"thin tiles take at most {THIN_ROWS} rows")
        many = not is_thin(choice.tile) and chip.waves(choice.tile, m, n) > 4
        min_waves = 4 if many else 1  # in many waves, tiles share operands through the cache
        return chip.costs(choice.tile, m, n) * k * (1.0 if choice.swizzle == min_waves else 1.01)

    return cost


def candidates(chip: Chip, scales: str) -> list[TileChoice]:
    """Our tiles, the skinny kernel, and cuBLASLt, which does not take block scales."""
    tiles = chip.inside if scales == "block" else chip.tiles
    ours = [*(TileChoice(tile, swizzle) for tile, swizzle in product(tiles, SWIZZLES)), SKINNY]
    return ours if scales == "block" else [*ours, BLAS]


def fastest(chip: Chip, measure: Measure, scales: str, m: int, n: int, k: int) -> TileEntry:
    """Returns the entry with the fastest choice for one shape. RuntimeError if every kernel refuses the shape."""
    times: dict[TileChoice, float] = {}
    refusal = "no tile"
    for choice in candidates(chip, scales):
        try:
            times[choice] = measure(scales, m, n, k, choice)
        except RuntimeError as refused:
            refusal = str(refused)
    if not times:
        raise RuntimeError(f"No tile multiplies {m}x{n}x{k}: {refusal}")
    return TileEntry(scales, m, n, k, min(times, key=lambda choice: times[choice]))


def thinned(entries: list[TileEntry]) -> list[TileEntry]:
    """Returns the entries without those that the others of their kind already imply."""
    remaining = list(entries)
    for entry in entries:
        rest = [e for e in remaining if e != entry]
        if all(nearest(rest, *e[:4]) == e.choice for e in entries):
            remaining = rest
    return remaining


def table(chip: Chip, measure: Measure, scales: str) -> list[TileEntry]:
    """Returns the entries of one kind of scales."""
    shapes = JOINED_SHAPES if scales == "mixed" else SHAPES
    return thinned([fastest(chip, measure, scales, *shape) for shape in shapes])


class Table(NamedTuple):
    """The entries of one chip and one kind of scales. `origin`: "measured on ..." or "predicted ..."."""

    origin: str
    entries: list[TileEntry]


Tables = dict[tuple[int, str], Table]
"""The key: (chip, kind of scales)."""


def predicted_tables() -> Tables:
    """Returns the tables of every chip. "row" and "mixed" have none: their predictions are those of "tensor"."""
    origin = "predicted by waves, not measured"
    return {
        (number, scales): Table(origin, table(chip, predicted(chip), scales))
        for number, chip in CHIPS.items()
        for scales in ("tensor", "block")
    }


def lines(number: int, scales: str, tile_table: Table) -> list[str]:
    """Returns the lines of one chip and kind, as they stand in the header."""
    results = [f"    // sm_{number}, {scales}: {tile_table.origin}\n"]
    for _, m, n, k, (tile, swizzle) in tile_table.entries:
        results.append(f"    {{{number}, Scales::{scales}, {m}, {n}, {k}, {{Tile::{tile}, {swizzle}}}}},\n")
    return results


def parsed(text: str) -> Tables:
    """Returns the tables in the text of the header."""
    tables = {
        (int(chip), scales): Table(origin, []) for chip, scales, origin in re.findall(r"// sm_(\d+), (\w+): (.*)", text)
    }
    for chip, scales, *shape, tile, swizzle in re.findall(
        r"\{(\d+), Scales::(\w+), (\d+), (\d+), (\d+), \{Tile::(\w+), (\d+)\}\}", text
    ):
        m, n, k = map(int, shape)
        tables[int(chip), scales].entries.append(TileEntry(scales, m, n, k, TileChoice(tile, int(swizzle))))
    return tables


def rewritten(text: str, tables: Tables) -> str:
    """Returns the header with these tables in place of its own."""
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    order = sorted(tables, key=lambda key: (key[0], SCALES.index(key[1])))
    return text[:begin] + "".join(line for key in order for line in lines(*key, tables[key])) + text[end:]


def main() -> None:
    text = HEADER.read_text()
    measured = {key: tiles for key, tiles in parsed(text).items() if not tiles.origin.startswith("predicted")}
    HEADER.write_text(rewritten(text, predicted_tables() | measured))


if __name__ == "__main__":
    main()
