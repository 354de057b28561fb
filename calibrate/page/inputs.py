"""Linears that read the same input, which is one tensor under several names: it is shown under the first."""

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from fp8serve.calibration.result import LayerReport, TensorReport

_KIND_OF = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), "into q, k, v"),
    "o_proj": "into o",
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "w1", "w3"), "into gate, up"),
    **dict.fromkeys(("down_proj", "w2"), "into down"),
}
KINDS = tuple(dict.fromkeys(_KIND_OF.values()))
T = TypeVar("T")


def kind_of(linear: str) -> str:
    """The name of the input of the linear of this name; any other name is returned as it is."""
    last = linear.rpartition(".")[2]
    return _KIND_OF.get(last, last)


def index_of(name: str) -> int | None:
    """The number of the decoder layer that a tensor or a linear belongs to."""
    found = re.search(r"layers\.(\d+)\.", name)
    return int(found[1]) if found else None


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
    found = [t for t in tensors if t.name.endswith(".input")]
    return _first(found, lambda tensor: tensor.name.removesuffix(".input"))


def _first(items: Sequence[T], linear: Callable[[T], str]) -> list[T]:
    found: dict[tuple[str, str], T] = {}
    for item in items:
        found.setdefault(place_of(linear(item)), item)
    return list(found.values())
