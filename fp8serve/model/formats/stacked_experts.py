"""Splits stacked experts [E, N, K] into single experts, as most checkpoints and all of fp8serve's have them.

    P.experts.gate_up_proj [E, 2 I, H]   ->  P.experts.0.gate_proj.weight [I, H], P.experts.0.up_proj.weight, ...
    P.experts.down_proj    [E, H, I]     ->  P.experts.0.down_proj.weight [H, I], ...

The module also splits the scales of FP8 weights (`gate_up_proj_scale_inv`) and of static inputs
(`gate_up_proj_activation_scale` [E]); gate and up share the latter. An expert is a slice of the stack's bytes, so
nothing is copied. transformers 5 can save stacks. It names them after its modules, for example `mlp` for Mixtral, whose
own files have `block_sparse_moe`. llm-compressor writes the experts of every family one by one as gate_proj, up_proj
and down_proj; Mixtral's own files call them w1, w3 and w2.

In gpt-oss files, the rows of gate and up alternate, and weights are in MXFP4 or BF16:

    P.experts.gate_up_proj_blocks  U8   [E, 2 I, H / 32, 16]   32 values of 4 bits, the lower half of a byte first
    P.experts.gate_up_proj_scales  U8   [E, 2 I, H / 32]       exponents + 127, one for each 32 values
    P.experts.gate_up_proj_bias    BF16 [E, 2 I]
    P.experts.gate_up_proj         BF16 [E, H, 2 I]            instead of blocks and scales: the weight transposed

`down_proj` has the same tensors, [E, H, I / 32, 16] and so on, without alternating rows. An expert's weight and scales
are views of a stack, with its codes as other files have them: U8 [I, H / 2] and [I, H / 32]. fp8serve writes no stacks.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from fp8serve.errors import ModelError
from fp8serve.fp8.ops.arithmetic import BLOCK, MX_BLOCK
from fp8serve.model.config.mixture import Experts
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.storage.shards import ComputedShards, Shards, StoredTensor

_GPT_OSS_STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_blocks|_bias|)")
_MLP = re.compile(r"(model\.layers\.(\d+))\.mlp\.(gate\.|experts\.)")
_EXPERT = re.compile(r"(.*\.experts\.\d+)\.(gate|up|down)_proj\.(.+)")
_STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_scale_inv|_scale|)")
_INPUT_SCALES = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)_(activation_scale|input_scale)")


def _split_gpt_oss_stacks(shards: Shards, experts: Experts) -> Shards:
    """Returns the tensors with one entry per expert. Raises ModelError if a stack has a wrong shape."""
    entries, computed = dict(shards.entries), dict[str, Callable[[], Tensor]]()
    for source_name in shards.entries:
        match = _GPT_OSS_STACK.fullmatch(source_name)
        if match is None:
            continue
        owner, projection, kind = match.groups()
        leaves = _leaves(projection, experts)
        for stack, leaf_suffix, shape in _stacks(shards, source_name, kind, experts):
            part = replace(entries.pop(stack), shape=(shape[0] // len(leaves), *shape[1:]), note=None)
            for expert, (i, leaf) in product(range(experts.count), enumerate(leaves)):
                name, rows = f"{owner}.{expert}.{leaf}.{leaf_suffix}", slice(i, None, len(leaves))
                entries[name], computed[name] = part, partial(_read_gpt_oss_part, shards, stack, kind, expert, rows)
    return ComputedShards(shards, entries, computed)


def _stacks(
    shards: Shards, source_name: str, kind: str, experts: Experts
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yields a stack, and beside blocks that of their scales: its name, the name of an expert's part, and the shape of
    the parts of all leaves. Raises ModelError if a stack has a wrong shape."""
    shape = shards.entries[source_name].shape
    dims = {"_blocks": 4, "_bias": 2, "": 3}[kind]
    scales_name = source_name.replace("_blocks", "_scales")
    scales = shards.entries.get(scales_name)
    is_valid = len(shape) == dims and shape[0] == experts.count
    if kind == "_blocks":
        is_valid = is_valid and shape[3] == MX_BLOCK // 2 and scales is not None and scales.shape == shape[:3]
    if not is_valid:
        raise ModelError(
            f"{shards.entries[source_name].file}: {source_name} has the shape {list(shape)}, "
            f"which is not that of {experts.count} experts."
        )
    if kind == "_blocks":
        yield source_name, "weight", (shape[1], shape[2] * MX_BLOCK // 2)
        yield scales_name, "weight_scale", shape[1:3]
    elif kind == "_bias":
        yield source_name, "bias", shape[1:]
    else:
        yield source_name, "weight", (shape[2], shape[1])


def _read_gpt_oss_part(shards: Shards, stack: str, kind: str, expert: int, rows: slice) -> Tensor:
    tensor = shards[stack][expert]
    if kind == "_blocks":  # codes [., K / 32, 16] or scales
        return tensor[rows].flatten(1)
    return tensor[rows].contiguous() if kind == "_bias" else tensor[:, rows].t().contiguous()


def split_stacked_experts(shards: Shards, config: ModelConfig) -> Shards:
    """Returns the tensors with one entry per expert. Raises ModelError if a stack is invalid or a name occurs twice."""
    experts = config.experts
    if experts is not None and experts.interleaved:
        return _split_gpt_oss_stacks(shards, experts)
    if experts is None:
        return shards
    # A tensor of shape [experts, 2, 1] holds one scale for gate and one for up. If the hidden size is at most
    # BLOCK, the scales of two blocks have this shape, too. Input scales then tell the two apart, because only
    # files with one scale for gate and one for up have them.
    has_pairs = config.hidden_size > BLOCK or any(map(_INPUT_SCALES.fullmatch, shards.entries))
    entries: dict[str, StoredTensor] = {}
    for source_name, entry in shards.entries.items():
        for name, part in _parts(_family_name(source_name, experts), entry, experts, has_pairs):
            if name in entries:
                raise ModelError(f"{entry.file} holds {name} twice, under two names.")
            entries[name] = part
    return Shards(entries, shards.metadata)


def _family_name(name: str, experts: Experts) -> str:
    """Returns the name of the tensor in the family's own checkpoints."""
    name = _MLP.sub(rf"\1.{experts.names.block}.\3", name)
    match = _EXPERT.fullmatch(name)
    return name if match is None else f"{match[1]}.{getattr(experts.names, match[2])}.{match[3]}"


def _parts(name: str, entry: StoredTensor, experts: Experts, has_pairs: bool) -> Iterator[tuple[str, StoredTensor]]:
    """Yields each expert's part of the stack `entry`, or `entry` itself if it is no stack."""
    if (inputs := _INPUT_SCALES.fullmatch(name)) is not None and entry.shape == (experts.count,):
        yield from _input_scales(inputs, entry, experts)
        return
    match = _STACK.fullmatch(name)
    if match is None or len(entry.shape) != 3:
        yield name, entry
        return
    if entry.shape[0] != experts.count:
        raise ModelError(
            f"{entry.file}: {name} holds {entry.shape[0]} experts, and config.json names {experts.count}; one of the "
            "two is wrong, or the file is incomplete."
        )
    owner, projection, scale = match.groups()
    leaves = _leaves(projection, experts)
    _, rows, columns = entry.shape
    leaf_rows = 1 if rows == 1 else rows // len(leaves)  # gate and up share a scale with one row
    is_scale_pair = has_pairs and (rows, columns) == (len(leaves), 1)
    if scale and rows > 1 and not is_scale_pair and rows != len(leaves) * experts.size:
        _check_blocks(entry, name, experts)
    for expert in range(experts.count):
        for i, leaf in enumerate(leaves):
            row = expert * rows + min(i * leaf_rows, rows - leaf_rows)
            start = entry.start + math.prod((row, columns)) * entry.dtype.itemsize
            part = replace(entry, shape=(leaf_rows, columns), start=start, note=None)
            yield f"{owner}.{expert}.{leaf}.weight{scale}", part


def _leaves(projection: str, experts: Experts) -> tuple[str, ...]:
    names = experts.names
    return (names.gate, names.up) if projection == "gate_up_proj" else (names.down,)


def _input_scales(match: "re.Match[str]", entry: StoredTensor, experts: Experts) -> Iterator[tuple[str, StoredTensor]]:
    owner, projection, scale = match.groups()
    for expert in range(experts.count):
        scalar = replace(entry, shape=(), start=entry.start + expert * entry.dtype.itemsize, note=None)
        for leaf in _leaves(projection, experts):
            yield f"{owner}.{expert}.{leaf}.{scale}", scalar


def _check_blocks(entry: StoredTensor, name: str, experts: Experts) -> None:
    """Raises ModelError if a block with one scale has rows of both gate and up."""
    is_mx = entry.dtype is torch.uint8  # a scale for each row and 32 columns
    if not is_mx and name.endswith(("gate_up_proj_scale_inv", "gate_up_proj_scale")) and experts.size % BLOCK:
        raise ModelError(
            f"{entry.file}: {name} has blocks with rows of both gate and up, because their {experts.size} rows are not "
            f"a multiple of {BLOCK}; write the experts one by one."
        )
