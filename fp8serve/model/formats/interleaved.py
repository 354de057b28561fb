"""Splits the experts of gpt-oss files: a layer has them in one tensor, with alternating rows of gate and up, MXFP4 or
BF16.

    P.experts.gate_up_proj_blocks  U8   [E, 2 I, H / 32, 16]   32 values of 4 bits, the lower half of a byte first
    P.experts.gate_up_proj_scales  U8   [E, 2 I, H / 32]       exponents + 127, one for each 32 values
    P.experts.gate_up_proj_bias    BF16 [E, 2 I]
    P.experts.gate_up_proj         BF16 [E, H, 2 I]            instead of blocks and scales: the weight transposed

`down_proj` alike, [E, H, I / 32, 16] and so on, without alternating rows. A weight is computed when it is read: every
MXFP4 value is a BF16 value (OCP Microscaling Formats 1.0, sections 5.3.3 and 6.3), so nothing is lost. MXFP4 is read
here and not written.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fp8serve.errors import ModelError
from fp8serve.model.config.mixture import Experts
from fp8serve.model.formats.microscaling import BLOCK, mxfp4
from fp8serve.model.storage.shards import Shards, StoredTensor

_NAME = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_blocks|_bias|)")
Made = tuple[StoredTensor, Callable[[], Tensor]]


class Separated(Shards):
    """Shards in which some tensors are computed from others."""

    def __init__(self, entries: dict[str, StoredTensor], made: Mapping[str, Callable[[], Tensor]]) -> None:
        super().__init__(entries)
        self._made = made

    def __getitem__(self, name: str) -> Tensor:
        made = self._made.get(name)
        return super().__getitem__(name) if made is None else made()


def separated(shards: Shards, experts: Experts) -> Shards:
    """The same tensors, each expert's under a name of its own. ModelError: a stack has another shape."""
    entries, made = dict(shards.entries), dict[str, Callable[[], Tensor]]()
    for stored in shards.entries:
        match = _NAME.fullmatch(stored)
        if match is None:
            continue
        for name, (entry, make) in _parts(shards, stored, match, experts):
            entries[name], made[name] = entry, make
        del entries[stored]
        entries.pop(f"{match[1]}.{match[2]}_scales", None)
    return Separated(entries, made)


def _parts(shards: Shards, stored: str, match: "re.Match[str]", experts: Experts) -> Iterator[tuple[str, Made]]:
    owner, projection, kind = match.groups()
    names = experts.names
    leaves = (names.gate, names.up) if projection == "gate_up_proj" else (names.down,)
    entry = shards.entries[stored]
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
