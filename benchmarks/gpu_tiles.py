"""Chooses the CUTLASS tile, or cuBLASLt, for each shape: writes a chip's lines of csrc/cuda/gemm_tiles.h.

    python benchmarks/gpu_measure.py --tune [OUT.h]     times every compiled tile on this machine's GPU
    python benchmarks/gpu_tiles.py                      predicts the lines of chips that have not been measured

A prediction counts waves of tiles over the multiprocessors; a wave takes the products of a tile divided by the rate of
tiles of that size. Thin tiles, of 128 rows of the weights and few of the activations, are cut along K, so that the
multiprocessors share them evenly. A line is left out if its shape gets the same answer without it. The tiles themselves
are in csrc/cuda/gemm_sm*.cu; this module does not use torch.
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
        """What a multiprocessor multiplies for each of K; a float of tiles where they are cut along K."""
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
# Tokens by the linears of Llama 8B (query, key and value as one; gate and up as one) and of wider models.
SHAPES = [
    (m, n, k)
    for m, (n, k) in product(
        (32, 64, 128, 256, 1024, 4096, 8192), ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192))
    )
]
SWIZZLES = (1, 2, 4, 8)
SCALES = ("tensor", "row", "block")  # as in csrc/cuda/tile_choice.h
THIN_ROWS = 128  # the most that a thin tile's kernel takes, of activations
Measure = Callable[[str, int, int, int, TileChoice], float]  # seconds; raises RuntimeError if the kernel refuses


def sixteenths(value: int) -> int:
    """16 log2(value), between powers of two on a straight line: as in the header."""
    octave = value.bit_length() - 1
    return 16 * octave + (value * 16 >> octave) - 16


def chosen(entries: list[TileEntry], scales: str, m: int, n: int, k: int) -> TileChoice:
    """The choice that the kernels will look up: that of the nearest entry, the first among equally near ones.

    Without entries for scales by row, that of one scale a tensor.
    """

    def distance(entry: TileEntry) -> int:
        apart = [abs(sixteenths(a) - sixteenths(b)) for a, b in ((m, entry.m), (n, entry.n), (k, entry.k))]
        return 2 * apart[0] + 2 * apart[1] + apart[2]

    of_kind = [e for e in entries if e.scales == scales]
    if not of_kind and scales == "row":
        return chosen(entries, "tensor", m, n, k)
    return min(of_kind, key=distance, default=TileEntry(scales, 1, 1, 1, DEFAULT)).choice


DEFAULT = TileChoice("large", 1)
BLAS = TileChoice("cublaslt", 1)


def predicted(chip: Chip) -> Measure:
    """A time, in products of one multiprocessor, for every tile that was compiled."""

    def cost(scales: str, m: int, n: int, k: int, choice: TileChoice) -> float:
        if choice == BLAS:
            raise RuntimeError("nobody knows cuBLASLt's tiles")
        if is_thin(choice.tile) and m > THIN_ROWS:
            raise RuntimeError(f"thin tiles take at most {THIN_ROWS} rows")
        many = not is_thin(choice.tile) and chip.waves(choice.tile, m, n) > 4
        wanted = 4 if many else 1  # many waves find operands of others in the cache
        return chip.costs(choice.tile, m, n) * k * (1.0 if choice.swizzle == wanted else 1.01)

    return cost


def candidates(chip: Chip, scales: str) -> list[TileChoice]:
    """Our tiles, and cuBLASLt, which does not take block scales."""
    tiles = chip.inside if scales == "block" else chip.tiles
    ours = [TileChoice(tile, swizzle) for tile, swizzle in product(tiles, SWIZZLES)]
    return ours if scales == "block" else [*ours, BLAS]


def fastest(chip: Chip, measure: Measure, scales: str, m: int, n: int, k: int) -> TileEntry:
    """Raises RuntimeError if no tile answers."""
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
    """The entries without those that the others already imply."""
    kept = list(entries)
    for entry in entries:
        rest = [e for e in kept if e != entry]
        if all(chosen(rest, *e[:4]) == e.choice for e in entries):
            kept = rest
    return kept


def table(chip: Chip, measure: Measure, kinds: tuple[str, ...] = SCALES) -> list[TileEntry]:
    entries = [fastest(chip, measure, scales, *shape) for scales in kinds for shape in SHAPES]
    return thinned(entries)


def predicted_table(chip: Chip) -> list[TileEntry]:
    """Scales by row change no prediction: their lines are left out."""
    return table(chip, predicted(chip), ("tensor", "block"))


def lines(number: int, entries: list[TileEntry], origin: str) -> list[str]:
    """The lines of one chip, as they stand in the header."""
    found = [f"    // sm_{number}: {origin}\n"]
    for scales, m, n, k, (tile, swizzle) in entries:
        found.append(f"    {{{number}, Scales::{scales}, {m}, {n}, {k}, {{Tile::{tile}, {swizzle}}}}},\n")
    return found


def parsed(text: str) -> dict[int, tuple[str, list[TileEntry]]]:
    """For each chip, the origin of its lines and their entries."""
    found: dict[int, tuple[str, list[TileEntry]]] = {}
    for chip, origin in re.findall(r"// sm_(\d+): (.*)", text):
        found[int(chip)] = (origin, [])
    for chip, scales, *shape, tile, swizzle in re.findall(
        r"\{(\d+), Scales::(\w+), (\d+), (\d+), (\d+), \{Tile::(\w+), (\d+)\}\}", text
    ):
        m, n, k = map(int, shape)
        found[int(chip)][1].append(TileEntry(scales, m, n, k, TileChoice(tile, int(swizzle))))
    return found


def rewritten(text: str, tables: dict[int, tuple[str, list[TileEntry]]]) -> str:
    """The header with these tables in place of its own."""
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    body = [line for chip, (origin, entries) in sorted(tables.items()) for line in lines(chip, entries, origin)]
    return text[:begin] + "".join(body) + text[end:]


def main() -> None:
    text = HEADER.read_text()
    known = {chip: found for chip, found in parsed(text).items() if not found[0].startswith("predicted")}
    guesses = {n: ("predicted by waves, not measured", predicted_table(chip)) for n, chip in CHIPS.items()}
    HEADER.write_text(rewritten(text, guesses | known))


if __name__ == "__main__":
    main()
