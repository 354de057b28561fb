"""The sections of a report's page; each is one function. Those on layers and tensors are charts and tables, the others
are sentences."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from math import log2
from typing import Any

from fp8serve.calibration.reports.findings import (
    KINDS,
    Finding,
    index_of,
    input_name,
    input_tensors,
    inputs,
    kind_of,
    margin,
    place_of,
)
from fp8serve.calibration.reports.html import bar, coded, details, figures, paragraph, section, table, titled
from fp8serve.calibration.reports.tables import NONE, count, decibels, number, percent, short, size
from fp8serve.calibration.result import (
    CastReport,
    GeneratedReport,
    HealingReport,
    LayerReport,
    LinearGroup,
    Origin,
    SmoothingReport,
    TensorReport,
    worst_first,
)
from fp8serve.charts import Dot, bars, curve, dots, heat, heat_legend, sparkline

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj",
               "gate_up_proj")  # fmt: skip
Value = tuple[str, float, str]  # name of a layer or tensor, y, and y as it is shown
EXPONENTS = {0: "0", 2: "2⁻⁶", 5: "2⁻³", 8: "1", 11: "2³", 14: "2⁶", 16: "2⁸"}  # by the number of a histogram's bar
WORST = 12  # rows of the list of costs
SMALLEST = 4  # inputs that are shown one by one
TROUBLED = 6  # inputs whose history is drawn


def by_projection(values: Iterable[Value], *, log: bool = False) -> str:
    return _dots(values, PROJECTIONS, _last, log)


def by_input(values: Iterable[Value]) -> str:
    """The values with linears that read the same input given once."""
    return _dots(values, KINDS, kind_of, False)


def keys_and_values(values: Iterable[Value]) -> str:
    return _dots(values, ("k", "v"), _last, True)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _dots(values: Iterable[Value], names: Sequence[str], of: Callable[[str], str], log: bool) -> str:
    """Only these kinds of names are charted; the tables have the rest."""
    series: dict[str, list[Dot]] = {name: [] for name in names}
    for name, y, displayed in values:
        layer = index_of(name)
        if layer is not None and of(name) in series:
            series[of(name)].append(Dot(layer, y, f"{name}: {displayed}"))
    named = {name.removesuffix("_proj"): row for name, row in series.items() if row}
    return dots(named, "decoder layer", log=log)


def heading(title: str, verdict: str, notes: Sequence[str]) -> str:
    """The subject, the result, and anything unexpected."""
    return f"<h1>{escape(title)}</h1>" + "".join(paragraph(text, "lead") for text in (verdict, *notes))


def what_to_know(findings: Sequence[Finding]) -> str:
    """The findings, or a sentence that nothing is wrong."""
    calm = [] if any(finding.trouble for finding in findings) else [Finding("Nothing here needs attention.")]
    items = (f'<li class="{"trouble" if f.trouble else "calm"}">{coded(f.text)}</li>' for f in (*calm, *findings))
    return f'<ul class="findings">{"".join(items)}</ul>'


def before_and_after(samples: Sequence[GeneratedReport]) -> str:
    """The model's output in high precision and in FP8, side by side."""
    return section(
        "Before and after",
        "Held-out prompts, continued by the model in high precision and by what was written. Tokens are drawn, with "
        "the same random numbers for both. Other words are not worse words: one token that was nearly as likely "
        "changes all that follows it.",
        *map(_sample, samples),
    )


def _sample(sample: GeneratedReport) -> str:
    same = _in_common(sample.before, sample.after)
    alike = f"the same for {count(sample.same_tokens, 'token')}" if sample.same_tokens else "different at once"
    message = "the same" if sample.before == sample.after else alike
    sides = (_side("In high precision", sample.before, same), _side(f"In FP8: {message}", sample.after, same))
    prompt = f'<div class="prompt"><b>Prompt</b><p class="text">{escape(sample.prompt)}</p></div>'
    return f'{prompt}<div class="said">{"".join(sides)}</div>'


def _in_common(one: str, other: str) -> int:
    """The number of characters that both begin with, without the beginning of a word that differs."""
    differing = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    same = next(differing, min(len(one), len(other)))
    within_word = re.match(r"\S", one[same:]) or re.match(r"\S", other[same:])
    return len(re.sub(r"\S+$", "", one[:same])) if within_word else same


def _side(title: str, text: str, same: int) -> str:
    """The first word that differs is marked."""
    parts = re.fullmatch(r"(\s*\S*)(.*)", text[same:], re.DOTALL)
    word, rest = parts.groups() if parts else ("", "")
    marked = f"<mark>{escape(word)}</mark>" if word else ""
    return f'<div><b>{escape(title)}</b><p class="text">{escape(text[:same])}{marked}{escape(rest)}</p></div>'


def healing(report: HealingReport | None) -> str:
    if report is None:
        return ""
    drawn = {f"Loss of {report.steps} steps (nats)": curve(report.losses, "step")}
    return section(
        "Healing",
        "The FP8 model was trained to say what it said in high precision. On the held-out samples its KL divergence "
        f"went from {number(report.kl_before)} to {number(report.kl_after)} nats"
        + ("." if report.helped else ", which is no better: the weights of before were written."),
        figures(drawn, "small"),
    )


def smoothing(report: SmoothingReport | None) -> str:
    """The pairs whose channels were evened out."""
    if report is None or not report.pairs:
        return ""
    names = table(("what makes the channels",), [[escape(name)] for name in report.pairs])
    return section(
        "Smoothing",
        "Channels far larger than the others were divided by powers of two, and the weights that read them multiplied: "
        f"in {len(report.pairs)} of {report.tried} pairs, where that made the error of the layer's output smaller.",
        details("The pairs", names),
    )


def in_bf16(groups: Sequence[LinearGroup], cost: str, costs: Sequence[float | None]) -> str:
    """The linears that were left as they are, with what their FP8 would cost."""
    rows = [[escape(", ".join(g.names)), size(g.bytes), number(x)] for g, x in zip(groups, costs, strict=True)]
    return section(
        "Stays in BF16",
        "These layers were left in high precision, because somebody named them or a target for quality asked for it.",
        table(("linear layers", "more than in FP8", cost), rows) if rows else "",
    )


def facts(origin: Origin | None, arguments: Mapping[str, Any]) -> str:
    """How to repeat the run, and its inputs."""
    command = (
        f"<pre>{escape(origin.command)}</pre><p>{escape(origin.date)}, {escape(origin.machine)}</p>" if origin else ""
    )
    text = escape(json.dumps(arguments, indent=2, ensure_ascii=False))
    folded = details("Recipe, data, versions", f"<pre>{text}</pre>")
    return section("How it was made", "Repeat it with this command.", command, folded)


def costs(layers: Sequence[LayerReport], tensors: Sequence[TensorReport] = ()) -> str:
    """The layers, most expensive first."""
    if not layers:
        return ""
    worst = worst_first(layers)
    return section(
        "What each layer costs",
        "How much FP8 in this layer alone moves the model's predictions: its share of the KL divergence, in nats per "
        "token. SQNR is the power of a signal over that of its rounding noise: of the layer's output, and of the input "
        "and the weight that it comes from. About 31 dB is what E4M3 leaves of a tensor that suits it.",
        _cost_table(worst[:WORST]),
        details(f"All {len(worst)} layers", _layer_table(worst, tensors)),
    )


def _cost_table(layers: Sequence[LayerReport]) -> str:
    largest = max((x.kl or 0.0 for x in layers), default=0.0)
    rows = (
        [titled(short(x.name), x.name), bar(x.kl or 0.0, largest), number(x.kl), *sqnrs(x), percent(x.underflowed)]
        for x in layers
    )
    return table(("layer", "", "KL, nats", "SQNR", "of input", "of weight", "inputs lost to zero"), rows)


def sqnrs(layer: LayerReport) -> list[str]:
    casts = (NONE if cast is None else decibels(cast.sqnr_db) for cast in (layer.input, layer.weight))
    return [decibels(layer.sqnr_db), *casts]


def _layer_table(layers: Sequence[LayerReport], tensors: Sequence[TensorReport]) -> str:
    by_name = {t.name: t for t in tensors}
    rows = []
    for layer in layers:
        lost = (percent(f) for f in (layer.saturated, layer.rounded_to_top, layer.underflowed))
        tensor = by_name.get(f"{layer.name}.input")
        seen = (NONE, NONE) if tensor is None else (number(tensor.amax), number(tensor.scale))
        rows.append([escape(layer.name), number(layer.kl), *sqnrs(layer), *lost, *seen])
    head = ("layer", "KL, nats", "SQNR", "of input", "of weight", "cut off", "at the top", "underflowed")
    return table((*head, "input amax", "input scale"), rows)


def noise(layers: Sequence[LayerReport]) -> str:
    """SQNR over the depth of the model."""
    parts: dict[str, Callable[[LayerReport], float | None]] = {
        "of the layer's output": lambda x: x.sqnr_db,
        "of its input": lambda x: x.input.sqnr_db if x.input else None,
        "of its weight": lambda x: x.weight.sqnr_db if x.weight else None,
    }
    drawn = {}
    for title, of in parts.items():
        values = [(x.name, value, decibels(value)) for x in layers if (value := of(x)) is not None]
        drawn[f"SQNR {title} (dB)"] = by_projection(values)
    return section(
        "Signal and noise",
        "Every dot is a linear layer; higher is better, and 6 dB are one bit. A dot far below its neighbours is a "
        "tensor with values that FP8 holds badly together: a few large ones and many small.",
        figures(drawn),
    )


def room(layers: Sequence[LayerReport]) -> str:
    """Headroom, and what was cut off or lost."""
    known = [(x, x.headroom) for x in inputs(layers) if x.headroom is not None]
    if not any(abs(headroom) > 0.01 for _, headroom in known):
        return ""  # every scale is made for its own tensor, so there is nothing to check
    drawn = {"Headroom of inputs (powers of two)": by_input((x.name, h, f"{h:+.2f}") for x, h in known)}
    for field, title in (("saturated", "cut off"), ("underflowed", "lost to zero")):
        lost = [(x.name, 100 * getattr(x, field), percent(getattr(x, field))) for x, _ in known]
        if any(y > 0 for _, y, _ in lost):
            drawn[f"Input elements {title} (%)"] = by_input(lost)
    return section(
        "Room at the top",
        "How the held-out samples, which no scale has seen, fit the scales. Headroom is log2(448 / (scale × largest "
        "value)): 0 when the largest value just fits, 1 when it is half of what would fit, below 0 when it was cut "
        "off. Expect as much of data like these. A margin larger by ⌈−headroom⌉ would avoid it, at the price of as "
        "many powers of two at the lower end.",
        figures(drawn),
        _over(known),
    )


def _over(known: Sequence[tuple[LayerReport, float]]) -> str:
    """The inputs that went beyond their limit."""
    worst = sorted((pair for pair in known if pair[0].saturated > 0), key=lambda pair: pair[1])
    if not worst:
        return ""
    rows = ([titled(input_name(x.name), x.name), f"{h:.2f}", percent(x.saturated), str(margin(x))] for x, h in worst)
    head = ("input", "headroom", "elements cut off", "margin that would avoid it")
    return details(f"{len(worst)} inputs went beyond their limit", table(head, rows))


def grid(layers: Sequence[LayerReport]) -> str:
    """Where values land on E4M3."""
    read = [(x, x.input) for x in inputs(layers) if x.input]
    small = sorted(read, key=lambda pair: -(pair[1].zeros + pair[1].binades[0]))[:SMALLEST]
    of_inputs = {f"Inputs {kind}": _mean([c for x, c in read if kind_of(x.name) == kind]) for kind in KINDS}
    weights = [(x.name.rpartition(".")[2], x.weight) for x in layers if x.weight]
    of_weights = {
        f"Weights of {p.removesuffix('_proj')}": _mean([c for n, c in weights if n == p]) for p in PROJECTIONS
    }
    return section(
        "Where values land on the grid of E4M3",
        "Shares of the elements by their size after scaling, a bar for each power of two that the format has. In the "
        "blue ones a value is rounded by at most a sixteenth of itself. The orange ones are zero and the subnormal "
        "values below 2⁻⁶, where small numbers lose their digits. At the right end is the largest value, 448.",
        _histograms("Inputs, on the held-out samples", of_inputs),
        _histograms("Weights", of_weights),
        _histograms("The inputs with most in the orange bars", {input_name(x.name): cast for x, cast in small}),
    )


def _mean(casts: Sequence[CastReport]) -> CastReport | None:
    """Of tensors of one size."""
    if not casts:
        return None
    count = len(casts)
    binades = (sum(shares) / count for shares in zip(*(c.binades for c in casts), strict=True))
    zeros, top = sum(c.zeros for c in casts) / count, sum(c.at_top for c in casts) / count
    return CastReport(None, None, zeros, tuple(binades), top)


def _histograms(title: str, casts: Mapping[str, CastReport | None]) -> str:
    drawn = {name: _histogram(cast) for name, cast in casts.items() if cast is not None}
    return f"<h3>{escape(title)}</h3>{figures(drawn, 'small')}" if drawn else ""


def _histogram(cast: CastReport) -> str:
    """A bar for zero and for each of the 16 exponents of E4M3, and the figures for which bars are too low."""
    inside = (f"2^{exponent} to 2^{exponent + 1}" for exponent in range(-6, 8))
    ranges = ["zero", "subnormal, below 2^-6", *inside, "2^8 and above"]
    shares = (cast.zeros, *cast.binades)
    titles = [f"{name}: {percent(share)}" for name, share in zip(ranges, shares, strict=True)]
    low = f"zero {percent(cast.zeros)}, subnormal {percent(cast.binades[0])}, largest value {percent(cast.at_top)}"
    return f"{bars(shares, titles, EXPONENTS, 2)}<small>{low}</small>"


def batches(layers: Sequence[LayerReport], tensors: Sequence[TensorReport]) -> str:
    """Amax histories: maps of all, curves of those whose layers cost most."""
    maps = {title: _map(rows) for title, rows in _histories(tensors).items()}
    return section(
        "Largest values, batch by batch",
        "One row for each decoder layer, one column for each batch of calibration data: how near the largest value "
        "came to the top of what its scale represents. Even rows are steady; a row with few dark cells owes its scale "
        "to few batches, and other data may go beyond it.",
        figures(maps),
        heat_legend() if any(maps.values()) else "",
        _curves(layers, tensors),
    )


def _histories(tensors: Sequence[TensorReport]) -> dict[str, list[TensorReport]]:
    """By kind, layer by layer."""
    results: dict[str, list[TensorReport]] = {}
    for tensor in input_tensors(tensors):
        results.setdefault(f"Inputs {kind_of(tensor.name.removesuffix('.input'))}", []).append(tensor)
    for ending, title in ((".k", "Keys"), (".v", "Values"), (".grad_output", "Gradients of the output of {}")):
        for tensor in (t for t in tensors if t.name.endswith(ending)):
            results.setdefault(title.format(tensor.name.split(".")[-2].removesuffix("_proj")), []).append(tensor)
    return results


def _map(tensors: Sequence[TensorReport]) -> str:
    titles = [f"{t.name}: amax {number(t.amax)} in {t.observations} batches" for t in tensors]
    return heat([[_level(amax, t) for amax in t.history] for t in tensors], titles, "batch")


def _level(amax: float, tensor: TensorReport) -> float | None:
    """log2 of an amax divided by the largest that can be represented; without a stored scale, by the largest seen."""
    limit = tensor.limit or tensor.amax
    return log2(amax / limit) if amax > 0 and limit > 0 else None


def _curves(layers: Sequence[LayerReport], tensors: Sequence[TensorReport]) -> str:
    by_input = {place_of(t.name.removesuffix(".input")): t for t in input_tensors(tensors)}
    places = dict.fromkeys(place_of(layer.name) for layer in worst_first(layers))
    displayed = [by_input[place] for place in places if place in by_input][:TROUBLED]
    drawn = {input_name(t.name.removesuffix(".input")): curve(t.history, "batch", t.limit) for t in displayed}
    title = "<h3>Inputs of the layers that cost most: their largest value in each batch</h3>"
    return title + figures(drawn, "small") if any(drawn.values()) else ""


def largest(tensors: Sequence[TensorReport]) -> str:
    """Amaxes over the depth of the model."""
    drawn = {}
    for role, title in (("input", "input"), ("weight", "weight"), ("grad_output", "gradient of an output")):
        results = [t for t in tensors if t.name.endswith(f".{role}") and t.amax > 0]
        values = [(t.name.removesuffix(f".{role}"), t.amax, f"amax {number(t.amax)}") for t in results]
        drawn[f"Largest absolute {title}"] = by_projection(values, log=True)
    cached = [t for t in tensors if t.name.endswith((".k", ".v")) and t.amax > 0]
    values = [(t.name, t.amax, f"amax {number(t.amax)}") for t in cached]
    drawn["Largest absolute key and value"] = keys_and_values(values)
    return section(
        "Largest values, layer by layer",
        "What the scales are made from. Some tensors reach a hundred times what others do: so each has its own scale.",
        figures(drawn),
    )


def scales(tensors: Sequence[TensorReport]) -> str:
    """Every tensor in a table."""
    rows = (
        [escape(t.name), number(t.amax), number(t.scale), number(t.limit), str(t.observations), _spark(t.history)]
        for t in tensors
    )
    head = ("tensor", "amax", "scale", "limit", "batches seen", "amax per batch")
    return details(f"All {len(tensors)} scales", table(head, rows)) if tensors else ""


def _spark(history: Sequence[float]) -> str:
    """Empty for a weight, which is the same in every batch."""
    return sparkline(history) if len(set(history)) > 1 else ""
