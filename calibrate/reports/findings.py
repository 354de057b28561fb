"""The findings of a report of a calibration or an evaluation: what needs attention, as sentences.

Linears that read the same input are listed once, under the first one's name.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from fp8serve.calibration.reports.tables import count, decibels, listed, number, outlier_of, percent, short
from fp8serve.calibration.result import (
    UNEVEN,
    CalibrationReport,
    EvalReport,
    LayerReport,
    Quality,
    TensorReport,
    uneven_first,
)

_KIND_OF = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), "into q, k, v"),
    "o_proj": "into o",
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "w1", "w3"), "into gate, up"),
    **dict.fromkeys(("down_proj", "w2"), "into down"),
}
KINDS = tuple(dict.fromkeys(_KIND_OF.values()))
T = TypeVar("T")
HIGH_KL = 0.02  # nats per token; the cost of static FP8 with compensated rounding for a good model
LOW_DB = 15.0  # of a layer's output; about 25 to 35 is usual for E4M3
MUCH_CUT_OFF = 0.001  # of an input's elements
MUCH_LOST = 0.05  # of an input's elements that become zero
UNSTEADY = 4.0  # multiple of the median over the batches: few batches decide the range of such an input
USELESS = 1000.0  # a channel that exceeds the size that its weights justify by this factor only does harm
CONCENTRATED = 0.3  # of the cost, in a twentieth of the layers


def kind_of(linear: str) -> str:
    """The name of the input of the linear of this name; any other name is returned as it is."""
    last = linear.rpartition(".")[2]
    return _KIND_OF.get(last, last)


def index_of(name: str) -> int | None:
    """The number of the decoder layer that a tensor or a linear belongs to."""
    match = re.search(r"layers\.(\d+)\.", name)
    return int(match[1]) if match else None


def place_of(linear: str) -> tuple[str, str]:
    """Equal for linears that read the same input: their owner, an expert for instance, and the kind."""
    return linear.rpartition(".")[0], kind_of(linear)


def input_name(linear: str) -> str:
    """As in: layer 3 into q, k, v; layer 3 expert 5 into down."""
    index, expert = index_of(linear), re.search(r"\.experts\.(\d+)\.", linear)
    if index is None:
        return linear
    return f"layer {index} {f'expert {expert[1]} ' if expert else ''}{kind_of(linear)}"


def inputs(layers: Sequence[LayerReport]) -> list[LayerReport]:
    """The first of the linears that read each input."""
    return _first(layers, lambda layer: layer.name)


def input_tensors(tensors: Sequence[TensorReport]) -> list[TensorReport]:
    """Each input once."""
    results = [t for t in tensors if t.name.endswith(".input")]
    return _first(results, lambda tensor: tensor.name.removesuffix(".input"))


def _first(items: Sequence[T], linear: Callable[[T], str]) -> list[T]:
    results: dict[tuple[str, str], T] = {}
    for item in items:
        results.setdefault(place_of(linear(item)), item)
    return list(results.values())


@dataclass(frozen=True)
class Finding:
    text: str
    trouble: bool = False


def findings(report: CalibrationReport) -> list[Finding]:
    """Trouble first."""
    known = _cost(report.quality, _untried(report)), *_of_layers(report.layers), _far(report), _unsteady(report.tensors)
    return _in_order(known)


def evaluation_findings(report: EvalReport) -> list[Finding]:
    """Trouble first; findings about layers need a reference."""
    return _in_order((_cost(report.quality, ()), *_of_layers(report.layers)))


def _in_order(candidates: Iterable[Finding | None]) -> list[Finding]:
    return sorted((f for f in candidates if f is not None), key=lambda finding: not finding.trouble)


def _of_layers(layers: Sequence[LayerReport]) -> tuple[Finding | None, ...]:
    return _noisy(layers), _cut_off(layers), _concentrated(layers), _lost(layers), _uneven(layers)


def _cost(quality: Quality, untried: Sequence[str]) -> Finding | None:
    """Whether the total cost is high."""
    kl = quality.kl_divergence
    if kl is None or kl <= HIGH_KL:
        return None
    advice = f" What may help: {', '.join(untried)}." if untried else ""
    return Finding(f"FP8 moves the model's predictions by {number(kl)} nats per token, which is high.{advice}", True)


def _untried(report: CalibrationReport) -> list[str]:
    """Options that usually make FP8 cost less."""
    tried = {
        "`--rounding gptq`": report.rounding == "gptq",
        "`--heal 200`": report.healing is not None,
        "`--recipe rowwise`": report.recipe.get("recipe") != "DelayedScaling",
    }
    return [way for way, is_tried in tried.items() if not is_tried]


def _far(report: CalibrationReport) -> Finding | None:
    """Weights that compensated rounding changed much; after healing this is intended."""
    rounded = ((x.name, x.weight.sqnr_db) for x in report.layers if x.weight)
    far = sorted((sqnr, name) for name, sqnr in rounded if sqnr is not None and sqnr < LOW_DB)
    if not far or (report.healing is not None and report.healing.helped):
        return None
    names = listed([f"{short(name)} ({decibels(sqnr)})" for sqnr, name in far])
    advice = " More samples, or `--rounding nearest`, may cost less there." if report.rounding == "gptq" else ""
    return Finding(f"Rounding left less than {LOW_DB:.0f} dB of {count(len(far), 'weight')}: {names}.{advice}", True)


def _cut_off(layers: Sequence[LayerReport]) -> Finding | None:
    """Whether the held-out samples fit the scales."""
    known = [x for x in inputs(layers) if x.headroom is not None]
    if not known:
        return None
    over = sorted((x for x in known if x.saturated > 0), key=lambda x: -x.saturated)
    if over:
        most = f"{percent(over[0].saturated)} of {input_name(over[0].name)}"
        return Finding(
            f"{len(over)} of {len(known)} inputs held values beyond what their scale represents, which were cut off: "
            f"at most {most}. More calibration data like these, or a margin larger by {max(map(margin, over))}, would "
            "avoid it; it matters where the layer stands high among the costs, too.",
            trouble=over[0].saturated > MUCH_CUT_OFF,
        )
    nearest = min(known, key=lambda x: x.headroom or 0.0)
    part = 2 ** -(nearest.headroom or 0.0)
    return Finding(
        f"No input value was cut off. {input_name(nearest.name)} came nearest to its limit, with {part:.0%} of it."
    )


def margin(layer: LayerReport) -> int:
    """The power of two by which the scale of its input would have to be smaller so that no value is cut off."""
    return max(0, math.ceil(-(layer.headroom or 0.0)))


def _noisy(layers: Sequence[LayerReport]) -> Finding | None:
    low = [x for x in layers if x.sqnr_db is not None and x.sqnr_db < LOW_DB]
    if not low:
        return None
    low.sort(key=lambda x: x.sqnr_db or 0.0)
    names = listed([f"{short(x.name)} ({decibels(x.sqnr_db)})" for x in low])
    return Finding(
        f"{count(len(low), 'layer')} with less than {LOW_DB:.0f} dB above the noise of the output: {names}.", True
    )


def _concentrated(layers: Sequence[LayerReport]) -> Finding | None:
    """Whether a few layers cause most of the cost: these are worth a look."""
    costs = sorted(((x.kl or 0.0, short(x.name)) for x in layers), reverse=True)
    total, few = sum(kl for kl, _ in costs), max(1, len(costs) // 20)
    part = sum(kl for kl, _ in costs[:few]) / total if total else 0.0
    if part < CONCENTRATED or len(costs) <= few:
        return None
    names = listed([name for _, name in costs[:few]])
    return Finding(f"{few} of {len(costs)} layers make {part:.0%} of the cost: {names}.")


def _lost(layers: Sequence[LayerReport]) -> Finding | None:
    low = sorted((x for x in inputs(layers) if x.underflowed > MUCH_LOST), key=lambda x: -x.underflowed)
    if not low:
        return None
    names = listed([f"{input_name(x.name)} ({percent(x.underflowed)})" for x in low])
    return Finding(
        f"In {count(len(low), 'input')} more than {MUCH_LOST:.0%} of the elements become zero, because few large "
        f"values decide the scale: {names}. That matters where the cost is high, too; there `--input-scales search` or "
        "`--recipe rowwise` may help."
    )


def _uneven(layers: Sequence[LayerReport]) -> Finding | None:
    """Channels that leave the others of their input little of the format's range."""
    uneven = uneven_first(inputs(layers))
    if not uneven:
        return None
    names = listed([f"{input_name(x.name)} ({outlier_of(x)})" for x in uneven])
    trouble = any(x.outlier is not None and x.outlier.excess > USELESS for x in uneven)
    return Finding(
        f"In {count(len(uneven), 'input')} one channel is more than {UNEVEN:.0f} times as large as the median one: "
        f"{names}. Where the weights that read it are small, its size is of no use and takes the room of others; "
        "`--smoothing 0.5` moves it into the weights where that helps.",
        trouble,
    )


def _unsteady(tensors: Sequence[TensorReport]) -> Finding | None:
    """Inputs whose largest value a few batches decided: other data may go beyond."""
    usual = ((t, median(t.history)) for t in input_tensors(tensors) if t.history)
    spread = {tensor.name.removesuffix(".input"): tensor.amax / middle for tensor, middle in usual if middle > 0}
    wild = sorted(((ratio, name) for name, ratio in spread.items() if ratio > UNSTEADY), reverse=True)
    if not wild:
        return None
    ratio, name = wild[0]
    return Finding(
        f"In {len(wild)} of {len(spread)} inputs one batch holds a value more than {UNSTEADY:.0f} times as large as "
        f"the largest of a usual batch, in {input_name(name)} {ratio:.3g} times. More samples make such a scale "
        "more reliable."
    )
