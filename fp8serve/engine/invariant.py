"""Linear layers whose rows do not depend on each other: an answer must not depend on who shares its batch.

A matrix library picks its routine, and with it the order of its sums, by the shape of the product. torch's BF16 linear
on a CPU gives a row the same bits among 2 or 512 rows but others when it is alone; its FP32 linear changes at 2, 4 and
5. So each layer is measured once, when the engine starts: random rows, several heights, every row compared bit for bit
with the same row computed in a tile of `BASE` rows, and at another place in that tile.

  * all heights agree (our kernels are written to): the layer runs as it is;
  * some agree: it runs in tiles of those heights, the last filled up with zeros;
  * a row depends on its neighbours within a tile (one activation scale per tensor): one row at a time. Slow, and right.

Random data is evidence and not proof, but a different order of summation shows in nearly every random row, and only
heights that were measured are ever run (but in the first case, where a sample of them was).

Costs: the measurement multiplies about 600 rows per distinct layer shape, once.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

BASE = 16
TILES = (4, BASE, 128)
SAMPLE = (1, 2, 3, 5, 7, 8, 9, 13, 17, 31, 33, 64, 65, 127)

Rows = Callable[[Tensor], Tensor]  # [rows, in] -> [rows, out]


class RowIndependent(nn.Module):
    """Runs `inner` on [rows, in] in tiles of the given heights; no heights: as it is."""

    def __init__(self, inner: nn.Module, heights: tuple[int, ...]) -> None:
        super().__init__()
        self.inner = inner
        self.heights = heights

    def forward(self, x: Tensor) -> Tensor:
        if not self.heights or len(x) == 0:
            return self.inner(x)  # type: ignore[no-any-return]
        return torch.cat([_in_tile(self.inner, part, height) for part, height in _split(x, self.heights)])


def _split(x: Tensor, heights: tuple[int, ...]) -> list[tuple[Tensor, int]]:
    """`x` in consecutive parts, each with the height of its tile."""
    parts: list[tuple[Tensor, int]] = []
    while len(x):
        height = _height(len(x), heights)
        parts.append((x[:height], height))
        x = x[height:]
    return parts


def _height(rows: int, heights: tuple[int, ...]) -> int:
    """The tile that covers most rows; a larger one than needed where filling it up at most doubles the work."""
    larger = [height for height in heights if rows <= height < 2 * rows]
    smaller = [height for height in heights if height <= rows]
    return min(larger) if larger else max(smaller, default=min(heights))


def _in_tile(inner: Rows, part: Tensor, height: int) -> Tensor:
    """`inner` of [rows, in], computed among `height` rows."""
    if len(part) == height:
        return inner(part)
    filled = torch.cat([part, part.new_zeros(height - len(part), part.shape[1])])
    return inner(filled)[: len(part)]


def measure(inner: Rows, x: Tensor) -> tuple[int, ...]:
    """The heights in which `inner` gives every row of x [128, in] the same bits; () when any height does."""
    base = _in_tiles(inner, x, BASE)
    # rolled by less than a tile: every row has another place and other neighbours
    if not torch.equal(base, _in_tiles(inner, x.roll(5, 0), BASE).roll(-5, 0)):
        return (1,)
    agreeing = {height for height in (*TILES, *SAMPLE) if _agrees(inner, x, height, base)}
    return () if agreeing == {*TILES, *SAMPLE} else tuple(height for height in TILES if height in agreeing)


def _in_tiles(inner: Rows, x: Tensor, height: int) -> Tensor:
    return torch.cat([_in_tile(inner, part, height) for part in torch.split(x, height)])


def _agrees(inner: Rows, x: Tensor, height: int, base: Tensor) -> bool:
    """Heights that would be run are tried on all of x; the others, which only show that any would do, on one tile."""
    some = x if height in TILES else x[:height]
    return torch.equal(_in_tiles(inner, some, height), base[: len(some)])


@torch.inference_mode()
def make_row_independent(
    model: nn.Module, layers: Mapping[str, nn.Module], dtype: torch.dtype
) -> dict[str, tuple[int, ...]]:
    """Wraps the linear `layers` of `model`, given by name, in place; they take inputs of `dtype`.

    Returns the heights of each, () for a layer that runs as it is.
    """
    found: dict[str, tuple[int, ...]] = {}
    known: dict[object, tuple[int, ...]] = {}
    for name, layer in layers.items():
        kind = _kind(layer)
        if kind not in known:
            known[kind] = measure(layer, _random_rows(layer, dtype))
        found[name] = known[kind]
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, RowIndependent(layer, found[name]))
    return found


def _kind(layer: nn.Module) -> object:
    """Equal for layers that run the same routines: same class, settings, shapes and types."""
    tensors = [(name, tuple(t.shape), t.dtype) for name, t in layer.state_dict().items()]
    return repr(layer), *tensors


def _random_rows(layer: nn.Module, dtype: torch.dtype) -> Tensor:
    device = next(iter(layer.state_dict().values())).device
    rng = torch.Generator().manual_seed(0)
    return torch.randn(max(TILES), int(layer.in_features), generator=rng).to(device, dtype)  # type: ignore[arg-type]
