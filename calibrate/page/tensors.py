"""Sections on observed tensors: amaxes batch by batch and layer by layer, and the scales from them."""

from collections.abc import Sequence
from html import escape
from math import log2

from fp8serve.calibration.charts import sparkline
from fp8serve.calibration.result import LayerReport, TensorReport, worst_first
from fp8serve.calibration.words import number

from .curve import curve
from .heat import heat, heat_legend
from .html import details, figures, section, table
from .inputs import input_name, input_tensors, kind_of, place_of
from .series import by_projection, keys_and_values

TROUBLED = 6  # inputs that are shown one by one


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
    found: dict[str, list[TensorReport]] = {}
    for tensor in input_tensors(tensors):
        found.setdefault(f"Inputs {kind_of(tensor.name.removesuffix('.input'))}", []).append(tensor)
    for ending, title in ((".k", "Keys"), (".v", "Values"), (".grad_output", "Gradients of the output of {}")):
        for tensor in (t for t in tensors if t.name.endswith(ending)):
            found.setdefault(title.format(tensor.name.split(".")[-2].removesuffix("_proj")), []).append(tensor)
    return found


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
    shown = [by_input[place] for place in places if place in by_input][:TROUBLED]
    drawn = {input_name(t.name.removesuffix(".input")): curve(t.history, "batch", t.limit) for t in shown}
    title = "<h3>Inputs of the layers that cost most: their largest value in each batch</h3>"
    return title + figures(drawn, "small") if any(drawn.values()) else ""


def largest(tensors: Sequence[TensorReport]) -> str:
    """Amaxes over the depth of the model."""
    drawn = {}
    for role, title in (("input", "input"), ("weight", "weight"), ("grad_output", "gradient of an output")):
        found = [t for t in tensors if t.name.endswith(f".{role}") and t.amax > 0]
        values = [(t.name.removesuffix(f".{role}"), t.amax, f"amax {number(t.amax)}") for t in found]
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
