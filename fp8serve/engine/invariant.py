"""Linear layers whose rows do not depend on each other: an answer must not depend on who shares its batch.

Our CPU kernels sum in one order whatever the shape of the product (csrc/cpu/gemm.h, tests/csrc): with them every layer
runs as it is, BF16 ones by `OwnLinear` (fp8/own_linear.py). Without them, layers are measured.

A matrix library picks its routine, and with it the order of its sums, by the shape of the product. torch's BF16 linear
on a CPU gives a row the same bits among 2 or 512 rows but others when it is alone; its FP32 linear changes at 2, 4 and
5. So there each layer is measured once, when the engine starts: random rows, several heights, every row compared bit
for bit with the same row computed in a tile of `BASE` rows, and at another place in that tile.

  * if all heights agree (our kernels are written so that they do), an FP8 layer runs as it is, and one of torch's in
    tiles, because a library may change its routine at any height that was not measured;
  * if some agree, the layer runs in tiles of those heights, the last padded with zeros;
  * if a row depends on its neighbours within a tile (one activation scale per tensor), it runs one row at a time, which
    is slow but right.

A measurement is evidence and not proof, so it is made sensitive. Two orders of summation differ in the last bits of an
FP32 sum; a BF16 result shows that in one element of thirty thousand. FP8 layers are therefore measured with an FP32
result, and a BF16 layer on a weight of its shape for which every exact sum is zero, so that the result is the rounding.
Only measured heights are ever run, except by an FP8 layer in the first case, for which only a sample of heights was
measured.

Costs: about 1,000 rows through one layer of every kind, once; for BF16 layers a weight's memory, briefly.
"""

from collections.abc import Callable, Mapping
from copy import copy
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.served_adapters import ServedAdapters

BASE = 16
TILES = (4, BASE, 128)
SAMPLE = (1, 2, 3, 5, 7, 8, 9, 13, 17, 31, 33, 64, 65, 127)

Rows = Callable[[Tensor], Tensor]  # [rows, in] -> [rows, out]


class RowIndependent(nn.Module):
    """Runs `inner` on [..., in] in tiles of the given heights; no heights: as it is. beside: adapters that are served
    with it, which see all rows."""

    adapters: ServedAdapters | None = None

    def __init__(self, inner: nn.Module, heights: tuple[int, ...]) -> None:
        super().__init__()
        self.inner = inner
        self.heights = heights

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() > 2:
            return self(input.flatten(0, -2)).unflatten(0, input.shape[:-1])  # type: ignore[no-any-return]
        y = self._tiled(input)
        return y if self.adapters is None else self.adapters.add(y, input)

    def _tiled(self, x: Tensor) -> Tensor:
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
    """The heights in which `inner` gives every row of `x` the same bits; () when it does in any height.

    x: [at least BASE, in]; no height above its number of rows is tried.
    """
    base = _in_tiles(inner, x, BASE)
    # rolled by less than a tile: every row has another place and other neighbours
    if not torch.equal(base, _in_tiles(inner, x.roll(5, 0), BASE).roll(-5, 0)):
        return (1,)
    tried = [height for height in (*TILES, *SAMPLE) if height <= len(x)]
    agreeing = [height for height in tried if _agrees(inner, x, height, base)]
    return () if agreeing == tried else tuple(height for height in agreeing if height in TILES)


def _in_tiles(inner: Rows, x: Tensor, height: int) -> Tensor:
    return torch.cat([_in_tile(inner, part, height) for part in torch.split(x, height)])


def _agrees(inner: Rows, x: Tensor, height: int, base: Tensor) -> bool:
    """Heights that would be run are tried on all of x; the others, which only show that any height works, on one
    tile."""
    some = x if height in TILES else x[:height]
    return torch.equal(_in_tiles(inner, some, height), base[: len(some)])


@torch.inference_mode()
def make_row_independent(
    model: nn.Module, layers: Mapping[str, nn.Module], dtype: torch.dtype, most_rows: int
) -> dict[str, tuple[int, ...]]:
    """Wraps the linear `layers` of `model`, given by name, in place; they take up to `most_rows` rows of `dtype`.

    Returns the heights of each, () for a layer that runs as it is.
    """
    found: dict[str, tuple[int, ...]] = {}
    known: dict[object, tuple[int, ...]] = {}
    rows = min(max(TILES), max(BASE, most_rows))
    for name, layer in layers.items():
        kind = _kind(layer)
        if kind not in known:
            known[kind] = measure(*_sensitive(layer, dtype, rows)) or _trusted(layer, rows)
        found[name] = known[kind]
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, RowIndependent(layer, found[name]))
    return found


def _trusted(layer: nn.Module, rows: int) -> tuple[int, ...]:
    """The heights for a layer that agreed at every height that was tried, up to `rows`."""
    return tuple(height for height in TILES if height <= rows) if isinstance(layer, nn.Linear) else ()


def _kind(layer: nn.Module) -> object:
    """Equal for layers that run the same routines: same class, settings, shapes and types."""
    tensors = [(name, tuple(t.shape), t.dtype) for name, t in layer.state_dict().items()]
    return repr(layer), *tensors


def _sensitive(layer: nn.Module, dtype: torch.dtype, rows: int) -> tuple[Rows, Tensor]:
    """A module that computes like `layer` but shows its roundings, and an input for it: [rows, in]."""
    rng = torch.Generator().manual_seed(0)
    if isinstance(layer, FrozenLinear):
        twin = copy(layer)
        twin.out_dtype = torch.float32
        x = torch.randn(rows, layer.in_features, generator=rng)
        return twin, x.to(layer.weight_q.device, dtype)
    if isinstance(layer, nn.Linear):
        half = torch.randn(rows + 64, layer.in_features // 2, generator=rng).to(layer.weight.device, dtype)
        a, b, odd = half[:rows], half[rows:], layer.in_features % 2
        # rows [a, a] and weights [b, -b]: every sum is zero but for its roundings
        weight = functional.pad(torch.cat([b, -b], 1), (0, odd))
        weight = weight.repeat(-(-layer.out_features // 64), 1)[: layer.out_features]
        return partial(functional.linear, weight=weight), functional.pad(torch.cat([a, a], 1), (0, odd))
    raise TypeError(f"There is no measurement for {type(layer).__name__}.")
