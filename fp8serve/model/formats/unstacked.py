"""Splits experts that are stacked in a file, [E, N, K], into single ones, as most files and all of ours have them.

    P.experts.gate_up_proj [E, 2 I, H]   ->  P.experts.0.gate_proj.weight [I, H], P.experts.0.up_proj.weight, ...
    P.experts.down_proj    [E, H, I]     ->  P.experts.0.down_proj.weight [H, I], ...

and the scales of FP8 weights with them (`gate_up_proj_scale_inv`), and of static inputs, one for each expert
(`gate_up_proj_activation_scale` [E]), which gate and up both read. An expert is a part of the stack's bytes, so nothing
is copied. transformers 5 saves this layout on demand, under the names of its modules: `mlp`, also for Mixtral, whose
files have `block_sparse_moe`. llm-compressor writes every family's experts one by one as gate_proj, up_proj and
down_proj; Mixtral's own files call them w1, w3 and w2.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from fp8serve.errors import ModelError
from fp8serve.fp8.ops.arithmetic import BLOCK as BLOCK_ROWS
from fp8serve.model.config.decoder import ModelConfig
from fp8serve.model.config.mixture import Experts
from fp8serve.model.formats.interleaved import separated
from fp8serve.model.storage.shards import Shards, StoredTensor

_BLOCK = re.compile(r"(model\.layers\.(\d+))\.mlp\.(gate\.|experts\.)")
_LEAF = re.compile(r"(.*\.experts\.\d+)\.(gate|up|down)_proj\.(.+)")
_STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_scale_inv|_scale|)")
_INPUTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)_(activation_scale|input_scale)")


def unstacked(shards: Shards, config: ModelConfig) -> Shards:
    """The same tensors, each expert's under a name of its own. ModelError: an expert is there twice."""
    experts = config.experts
    if experts is not None and experts.interleaved:
        return separated(shards, experts)
    if experts is None:
        return shards
    # [E, 2, 1] is a scale for gate and one for up, except in models so small that it may be two blocks
    halved = config.hidden_size > BLOCK_ROWS or any(_INPUTS.fullmatch(name) for name in shards.entries)
    found: dict[str, StoredTensor] = {}
    for stored, entry in shards.entries.items():
        for name, part in _parts(_renamed(stored, experts), entry, experts, halved):
            if name in found:
                raise ModelError(f"{entry.file} holds {name} twice, under two names.")
            found[name] = part
    return Shards(found, shards.metadata)


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
