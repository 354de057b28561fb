"""The sections of a report's HTML page. Each function returns the HTML of one section, or an empty string."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from math import log2
from typing import Any

from fp8serve.calibration.reports.findings import (
    KINDS,
    Finding,
    extra_margin,
    first_readers,
    input_key,
    input_kind,
    input_name,
    input_tensors,
    layer_index,
)
from fp8serve.calibration.reports.html import bar, coded, details, figures, paragraph, section, table, titled
from fp8serve.calibration.reports.tables import (
    NO_VALUE,
    format_bytes,
    format_decibels,
    format_number,
    format_percent,
    pluralize,
    short_name,
)
from fp8serve.calibration.result import (
    CastReport,
    GeneratedReport,
    HealingReport,
    LayerReport,
    LinearGroup,
    Origin,
    SmoothingReport,
    TensorReport,
    by_cost,
)
from fp8serve.charts import Dot, bars, curve, dots, heat, heat_legend, sparkline

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj",
               "gate_up_proj")  # fmt: skip
Value = tuple[str, float, str]  # name of a layer or tensor, y, and y as text
# The bars of a histogram: of E4M3, and of 4-bit weights. Labels are by the index of a bar.
E4M3_BARS = ("zero", "subnormal, below 2^-6", *(f"2^{n} to 2^{n + 1}" for n in range(-6, 8)), "2^8 and above")
E4M3_LABELS = {0: "0", 2: "2⁻⁶", 5: "2⁻³", 8: "1", 11: "2³", 14: "2⁶", 16: "2⁸"}
E2M1_BARS = ("zero", "0.5, the subnormal value", "1 and 1.5", "2 and 3", "4 and 6")
E2M1_LABELS = {0: "0", 1: "½", 2: "1", 3: "2", 4: "4"}
COST_TABLE_ROWS = 12
MAX_INPUT_HISTOGRAMS = 4
MAX_AMAX_CURVES = 6


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def by_layer(
    values: Iterable[Value],
    kinds: Sequence[str] = PROJECTIONS,
    kind_of: Callable[[str], str] = _leaf,
    *,
    log: bool = False,
) -> str:
    """Charts values by decoder layer, with one series for each of `kinds`; values of other kinds are omitted."""
    series: dict[str, list[Dot]] = {kind: [] for kind in kinds}
    for name, y, text in values:
        layer = layer_index(name)
        if layer is not None and kind_of(name) in series:
            series[kind_of(name)].append(Dot(layer, y, f"{name}: {text}"))
    named = {name.removesuffix("_proj"): row for name, row in series.items() if row}
    return dots(named, "decoder layer", log=log)


def heading(title: str, verdict: str, notes: Sequence[str]) -> str:
    """Returns the title, the main result and the notes."""
    return f"<h1>{escape(title)}</h1>" + "".join(paragraph(text, "lead") for text in (verdict, *notes))


def finding_list(findings: Sequence[Finding]) -> str:
    """Returns the findings as a list, which starts with "No problems were found." if that is the case."""
    no_problems = [] if any(f.is_problem for f in findings) else [Finding("No problems were found.")]
    items = (
        f'<li class="{"problem" if f.is_problem else "note"}">{coded(f.text)}</li>' for f in (*no_problems, *findings)
    )
    return f'<ul class="findings">{"".join(items)}</ul>'


def generated_text(samples: Sequence[GeneratedReport]) -> str:
    """Shows the continuations of held-out prompts in high precision and quantized, side by side."""
    return section(
        "Text generated before and after calibration",
        "Held-out prompts, continued by the model in high precision and by the written model. Both models sample "
        "with the same random numbers. A different text is not a worse text: if two tokens are almost equally likely, "
        "a small difference changes the sampled token, and with it the rest of the text.",
        *map(_sample, samples),
    )


def _sample(sample: GeneratedReport) -> str:
    same = _common_prefix(sample.before, sample.after)
    if sample.before == sample.after:
        difference = "the same text"
    else:
        difference = f"{pluralize(sample.same_tokens, 'token')} before the first difference"
    before = _generated_side("In high precision", sample.before, same)
    after = _generated_side(f"Quantized: {difference}", sample.after, same)
    prompt = f'<div class="prompt"><b>Prompt</b><p class="text">{escape(sample.prompt)}</p></div>'
    return f'{prompt}<div class="generated">{before}{after}</div>'


def _common_prefix(one: str, other: str) -> int:
    """Returns the length of the common prefix, which ends before the first word that differs."""
    differing = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    same = next(differing, min(len(one), len(other)))
    within_word = re.match(r"\S", one[same:]) or re.match(r"\S", other[same:])
    return len(re.sub(r"\S+$", "", one[:same])) if within_word else same


def _generated_side(title: str, text: str, same: int) -> str:
    """Returns one text, in which the first word after `same` characters is highlighted."""
    parts = re.fullmatch(r"(\s*\S*)(.*)", text[same:], re.DOTALL)
    word, rest = parts.groups() if parts else ("", "")
    marked = f"<mark>{escape(word)}</mark>" if word else ""
    return f'<div><b>{escape(title)}</b><p class="text">{escape(text[:same])}{marked}{escape(rest)}</p></div>'


def healing(report: HealingReport | None) -> str:
    if report is None:
        return ""
    charts = {f"Loss of {report.steps} steps (nats)": curve(report.losses, "step")}
    return section(
        "Healing",
        "The FP8 model was trained towards its own output in high precision. On the held-out samples its KL divergence "
        f"changed from {format_number(report.kl_before)} to {format_number(report.kl_after)} nats"
        + (
            "."
            if report.is_improvement
            else ". This is no improvement, so the weights from before healing were written."
        ),
        figures(charts, "small"),
    )


def smoothing(report: SmoothingReport | None) -> str:
    """Lists the norms and linears with smoothed output channels."""
    if report is None or not report.pairs:
        return ""
    names = table(("norm or linear with smoothed output channels",), [[escape(name)] for name in report.pairs])
    return section(
        "Smoothing",
        "Large channels of inputs were divided by powers of two, and the weights that read these channels were "
        f"multiplied by the same powers. This reduced the error of the layer's output in {len(report.pairs)} of "
        f"{report.tried} pairs of a norm or linear and its readers; the other pairs are unchanged.",
        details("Smoothed norms and linears", names),
    )


def in_bf16(groups: Sequence[LinearGroup], cost: str, costs: Sequence[float | None]) -> str:
    """Lists the linears that stay in BF16, with their size and the cost that they would have if quantized."""
    rows = [
        [escape(", ".join(group.names)), format_bytes(group.bytes), format_number(value)]
        for group, value in zip(groups, costs, strict=True)
    ]
    return section(
        "Layers in BF16",
        "These layers stay in high precision, because an option excluded them or a quality target needed it.",
        table(("linear layers", "bytes more than quantized", cost), rows) if rows else "",
    )


def facts(origin: Origin | None, arguments: Mapping[str, Any]) -> str:
    """Shows the command of the run, its date and machine, and its arguments."""
    command = (
        f"<pre>{escape(origin.command)}</pre><p>{escape(origin.date)}, {escape(origin.machine)}</p>" if origin else ""
    )
    text = escape(json.dumps(arguments, indent=2, ensure_ascii=False))
    arguments_html = details("Recipe, data, versions", f"<pre>{text}</pre>")
    return section("How to reproduce this report", "This command made the report.", command, arguments_html)


def layer_costs(layers: Sequence[LayerReport], tensors: Sequence[TensorReport] = ()) -> str:
    """Lists the layers by the KL divergence that each adds, largest first."""
    if not layers:
        return ""
    layers = by_cost(layers)
    return section(
        "KL divergence of each layer",
        "The KL divergence, in nats per token, is the change of the model's predictions if one layer is quantized. "
        "SQNR is the ratio of signal power to rounding-noise power, for the layer's output, its input and its weight. "
        "A tensor that suits E4M3 has about 31 dB.",
        _cost_table(layers[:COST_TABLE_ROWS]),
        details(f"All {len(layers)} layers", _layer_table(layers, tensors)),
    )


def _cost_table(layers: Sequence[LayerReport]) -> str:
    largest = max((x.kl or 0.0 for x in layers), default=0.0)
    rows = (
        [
            titled(short_name(x.name), x.name),
            bar(x.kl or 0.0, largest),
            format_number(x.kl),
            *sqnrs(x),
            format_percent(x.underflowed),
        ]
        for x in layers
    )
    return table(("layer", "", "KL, nats", "SQNR", "SQNR of input", "SQNR of weight", "input underflow"), rows)


def sqnrs(layer: LayerReport) -> list[str]:
    """Returns the SQNR of the layer's output, input and weight."""
    casts = (NO_VALUE if cast is None else format_decibels(cast.sqnr_db) for cast in (layer.input, layer.weight))
    return [format_decibels(layer.sqnr_db), *casts]


def _layer_table(layers: Sequence[LayerReport], tensors: Sequence[TensorReport]) -> str:
    by_name = {t.name: t for t in tensors}
    rows = []
    for layer in layers:
        shares = (format_percent(f) for f in (layer.saturated, layer.rounded_to_top, layer.underflowed))
        tensor = by_name.get(f"{layer.name}.input")
        scale = (NO_VALUE, NO_VALUE) if tensor is None else (format_number(tensor.amax), format_number(tensor.scale))
        rows.append([escape(layer.name), format_number(layer.kl), *sqnrs(layer), *shares, *scale])
    head = ("layer", "KL, nats", "SQNR", "SQNR of input", "SQNR of weight")
    input_head = ("input saturated", "rounded to 448", "input underflowed", "input amax", "input scale")
    return table((*head, *input_head), rows)


def layer_sqnr(layers: Sequence[LayerReport]) -> str:
    """Charts the SQNR of outputs, inputs and weights by decoder layer."""
    parts: dict[str, Callable[[LayerReport], float | None]] = {
        "of the layer's output": lambda x: x.sqnr_db,
        "of its input": lambda x: x.input.sqnr_db if x.input else None,
        "of its weight": lambda x: x.weight.sqnr_db if x.weight else None,
    }
    charts = {}
    for title, sqnr_of in parts.items():
        values = [(x.name, value, format_decibels(value)) for x in layers if (value := sqnr_of(x)) is not None]
        charts[f"SQNR {title} (dB)"] = by_layer(values)
    return section(
        "SQNR by layer",
        "Each dot is a linear layer. Higher is better; 6 dB are one bit. A dot far below its neighbours is a tensor "
        "with a few large values and many small ones, which a format of few bits represents badly with one scale.",
        figures(charts),
    )


def headroom(layers: Sequence[LayerReport]) -> str:
    """Charts the headroom, saturation and underflow of inputs; lists the inputs with saturated values."""
    readers = [(x, x.headroom) for x in first_readers(layers) if x.headroom is not None]
    if not any(abs(headroom) > 0.01 for _, headroom in readers):
        return ""  # the recipe computes every scale from the tensor itself
    charts = {
        "Headroom of inputs (powers of two)": by_layer(
            [(x.name, h, f"{h:+.2f}") for x, h in readers], KINDS, input_kind
        )
    }
    for field, title in (("saturated", "saturated"), ("underflowed", "underflowed to zero")):
        shares = [(x.name, 100 * getattr(x, field), format_percent(getattr(x, field))) for x, _ in readers]
        if any(y > 0 for _, y, _ in shares):
            charts[f"Input elements {title} (%)"] = by_layer(shares, KINDS, input_kind)
    return section(
        "Headroom, saturation and underflow of inputs",
        "How well the scales fit the held-out samples, which were not used to compute scales. Headroom is "
        "log2(448 / (scale × largest value)): 0 if the largest value just fits, 1 if it is half of what fits, and "
        "negative if values saturated. A margin larger by ⌈−headroom⌉ would avoid the saturation, but small values "
        "would lose as many powers of two.",
        figures(charts),
        _saturated_inputs(readers),
    )


def _saturated_inputs(readers: Sequence[tuple[LayerReport, float]]) -> str:
    """Lists the inputs with saturated values, lowest headroom first."""
    worst = sorted((pair for pair in readers if pair[0].saturated > 0), key=lambda pair: pair[1])
    if not worst:
        return ""
    rows = (
        [titled(input_name(x.name), x.name), f"{headroom:.2f}", format_percent(x.saturated), str(extra_margin(x))]
        for x, headroom in worst
    )
    head = ("input", "headroom", "elements saturated", "margin without saturation")
    return details(f"Inputs with saturated values: {len(worst)}", table(head, rows))


def value_distribution(layers: Sequence[LayerReport]) -> str:
    """Charts how many values of inputs and weights have each exponent of E4M3 or, of weights of 4 bits, of E2M1."""
    inputs = [(x, x.input) for x in first_readers(layers) if x.input]
    smallest = sorted(inputs, key=lambda pair: -(pair[1].zeros + pair[1].binades[0]))[:MAX_INPUT_HISTOGRAMS]
    input_casts = {f"Inputs of {k}": _mean_cast([c for x, c in inputs if input_kind(x.name) == k]) for k in KINDS}
    weights = [(_leaf(x.name), x.weight) for x in layers if x.weight]
    weight_casts = {
        f"Weights of {p.removesuffix('_proj')}": _mean_cast([c for n, c in weights if n == p]) for p in PROJECTIONS
    }
    if any(_has_4_bits(cast) for _, cast in weights):
        return section(
            "Distribution of weights over the exponents of E2M1",
            "Each bar is the share of weights with one exponent after scaling. Values in blue bars are rounded by at "
            "most a quarter of their size. Orange bars are zeros and 0.5. The bar at the right has the largest value, "
            "6.",
            _histograms("Weights", weight_casts),
        )
    return section(
        "Distribution of values over the exponents of E4M3",
        "Each bar is the share of elements with one exponent after scaling. Values in blue bars are rounded by at most "
        "a sixteenth of their size. Orange bars are zeros and subnormal values below 2⁻⁶, which have fewer bits. The "
        "bar at the right has the largest value, 448.",
        _histograms("Inputs, on the held-out samples", input_casts),
        _histograms("Weights", weight_casts),
        _histograms("Inputs with the most zeros and subnormal values", {input_name(x.name): c for x, c in smallest}),
    )


def _mean_cast(casts: Sequence[CastReport]) -> CastReport | None:
    """Returns the mean of the fractions, which is exact because tensors of one kind have the same size."""
    if not casts:
        return None
    count = len(casts)
    binades = (sum(shares) / count for shares in zip(*(c.binades for c in casts), strict=True))
    zeros, top = sum(c.zeros for c in casts) / count, sum(c.at_top for c in casts) / count
    return CastReport(None, None, zeros, tuple(binades), top)


def _histograms(title: str, casts: Mapping[str, CastReport | None]) -> str:
    charts = {name: _histogram(cast) for name, cast in casts.items() if cast is not None}
    return f"<h3>{escape(title)}</h3>{figures(charts, 'small')}" if charts else ""


def _has_4_bits(cast: CastReport) -> bool:
    return len(cast.binades) + 1 == len(E2M1_BARS)


def _histogram(cast: CastReport) -> str:
    """Returns bars for zero and for each exponent of the format, and the shares of often tiny bars as text."""
    names, labels = (E2M1_BARS, E2M1_LABELS) if _has_4_bits(cast) else (E4M3_BARS, E4M3_LABELS)
    shares = (cast.zeros, *cast.binades)
    titles = [f"{name}: {format_percent(share)}" for name, share in zip(names, shares, strict=True)]
    zeros, subnormal, top = map(format_percent, (cast.zeros, cast.binades[0], cast.at_top))
    figures_text = f"zero {zeros}, subnormal {subnormal}, largest value {top}"
    return f"{bars(shares, titles, labels, 2)}<small>{figures_text}</small>"


def amax_per_batch(layers: Sequence[LayerReport], tensors: Sequence[TensorReport]) -> str:
    """Shows amax histories: heat maps of all tensors, and curves of the inputs of layers with a high KL divergence."""
    maps = {title: _heat_map(rows) for title, rows in _tensors_by_kind(tensors).items()}
    return section(
        "Amax per batch",
        "Each row is a decoder layer, each column a batch of calibration data. The colour is the amax of the batch as "
        "a fraction of the range of the scale. A row of one colour has similar amaxes in all batches. In a row with "
        "few dark cells a few batches determine the scale, and other data may exceed its range.",
        figures(maps),
        heat_legend() if any(maps.values()) else "",
        _curves(layers, tensors),
    )


def _tensors_by_kind(tensors: Sequence[TensorReport]) -> dict[str, list[TensorReport]]:
    """Groups tensors by kind, such as the inputs of q/k/v; within a kind they are in the order of the layers."""
    results: dict[str, list[TensorReport]] = {}
    for tensor in input_tensors(tensors):
        results.setdefault(f"Inputs of {input_kind(tensor.name.removesuffix('.input'))}", []).append(tensor)
    for ending, title in ((".k", "Keys"), (".v", "Values"), (".grad_output", "Gradients of the output of {}")):
        for tensor in (t for t in tensors if t.name.endswith(ending)):
            results.setdefault(title.format(tensor.name.split(".")[-2].removesuffix("_proj")), []).append(tensor)
    return results


def _heat_map(tensors: Sequence[TensorReport]) -> str:
    titles = [f"{t.name}: amax {format_number(t.amax)} in {t.observations} batches" for t in tensors]
    return heat([[_log2_amax_share(amax, t) for amax in t.history] for t in tensors], titles, "batch")


def _log2_amax_share(amax: float, tensor: TensorReport) -> float | None:
    """Returns log2(amax / largest representable value); without a stored scale, log2(amax / largest amax)."""
    limit = tensor.limit or tensor.amax
    return log2(amax / limit) if amax > 0 and limit > 0 else None


def _curves(layers: Sequence[LayerReport], tensors: Sequence[TensorReport]) -> str:
    by_input = {input_key(t.name.removesuffix(".input")): t for t in input_tensors(tensors)}
    keys = dict.fromkeys(input_key(layer.name) for layer in by_cost(layers))
    first = [by_input[key] for key in keys if key in by_input][:MAX_AMAX_CURVES]
    charts = {input_name(t.name.removesuffix(".input")): curve(t.history, "batch", t.limit) for t in first}
    title = "<h3>Amax per batch of the inputs of the layers with the highest KL divergence</h3>"
    return title + figures(charts, "small") if any(charts.values()) else ""


def amax_per_layer(tensors: Sequence[TensorReport]) -> str:
    """Charts the amaxes of inputs, weights, gradients, keys and values by decoder layer."""
    charts = {}
    for role, title in (("input", "input"), ("weight", "weight"), ("grad_output", "gradient of an output")):
        nonzero = [t for t in tensors if t.name.endswith(f".{role}") and t.amax > 0]
        values = [(t.name.removesuffix(f".{role}"), t.amax, f"amax {format_number(t.amax)}") for t in nonzero]
        charts[f"Amax of the {title}"] = by_layer(values, log=True)
    cached = [t for t in tensors if t.name.endswith((".k", ".v")) and t.amax > 0]
    values = [(t.name, t.amax, f"amax {format_number(t.amax)}") for t in cached]
    charts["Amax of keys and values"] = by_layer(values, ("k", "v"), log=True)
    return section(
        "Amax by layer",
        "The scales are computed from these amaxes. Each tensor has its own scale, because some tensors have values a "
        "hundred times as large as others.",
        figures(charts),
    )


def scale_table(tensors: Sequence[TensorReport]) -> str:
    """Lists every tensor with its amax, its scale and its amax history."""
    rows = (
        [
            escape(t.name),
            *map(format_number, (t.amax, t.scale, t.limit)),
            str(t.observations),
            sparkline(t.history) if len(set(t.history)) > 1 else "",  # a weight has one amax
        ]
        for t in tensors
    )
    head = ("tensor", "amax", "scale", "largest representable value", "batches observed", "amax per batch")
    return details(f"All {len(tensors)} scales", table(head, rows)) if tensors else ""
