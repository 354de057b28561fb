"""Sections on layers: the cost and noise of each, whether its input fits, and where its values fall."""

from collections.abc import Callable, Mapping, Sequence
from html import escape

from fp8serve.calibration.result import CastReport, LayerReport, TensorReport, worst_first
from fp8serve.calibration.words import NONE, decibels, number, percent, short

from .bars import bars, caption
from .findings import margin
from .html import bar, details, figures, section, table, titled
from .inputs import KINDS, input_name, inputs, kind_of
from .series import PROJECTIONS, by_input, by_projection

WORST = 12  # rows of the list of costs
SMALLEST = 4  # inputs that are shown one by one


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
        [titled(short(x.name), x.name), bar(x.kl or 0.0, largest), number(x.kl), *_sqnrs(x), percent(x.underflowed)]
        for x in layers
    )
    return table(("layer", "", "KL, nats", "SQNR", "of input", "of weight", "inputs lost to zero"), rows)


def _sqnrs(layer: LayerReport) -> list[str]:
    casts = (NONE if cast is None else decibels(cast.sqnr_db) for cast in (layer.input, layer.weight))
    return [decibels(layer.sqnr_db), *casts]


def _layer_table(layers: Sequence[LayerReport], tensors: Sequence[TensorReport]) -> str:
    by_name = {t.name: t for t in tensors}
    rows = []
    for layer in layers:
        lost = (percent(f) for f in (layer.saturated, layer.rounded_to_top, layer.underflowed))
        seen = _seen(by_name.get(f"{layer.name}.input"))
        rows.append([escape(layer.name), number(layer.kl), *_sqnrs(layer), *lost, *seen])
    head = ("layer", "KL, nats", "SQNR", "of input", "of weight", "cut off", "at the top", "underflowed")
    return table((*head, "input amax", "input scale"), rows)


def _seen(tensor: TensorReport | None) -> tuple[str, str]:
    return (NONE, NONE) if tensor is None else (number(tensor.amax), number(tensor.scale))


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


def _weights(projection: str) -> str:
    return f"Weights of {projection.removesuffix('_proj')}"


def _mean(casts: Sequence[CastReport]) -> CastReport | None:
    """Of tensors of one size."""
    if not casts:
        return None
    count = len(casts)
    binades = (sum(shares) / count for shares in zip(*(c.binades for c in casts), strict=True))
    zeros, top = sum(c.zeros for c in casts) / count, sum(c.at_top for c in casts) / count
    return CastReport(None, None, zeros, tuple(binades), top)


def _histograms(title: str, casts: Mapping[str, CastReport | None]) -> str:
    drawn = {name: f"{bars(c)}<small>{caption(c)}</small>" for name, c in casts.items() if c is not None}
    return f"<h3>{escape(title)}</h3>{figures(drawn, 'small')}" if drawn else ""
