"""Every scale of a checkpoint as one table: what it scales, in which direction, its shape, and where it came from.

Reads headers and scale tensors only, never a weight, and needs no supported architecture: it is what one runs when a
checkpoint does not load. So a bad or unknown scale is a row with a `problem` here, where loading would refuse.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fp8serve.errors import Fp8ServeError, ModelError
from fp8serve.model import interop
from fp8serve.model.scales import FILE_NAME, FORMAT, ROLES
from fp8serve.model.shards import Shards, StoredTensor, open_shards, read_header

FP8_MAX = {"grad_output": 57344.0}  # E5M2; everything else is E4M3
_ROLE_NAMES = {"k": "key cache", "v": "value cache", "kv": "key and value cache", "grad_output": "output gradient"}


@dataclass(frozen=True)
class ScaleRow:
    """One stored scale.

    module: the layer, by its Hugging Face name. role: weight, input, output gradient, key cache... direction: whether
    the stored number "quantizes" or "dequantizes". smallest, largest: of the stored numbers. reaches: the largest
    magnitude that can be represented with it. history: the amaxes kept with it, index 0 being the staging slot.
    """

    module: str
    role: str
    key: str
    origin: str
    direction: str
    dtype: str
    shape: tuple[int, ...]
    smallest: float
    largest: float
    reaches: float
    history: tuple[float, ...] | None = None
    problem: str | None = None


def describe_scales(path: Path | str) -> list[ScaleRow]:
    """The scales in a model directory (scales.safetensors in it included) or in one .safetensors file, by name.

    ModelError: there is nothing there, or its files are damaged.
    """
    path = Path(path)
    if path.is_file():
        return _of_file(path)
    if not path.is_dir():
        raise ModelError(f"{path} does not exist; give a model directory or a .safetensors file.")
    beside = path / FILE_NAME
    has_weights = any(path.glob("model*.safetensors*"))
    rows = _of_checkpoint(open_shards(path)) if has_weights or not beside.exists() else []
    return rows + (_of_file(beside) if beside.exists() else [])


def _of_file(path: Path) -> list[ScaleRow]:
    entries, metadata = read_header(path)
    shards = Shards(entries, metadata)
    return _of_state(shards) if metadata.get("format") == FORMAT else _of_checkpoint(shards)


def _of_checkpoint(shards: Shards) -> list[ScaleRow]:
    """Other projects' keys; all of them dequantize."""
    rows = [_foreign_row(shards, key) for key in sorted(shards, key=_natural)]
    return [row for row in rows if row is not None]


def _foreign_row(shards: Shards, key: str) -> ScaleRow | None:
    try:
        found = interop.classify(key)
    except Fp8ServeError as e:
        return _row(shards, key, key.rpartition(".")[0], "unknown", "unknown", str(e))
    return None if found is None else _row(shards, key, found.owner, found.role, "dequantizes")


def _of_state(shards: Shards) -> list[ScaleRow]:
    """Our own file; its scales quantize."""
    rows = []
    for key in sorted((k for k in shards if not k.endswith(".amax_history")), key=_natural):
        name, _, kind = key.rpartition(".")
        module, _, role = name.rpartition(".")
        known = kind == "scale" and role in ROLES
        problem = None if known else f"{key} is not a key of this format."
        history = shards.get(f"{name}.amax_history")
        rows.append(_row(shards, key, module, role, "quantizes" if known else "unknown", problem, history))
    return rows


def _row(
    shards: Shards,
    key: str,
    module: str,
    role: str,
    direction: str,
    problem: str | None = None,
    history: Tensor | None = None,
) -> ScaleRow:
    entry = shards.entries[key]
    values = shards[key].float().flatten()
    low, high = (float(values.min()), float(values.max())) if values.numel() else (0.0, 0.0)
    if history is not None and not bool(history.any()):
        problem = problem or "never observed"
    return ScaleRow(
        module=module,
        role=_ROLE_NAMES.get(role, role),
        key=key,
        origin=entry.file.name,
        direction=direction,
        dtype=str(entry.dtype).removeprefix("torch."),
        shape=entry.shape,
        smallest=low,
        largest=high,
        reaches=_reach(role, direction, low, high),
        history=None if history is None else tuple(history.tolist()),
        problem=problem or _value_problem(values, entry),
    )


def _reach(role: str, direction: str, low: float, high: float) -> float:
    fp8_max = FP8_MAX.get(role, 448.0)
    if direction == "quantizes":
        return fp8_max / low if low > 0 else float("nan")
    return fp8_max * high


def _value_problem(values: Tensor, entry: StoredTensor) -> str | None:
    if not entry.dtype.is_floating_point:
        return f"stored as {entry.dtype}"
    bad = ~(torch.isfinite(values) & (values > 0))
    return f"holds {values[bad][0].item()}, which cannot be served" if bool(bad.any()) else None


def _natural(key: str) -> list[tuple[int, str]]:
    """Layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in key.split(".")]
