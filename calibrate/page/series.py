"""Dots for charts over the depth of the model, from values of layers or tensors by their names."""

from collections.abc import Callable, Iterable, Sequence

from fp8serve.calibration.charts import Dot, dots

from .inputs import KINDS, index_of, kind_of

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj",
               "gate_up_proj")  # fmt: skip
Value = tuple[str, float, str]  # name of a layer or tensor, y, and y as it is shown


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
    for name, y, shown in values:
        layer = index_of(name)
        if layer is not None and of(name) in series:
            series[of(name)].append(Dot(layer, y, f"{name}: {shown}"))
    named = {name.removesuffix("_proj"): row for name, row in series.items() if row}
    return dots(named, "decoder layer", log=log)
