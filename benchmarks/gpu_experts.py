"""Products of experts on this machine's GPU, for gpu_measure.py: a layer of Qwen3-30B-A3B, 128 experts, 8 per token.

Times `grouped_mm` (gate and up of all experts in one call) and `grouped_wgrad`. Beside them: one `scaled_mm` for each
expert that has rows, for which the host knows the number of rows in advance here, and torch's grouped product if it
takes these operands. Tokens choose their experts at random, so few experts have enough rows to fill a tile.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
from torch import Tensor

OPS = torch.ops.fp8serve
E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
EXPERTS, PER_TOKEN, OUT, IN = 128, 8, 1536, 2048
TOKENS = (1, 8, 64, 512, 4096)
Row = dict[str, Any]
Cast = tuple[Tensor, Tensor]


class Bench(Protocol):
    """The part of gpu_measure.Bench that is used here."""

    @property
    def device(self) -> str: ...
    def size(self, full: int) -> int: ...
    def noise(self, *shape: int) -> Tensor: ...
    def seconds(self, work: Callable[[int], Any], sets: int, repeats: int = 30) -> float: ...
    def copy_bandwidth(self) -> float: ...


def routed(tokens: int, experts: int) -> list[int]:
    """Returns the end of each expert's rows, when every token chooses PER_TOKEN experts."""
    make = torch.Generator().manual_seed(0)
    chosen = torch.stack([torch.randperm(experts, generator=make)[:PER_TOKEN] for _ in range(tokens)])
    ends: list[int] = torch.bincount(chosen.flatten(), minlength=experts).cumsum(0).tolist()
    return ends


def stacked(quantize: Callable[[Tensor], Cast], weights: Tensor) -> Cast:
    """Casts the weights [E, N, K] expert by expert; returns the casts and the scales, each stacked over experts."""
    q, scales = zip(*map(quantize, weights), strict=True)
    return torch.stack([x.view(torch.uint8) for x in q]).view(q[0].dtype), torch.stack(scales)


def one_by_one(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, spans: list[tuple[int, int]]) -> None:
    for e, (begin, end) in enumerate(spans):
        if begin < end:
            scale = a_scale[begin:end] if a_scale.dim() else a_scale
            OPS.scaled_mm(a[begin:end], b[e], scale, b_scale[e], None, BF16)


def measured(bench: Bench, what: str, flops: float, works: dict[str, Callable[[], Any]]) -> Iterator[Row]:
    for by, work in works.items():
        try:
            took = bench.seconds(lambda _, w=work: w(), 1, 20)  # type: ignore[misc]
            yield {"what": what, "by": by, "us": took * 1e6, "TFLOP/s": flops / took / 1e12}
        except RuntimeError as refused:
            yield {"what": what, "by": by, "refused": str(refused)[:200]}


def multiplying(bench: Bench, tokens: int, kind: str) -> Iterator[Row]:
    """The forward product of all experts. kind: of the scales, "row" or "block"."""
    experts, out, inner = bench.size(EXPERTS), bench.size(OUT), bench.size(IN)
    ends = routed(bench.size(tokens), max(experts, PER_TOKEN))
    rows, spans = ends[-1], list(pairwise([0, *ends]))
    offsets = torch.tensor(ends, dtype=torch.int32, device=bench.device)
    of_rows: Callable[..., Cast] = OPS.quantize_rowwise if kind == "row" else partial(OPS.quantize_block, block_rows=1)
    of_weights = OPS.quantize_rowwise if kind == "row" else partial(OPS.quantize_block, block_rows=128)
    a, a_scale = of_rows(bench.noise(rows, inner), dtype=E4M3, power_2=False)
    b, b_scale = stacked(partial(of_weights, dtype=E4M3, power_2=False), bench.noise(len(ends), out, inner))
    works: dict[str, Callable[[], Any]] = {
        "grouped_mm": lambda: OPS.grouped_mm(a, b, a_scale, b_scale, offsets, None, BF16),
        "scaled_mm of each": lambda: one_by_one(a, b, a_scale, b_scale, spans),
    }
    if kind == "row":
        functional = cast(Any, torch.nn.functional)
        by_row = functional.ScalingType.RowWise
        scales = a_scale.flatten(), by_row, b_scale.flatten(1), by_row
        works["torch"] = lambda: functional.scaled_grouped_mm(
            a, b.transpose(1, 2), *scales, offs=offsets, output_dtype=BF16
        )
    what = f"experts {tokens} tokens, {kind}"
    copy, used = bench.copy_bandwidth(), sum(begin < end for begin, end in spans)
    for row in measured(bench, what, 2.0 * rows * out * inner, works):
        yield row | ({"of copy": used * out * inner / (row["us"] * 1e-6) / copy} if "us" in row else {})


def training(bench: Bench, tokens: int) -> Iterator[Row]:
    """The gradient of all experts' weights."""
    ends = routed(bench.size(tokens), max(bench.size(EXPERTS), PER_TOKEN))
    rows, out, inner = ends[-1], bench.size(OUT), bench.size(IN)
    offsets = torch.tensor(ends, dtype=torch.int32, device=bench.device)
    dy, dy_scale = OPS.quantize_current(bench.noise(out, rows), E5M2, False)
    x, x_scale = OPS.quantize_current(bench.noise(inner, rows), E4M3, False)

    def each() -> None:
        for begin, end in pairwise([0, *ends]):
            if begin < end:
                OPS.scaled_mm(dy[:, begin:end], x[:, begin:end], dy_scale, x_scale, None, BF16)

    works: dict[str, Callable[[], Any]] = {
        "grouped_wgrad": lambda: OPS.grouped_wgrad(dy, x, dy_scale, x_scale, offsets, BF16),
        "scaled_mm of each": each,
    }
    yield from measured(bench, f"experts {tokens} tokens, wgrad", 2.0 * rows * out * inner, works)
