"""Splits experts that are stacked in a file, [E, N, K], into single ones, as most files and all of ours have them.

    P.experts.gate_up_proj [E, 2 I, H]   ->  P.experts.0.gate_proj.weight [I, H], P.experts.0.up_proj.weight, ...
    P.experts.down_proj    [E, H, I]     ->  P.experts.0.down_proj.weight [H, I], ...

and the scales of FP8 weights with them (`gate_up_proj_scale_inv`), and of static inputs, one for each expert
(`gate_up_proj_activation_scale` [E]), which gate and up both read. An expert is a part of the stack's bytes, so nothing
is copied. transformers 5 saves this layout on demand, under the names of its modules: `mlp`, also for Mixtral, whose
files have `block_sparse_moe`. llm-compressor writes every family's experts one by one as gate_proj, up_proj and
down_proj; Mixtral's own files call them w1, w3 and w2.

gpt-oss files have alternating rows of gate and up, in MXFP4 or BF16:

    P.experts.gate_up_proj_blocks  U8   [E, 2 I, H / 32, 16]   32 values of 4 bits, the lower half of a byte first
    P.experts.gate_up_proj_scales  U8   [E, 2 I, H / 32]       exponents + 127, one for each 32 values
    P.experts.gate_up_proj_bias    BF16 [E, 2 I]
    P.experts.gate_up_proj         BF16 [E, H, 2 I]            instead of blocks and scales: the weight transposed

`down_proj` alike, [E, H, I / 32, 16] and so on, without alternating rows. A weight is computed when it is read: every
MXFP4 value is a BF16 value (OCP Microscaling Formats 1.0, sections 5.3.3 and 6.3), so nothing is lost. MXFP4 is read
here and not written.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fp8serve.errors import ModelError
from fp8serve.fp8.ops.arithmetic import BLOCK as BLOCK_ROWS
from fp8serve.model.config.mixture import Experts
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.formats.microscaling import BLOCK, mxfp4
from fp8serve.model.storage.shards import Shards, StoredTensor

_NAME = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_blocks|_bias|)")
_Part = tuple[StoredTensor, Callable[[], Tensor]]
_BLOCK = re.compile(r"(model\.layers\.(\d+))\.mlp\.(gate\.|experts\.)")
_LEAF = re.compile(r"(.*\.experts\.\d+)\.(gate|up|down)_proj\.(.+)")
_STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_scale_inv|_scale|)")
_INPUTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)_(activation_scale|input_scale)")


class _Computed(Shards):
    """Shards in which some tensors are computed from others."""

    def __init__(self, entries: dict[str, StoredTensor], computed: Mapping[str, Callable[[], Tensor]]) -> None:
        super().__init__(entries)
        self._computed = computed

    def __getitem__(self, name: str) -> Tensor:
        compute = self._computed.get(name)
        return super().__getitem__(name) if compute is None else compute()


def _separated(shards: Shards, experts: Experts) -> Shards:
    """The same tensors, each expert's under a name of its own. ModelError: a stack has another shape."""
    entries, computed = dict(shards.entries), dict[str, Callable[[], Tensor]]()
    for stored in shards.entries:
        match = _NAME.fullmatch(stored)
        if match is None:
            continue
        for name, (entry, compute) in _interleaved_parts(shards, stored, match, experts):
            entries[name], computed[name] = entry, compute
        del entries[stored]
        entries.pop(f"{match[1]}.{match[2]}_scales", None)
    return _Computed(entries, computed)


def _interleaved_parts(
    shards: Shards, stored: str, match: "re.Match[str]", experts: Experts
) -> Iterator[tuple[str, _Part]]:
    owner, projection, kind = match.groups()
    leaves, entry = _leaves(projection, experts), shards.entries[stored]
    rows, columns = _sizes(shards, stored, kind, experts)
    for expert in range(experts.count):
        for i, leaf in enumerate(leaves):
            part = slice(i, None, len(leaves))
            shape = (rows // len(leaves), *(() if kind == "_bias" else (columns,)))
            what = "bias" if kind == "_bias" else "weight"
            dtype = torch.bfloat16 if kind == "_blocks" else entry.dtype
            described = replace(entry, dtype=dtype, shape=shape, note=None)
            yield f"{owner}.{expert}.{leaf}.{what}", (described, _maker(shards, stored, kind, expert, part))


def _sizes(shards: Shards, stored: str, kind: str, experts: Experts) -> tuple[int, int]:
    """(out, in) of every expert's matrix."""
    shape = shards.entries[stored].shape
    dims = {"_blocks": 4, "_bias": 2, "": 3}[kind]
    scales = shards.entries.get(stored.replace("_blocks", "_scales"))
    fits = len(shape) == dims and shape[0] == experts.count
    if kind == "_blocks":
        fits = fits and shape[3] == BLOCK // 2 and scales is not None and scales.shape == shape[:3]
    if not fits:
        raise ModelError(f"{shards.entries[stored].file}: {stored} has the shape {list(shape)}, which is not that of "
                         f"{experts.count} experts.")  # fmt: skip
    if kind == "_blocks":
        return shape[1], shape[2] * BLOCK
    return (shape[1], 0) if kind == "_bias" else (shape[2], shape[1])


def _maker(shards: Shards, stored: str, kind: str, expert: int, part: slice) -> Callable[[], Tensor]:
    def make() -> Tensor:
        whole = shards[stored][expert]
        if kind == "_blocks":
            return mxfp4(whole[part].flatten(-2), shards[stored.replace("_blocks", "_scales")][expert][part])
        return whole[part].contiguous() if kind == "_bias" else whole[:, part].t().contiguous()

    return make


def unstacked(shards: Shards, config: ModelConfig) -> Shards:
    """The same tensors, each expert's under a name of its own. ModelError: an expert is there twice."""
    experts = config.experts
    if experts is not None and experts.interleaved:
        return _separated(shards, experts)
    if experts is None:
        return shards
    # [E, 2, 1] is a scale for gate and one for up, except in models so small that it may be two blocks
    halved = config.hidden_size > BLOCK_ROWS or any(_INPUTS.fullmatch(name) for name in shards.entries)
    entries: dict[str, StoredTensor] = {}
    for stored, entry in shards.entries.items():
        for name, part in _parts(_renamed(stored, experts), entry, experts, halved):
            if name in entries:
                raise ModelError(f"{entry.file} holds {name} twice, under two names.")
            entries[name] = part
    return Shards(entries, shards.metadata)


def _renamed(name: str, experts: Experts) -> str:
    """As the family's own files have it."""
    name = _BLOCK.sub(rf"\1.{experts.names.block}.\3", name)
    match = _LEAF.fullmatch(name)
    return name if match is None else f"{match[1]}.{getattr(experts.names, match[2])}.{match[3]}"


def _parts(name: str, entry: StoredTensor, experts: Experts, halved: bool) -> Iterator[tuple[str, StoredTensor]]:
    """The contents of `entry`: every expert's part of a stack, or itself."""
    if (inputs := _INPUTS.fullmatch(name)) is not None and entry.shape == (experts.count,):
        yield from _of_inputs(inputs, entry, experts)
        return
    match = _STACK.fullmatch(name)
    if match is None or len(entry.shape) != 3:
        yield name, entry
        return
    _check_count(entry, name, experts)
    owner, projection, scale = match.groups()
    leaves = _leaves(projection, experts)
    _, rows, columns = entry.shape
    own = 1 if rows == 1 else rows // len(leaves)  # a scale for both halves is the scale of each
    of_halves = halved and (rows, columns) == (len(leaves), 1)
    if scale and rows > 1 and not of_halves and rows != len(leaves) * experts.size:
        _check_blocks(entry, name, experts)
    for expert in range(experts.count):
        for i, leaf in enumerate(leaves):
            row = expert * rows + min(i * own, rows - own)
            start = entry.start + math.prod((row, columns)) * entry.dtype.itemsize
            yield f"{owner}.{expert}.{leaf}.weight{scale}", replace(entry, shape=(own, columns), start=start, note=None)


def _leaves(projection: str, experts: Experts) -> tuple[str, ...]:
    names = experts.names
    return (names.gate, names.up) if projection == "gate_up_proj" else (names.down,)


def _of_inputs(match: "re.Match[str]", entry: StoredTensor, experts: Experts) -> Iterator[tuple[str, StoredTensor]]:
    owner, projection, scale = match.groups()
    for expert in range(experts.count):
        one = replace(entry, shape=(), start=entry.start + expert * entry.dtype.itemsize, note=None)
        for leaf in _leaves(projection, experts):
            yield f"{owner}.{expert}.{leaf}.{scale}", one


def _check_count(entry: StoredTensor, name: str, experts: Experts) -> None:
    """ModelError where a stack holds more experts than config.json names, or fewer."""
    if entry.shape[0] != experts.count:
        raise ModelError(
            f"{entry.file}: {name} holds {entry.shape[0]} experts, and config.json names {experts.count}; one of the "
            "two is wrong, or the file is incomplete."
        )


def _check_blocks(entry: StoredTensor, name: str, experts: Experts) -> None:
    """ModelError where a block of scales holds rows of both gate and up."""
    if name.endswith(("gate_up_proj_scale_inv", "gate_up_proj_scale")) and experts.size % BLOCK_ROWS:
        raise ModelError(
            f"{entry.file}: {name} has blocks that belong to gate and up both, for {experts.size} rows of each are no "
            f"multiple of {BLOCK_ROWS}; write the experts one by one."
        )
