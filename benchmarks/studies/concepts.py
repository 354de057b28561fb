"""The pictures of docs/concepts.md, each computed by the product's own casts, states and layers: `make pictures`.

scale.svg     what a scale does to the rounding error of a tensor's values
delayed.svg   delayed scaling over a stream of tensors, one of which is larger than those before
travels.svg   the scale of one layer's input through calibration, serving, a fine-tune and serving again

python -m benchmarks.studies.concepts FOLDER
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8serve.charts import Panel, Points, svg_file
from fp8serve.fp8.autocast import autocast
from fp8serve.fp8.conversion import convert
from fp8serve.fp8.ops import dequantize
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.fp8.stateful import scaling_state

E4M3, LARGEST = torch.float8_e4m3fn, 448.0
HISTORY, SPIKE, STEPS = 16, 30, 70
STAGES = {"calibrate": 20, "serve": 20, "train": 60, "serve again": 20}  # steps of each


def _noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- what a scale does -------------------------------------------------------------------------------------------------


def scale_picture() -> str:
    """Weights of a linear layer, cast without a scale and with 448 / amax: the error of the values of each size."""
    weights = _noise(1 << 18) * 0.02
    binades = weights.abs().clamp(min=2.0**-16).log2().floor()
    exponents = [int(b) for b in sorted(set(binades.tolist())) if b > -16]
    share = [(float(e), 100 * float((binades == e).float().mean())) for e in exponents]
    fitting = float(LARGEST / weights.abs().amax())
    errors = {
        "scale 1": _errors(weights, binades, exponents, 1.0),
        f"scale {fitting:.0f}": _errors(weights, binades, exponents, fitting),
    }
    panels = [Panel("values of this size, %", {"weights": share}), Panel("mean rounding error, %", errors)]
    return svg_file("A cast to E4M3, without a scale and with 448 / amax", panels, "size of a value, as a power of two")


def _errors(x: Tensor, binades: Tensor, exponents: Iterable[int], scale: float) -> Points:
    q, _ = torch.ops.fp8serve.quantize(x, torch.tensor(scale), E4M3)
    relative = (dequantize(q, torch.tensor(1 / scale)) - x).abs() / x.abs()
    return [(float(e), 100 * float(relative[binades == e].mean())) for e in exponents]


# -- delayed scaling ---------------------------------------------------------------------------------------------------


def delayed_picture() -> str:
    """Draws a stream of tensors whose size drifts, and one step that is eight times as large."""
    linear = convert(nn.Sequential(nn.Linear(64, 16, bias=False)))
    recipe = DelayedScaling(amax_history_len=HISTORY)
    amaxes, ranges, cut = [], [], []
    for step in range(STEPS):
        x = _noise(128, 64, seed=step) * (1 + 0.5 * math.sin(step / 9)) * (8 if step == SPIKE else 1)
        reach = LARGEST / _input_scale(linear)
        amaxes.append((step, float(x.abs().amax())))
        ranges.append((step, reach if step else math.nan))  # before the first update the scale is 1
        cut.append((step, 100 * float((x.abs() > reach).float().mean())))
        _calibrating_step(linear, recipe, x)
    panels = [
        Panel("magnitude", {"amax": amaxes, "range": ranges}),
        Panel("values cut off, %", {"cut off": cut}),
    ]
    return svg_file(f"Delayed scaling with a history of {HISTORY} steps", panels, "step")


def _calibrating_step(model: nn.Module, recipe: DelayedScaling, x: Tensor) -> None:
    with torch.no_grad(), autocast(enabled=False, calibrating=True, recipe=recipe):
        model(x)


def _input_scale(linear: Any) -> float:
    return float(scaling_state(linear[-1])["input"].scale) if scaling_state(linear[-1]) else 1.0


# -- what travels ------------------------------------------------------------------------------------------------------


def travels_picture() -> str:
    """Draws the input of a network's second layer, and the range that its scale covers, over all four stages."""
    torch.manual_seed(0)
    model: Any = convert(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))
    history: list[float] = []
    model[-1].register_forward_pre_hook(lambda _, args: history.append(float(args[0].detach().abs().amax())))
    optimizer, target = torch.optim.AdamW(model.parameters(), lr=1e-2), _noise(32, 32, seed=5)
    recipe = DelayedScaling(amax_history_len=HISTORY)

    def serve(x: Tensor) -> None:
        with torch.no_grad(), autocast(recipe=recipe):
            model(x)

    def tune(x: Tensor) -> None:
        with autocast(recipe=recipe):
            loss = (model(x) - x @ target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    runs: dict[str, Callable[[Tensor], None]] = {
        "calibrate": lambda x: _calibrating_step(model, recipe, x), "serve": serve, "train": tune,
    }  # fmt: skip
    ranges: dict[str, list[tuple[float, float]]] = {}
    for step, stage in enumerate(_stages()):
        runs[stage.removesuffix(" again")](_noise(64, 32, seed=100 + step))
        ranges.setdefault(stage, []).append((step, LARGEST / _input_scale(model)))
    amaxes = {"amax": [(float(step), amax) for step, amax in enumerate(history)]}
    title = "The range of one scale: found, kept, trained, kept"
    return svg_file(title, [Panel("magnitude", amaxes | ranges)], "step")


def _stages() -> Iterator[str]:
    for stage, steps in STAGES.items():
        yield from [stage] * steps


PICTURES: dict[str, Callable[[], str]] = {
    "scale.svg": scale_picture,
    "delayed.svg": delayed_picture,
    "travels.svg": travels_picture,
}


def draw(folder: Path) -> None:
    """Write every picture into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in PICTURES.items():
        (folder / name).write_text(picture())


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
