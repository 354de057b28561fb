"""The findings of a report of a calibration or an evaluation: sentences about what needs attention.

Linears that read the same input are listed once, under the name of the first one.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from fp8serve.calibration.reports.tables import (
    format_decibels,
    format_number,
    format_percent,
    outlier_text,
    pluralize,
    short_name,
)
from fp8serve.calibration.result import (
    MIN_OUTLIER_RATIO,
    CalibrationReport,
    EvalReport,
    LayerReport,
    Quality,
    TensorReport,
    list_names,
    with_outliers,
)

_KIND_OF = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), "q/k/v"),
    "o_proj": "o",
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "w1", "w3"), "gate/up"),
    **dict.fromkeys(("down_proj", "w2"), "down"),
}
KINDS = tuple(dict.fromkeys(_KIND_OF.values()))
T = TypeVar("T")
HIGH_KL_NATS = 0.02  # per token; a good model with static scales and GPTQ has about this KL divergence
LOW_SQNR_DB = 15.0  # of a layer's output; about 25 to 35 is usual for E4M3
HIGH_SATURATION = 0.001  # fraction of an input's elements
HIGH_UNDERFLOW = 0.05  # fraction of an input's elements that become zero
MAX_AMAX_RATIO = 4.0  # an amax this many times the median over batches: few batches decide the scale of the input
MAX_OUTLIER_EXCESS = 1000.0  # if a channel exceeds what its weights justify by more than this, it only does harm
MIN_CONCENTRATION = 0.3  # share of the KL divergence that 5 % of the layers add


def input_kind(linear: str) -> str:
    """Returns a name for the input of a linear that all linears with this input share, such as "q/k/v"."""
    leaf = linear.rpartition(".")[2]
    return _KIND_OF.get(leaf, leaf)


def layer_index(name: str) -> int | None:
    """Returns the index of the decoder layer of a tensor or linear, or None if the name has no layer."""
    match = re.search(r"layers\.(\d+)\.", name)
    return int(match[1]) if match else None


def input_key(linear: str) -> tuple[str, str]:
    """Returns (parent module, kind of input), which is equal for linears that read the same input."""
    return linear.rpartition(".")[0], input_kind(linear)


def input_name(linear: str) -> str:
    """Returns a readable name of the linear's input, such as "layer 3 expert 5 down input"."""
    index, expert = layer_index(linear), re.search(r"\.experts\.(\d+)\.", linear)
    if index is None:
        return linear
    return f"layer {index} {f'expert {expert[1]} ' if expert else ''}{input_kind(linear)} input"


def first_readers(layers: Sequence[LayerReport]) -> list[LayerReport]:
    """Returns one layer for each input: the first layer that reads the input."""
    return _first_of_each_input(layers, lambda layer: layer.name)


def input_tensors(tensors: Sequence[TensorReport]) -> list[TensorReport]:
    """Returns one input tensor for each input, because layers with the same input have equal input tensors."""
    every_input = [t for t in tensors if t.name.endswith(".input")]
    return _first_of_each_input(every_input, lambda tensor: tensor.name.removesuffix(".input"))


def _first_of_each_input(items: Sequence[T], linear_name: Callable[[T], str]) -> list[T]:
    by_input: dict[tuple[str, str], T] = {}
    for item in items:
        by_input.setdefault(input_key(linear_name(item)), item)
    return list(by_input.values())


@dataclass(frozen=True)
class Finding:
    text: str
    is_problem: bool = False


def findings(report: CalibrationReport) -> list[Finding]:
    """Returns the findings of a calibration report, problems first."""
    kl = _high_kl(report.quality, _options_not_used(report))
    other = _changed_weights(report), _unusual_batches(report.tensors)
    return _problems_first((kl, *_layer_findings(report.layers), *other))


def evaluation_findings(report: EvalReport) -> list[Finding]:
    """Returns the findings of an evaluation, problems first; findings about layers need a reference."""
    return _problems_first((_high_kl(report.quality, ()), *_layer_findings(report.layers)))


def _problems_first(findings: Iterable[Finding | None]) -> list[Finding]:
    return sorted((f for f in findings if f is not None), key=lambda finding: not finding.is_problem)


def _layer_findings(layers: Sequence[LayerReport]) -> tuple[Finding | None, ...]:
    return _low_sqnr(layers), _saturation(layers), _concentration(layers), _underflow(layers), _outliers(layers)


def _high_kl(quality: Quality, options: Sequence[str]) -> Finding | None:
    kl = quality.kl_divergence
    if kl is None or kl <= HIGH_KL_NATS:
        return None
    advice = f" These options may reduce it: {', '.join(options)}." if options else ""
    return Finding(
        f"The KL divergence of the quantized model is {format_number(kl)} nats per token, which is high.{advice}",
        is_problem=True,
    )


def _options_not_used(report: CalibrationReport) -> list[str]:
    """Returns the options that usually reduce the KL divergence and that this calibration did not use."""
    uses = {
        "`--rounding gptq`": report.rounding == "gptq",
        "`--heal 200`": report.healing is not None,
        "`--recipe rowwise`": report.recipe.get("recipe") != "DelayedScaling",
    }
    return [option for option, is_used in uses.items() if not is_used]


def _changed_weights(report: CalibrationReport) -> Finding | None:
    """Returns a finding about weights that rounding changed much. Healing changes weights on purpose."""
    weights = ((x.name, x.weight.sqnr_db) for x in report.layers if x.weight)
    changed = sorted((sqnr, name) for name, sqnr in weights if sqnr is not None and sqnr < LOW_SQNR_DB)
    if not changed or (report.healing is not None and report.healing.is_improvement):
        return None
    names = list_names([f"{short_name(name)} ({format_decibels(sqnr)})" for sqnr, name in changed])
    advice = " More samples or `--rounding nearest` may reduce this error." if report.rounding == "gptq" else ""
    return Finding(
        f"Rounding left an SQNR below {LOW_SQNR_DB:.0f} dB in {pluralize(len(changed), 'weight')}: {names}.{advice}",
        is_problem=True,
    )


def _saturation(layers: Sequence[LayerReport]) -> Finding | None:
    """Returns a finding about how well the scales of inputs fit the held-out samples."""
    layers = [x for x in first_readers(layers) if x.headroom is not None]
    if not layers:
        return None
    saturated = sorted((x for x in layers if x.saturated > 0), key=lambda x: -x.saturated)
    if saturated:
        worst = saturated[0]
        return Finding(
            f"{len(saturated)} of {len(layers)} inputs have values that saturated, because they exceed the range of "
            f"their scale; the largest share is {format_percent(worst.saturated)}, of the {input_name(worst.name)}. "
            f"More calibration data of this kind, or a margin larger by {max(map(extra_margin, saturated))}, would "
            "avoid this. It matters only for layers that also add much KL divergence.",
            is_problem=worst.saturated > HIGH_SATURATION,
        )
    closest = min(layers, key=lambda x: x.headroom or 0.0)
    part = 2 ** -(closest.headroom or 0.0)
    return Finding(
        f"No input value saturated. The largest value relative to its range is in the {input_name(closest.name)}: "
        f"{part:.0%} of the range."
    )


def extra_margin(layer: LayerReport) -> int:
    """Returns by how many powers of two the scale of the input must be smaller so that no value saturates."""
    return max(0, math.ceil(-(layer.headroom or 0.0)))


def _low_sqnr(layers: Sequence[LayerReport]) -> Finding | None:
    low = [x for x in layers if x.sqnr_db is not None and x.sqnr_db < LOW_SQNR_DB]
    if not low:
        return None
    low.sort(key=lambda x: x.sqnr_db or 0.0)
    names = list_names([f"{short_name(x.name)} ({format_decibels(x.sqnr_db)})" for x in low])
    return Finding(
        f"The SQNR is below {LOW_SQNR_DB:.0f} dB in the output of {pluralize(len(low), 'layer')}: {names}.",
        is_problem=True,
    )


def _concentration(layers: Sequence[LayerReport]) -> Finding | None:
    """Returns a finding if a few layers add a large part of the KL divergence."""
    costs = sorted(((x.kl or 0.0, short_name(x.name)) for x in layers), reverse=True)
    total, few = sum(kl for kl, _ in costs), max(1, len(costs) // 20)
    share = sum(kl for kl, _ in costs[:few]) / total if total else 0.0
    if share < MIN_CONCENTRATION or len(costs) <= few:
        return None
    names = list_names([name for _, name in costs[:few]])
    return Finding(f"{share:.0%} of the KL divergence comes from {few} of {len(costs)} layers: {names}.")


def _underflow(layers: Sequence[LayerReport]) -> Finding | None:
    inputs = sorted((x for x in first_readers(layers) if x.underflowed > HIGH_UNDERFLOW), key=lambda x: -x.underflowed)
    if not inputs:
        return None
    names = list_names([f"{input_name(x.name)} ({format_percent(x.underflowed)})" for x in inputs])
    return Finding(
        f"In {pluralize(len(inputs), 'input')} more than {HIGH_UNDERFLOW:.0%} of the elements underflow to zero, "
        f"because a few large values determine the scale: {names}. This matters only for layers that also add much KL "
        "divergence; for them `--recipe rowwise` may help."
    )


def _outliers(layers: Sequence[LayerReport]) -> Finding | None:
    """Returns a finding about outlier channels, next to which other channels use little of the format's range."""
    outliers = with_outliers(first_readers(layers))
    if not outliers:
        return None
    names = list_names([f"{input_name(x.name)} ({outlier_text(x)})" for x in outliers])
    return Finding(
        f"In {pluralize(len(outliers), 'input')} one channel is more than {MIN_OUTLIER_RATIO:.0f} times as large as "
        f"the median channel: {names}. If the weights of such a channel are small, its size has no use and reduces the "
        "precision of the other channels. `--smoothing 0.5` moves it into the weights if this reduces the error.",
        is_problem=any(x.outlier is not None and x.outlier.excess > MAX_OUTLIER_EXCESS for x in outliers),
    )


def _unusual_batches(tensors: Sequence[TensorReport]) -> Finding | None:
    """Returns a finding about inputs for which a few batches determine the scale; other data may exceed their range."""
    medians = ((t, median(t.history)) for t in input_tensors(tensors) if t.history)
    ratios = {t.name.removesuffix(".input"): t.amax / middle for t, middle in medians if middle > 0}
    high = sorted(((ratio, name) for name, ratio in ratios.items() if ratio > MAX_AMAX_RATIO), reverse=True)
    if not high:
        return None
    ratio, name = high[0]
    return Finding(
        f"In {len(high)} of {len(ratios)} inputs the amax over all batches is more than {MAX_AMAX_RATIO:.0f} times the "
        f"median amax of a batch; the largest factor is {ratio:.3g}, of the {input_name(name)}. More samples make such "
        "a scale more reliable."
    )
