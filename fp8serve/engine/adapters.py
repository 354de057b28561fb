"""The adapters that an engine has loaded beside its model, by name: LoRA and DoRA, several in one batch.

A request names one; the rows of its sequence run with it, others do not (fp8/served_adapters.py). A name
stands for one adapter at a time. An adapter that was unloaded stays until its last sequence has ended; meanwhile its
name may stand for another, because sequences keep the adapter with which they began. The prefix cache identifies
adapters by their contents, on disk as well.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from fp8serve.errors import MachineError, ModelError, RequestError, shown
from fp8serve.fp8.batch_invariant_linear import BatchInvariantLinear
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.served_adapters import Assignment, Part, ServedAdapters, attach, factor_of
from fp8serve.model.building import Model
from fp8serve.model.storage.memory import free_memory

if TYPE_CHECKING:
    from fp8serve.model.adapters import Adapter, LowRank

DIGEST_BYTES = 16


@dataclass(eq=False)
class LoadedAdapter:
    """One adapter; `digest` names its numbers. users: sequences that hold it."""

    name: str
    number: int
    digest: bytes
    rank: int
    nbytes: int
    parts: dict[str, Part]  # by linear
    users: int = 0
    retired: bool = False

    def view(self) -> dict[str, Any]:
        """JSON."""
        kind = "dora" if any(part.factor is not None for part in self.parts.values()) else "lora"
        facts = {"name": self.name, "method": kind, "rank": self.rank, "layers": len(self.parts)}
        return facts | {"bytes": self.nbytes, "digest": self.digest.hex()}


@dataclass
class Adapters:
    """The adapters of one model, whose linear layers are in their final form."""

    model: Model
    max_rank: int
    assignment: Assignment = field(default_factory=Assignment)
    named: dict[str, LoadedAdapter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self._held: dict[int, LoadedAdapter] = {}  # by number, including unloaded ones that still run

    def load(self, name: str, directory: Path) -> LoadedAdapter:
        """The adapter of a directory as peft writes it. ModelError when it does not fit the model, RequestError when
        the name is in use, MachineError when memory is short; nothing has changed then."""
        if name in self.named:
            raise RequestError(f"There is an adapter {shown(name)} already; unload it first, or choose another name.")
        from fp8serve.model.adapters import read_adapter  # needs safetensors, which an engine without files does not

        low_ranks = read_adapter(directory, self.model.config)
        self._check(directory, low_ranks)
        number = next(self._numbers)
        parts = {linear: self._part(linear, low) for linear, low in low_ranks.items()}
        rank, size = max(low.a.shape[0] for low in low_ranks.values()), sum(low.nbytes for low in low_ranks.values())
        new = LoadedAdapter(name, number, _digest(low_ranks), rank, size, parts)
        self._held[number] = self.named[name] = new
        self._stack(parts)
        return new

    def unload(self, name: str) -> None:
        """From now on no sequence gets the adapter. RequestError: there is none of that name."""
        adapter = self.find(name)
        del self.named[name]
        adapter.retired = True
        self._free(adapter)

    def find(self, name: str) -> LoadedAdapter:
        """RequestError: there is none of that name."""
        if (adapter := self.named.get(name)) is None:
            raise RequestError(f"There is no adapter {shown(name)} here; load it first.")
        return adapter

    def take(self, name: str | None) -> LoadedAdapter | None:
        """The adapter for a sequence, which gives it back when it ends. RequestError: see `find`."""
        if name is None:
            return None
        adapter = self.find(name)
        adapter.users += 1
        return adapter

    def give_back(self, adapter: LoadedAdapter | None) -> None:
        if adapter is not None:
            adapter.users -= 1
            self._free(adapter)

    def _check(self, directory: Path, low_ranks: "Adapter") -> None:
        """ModelError, MachineError: see `load`. Called before anything is computed."""
        for linear, low in low_ranks.items():
            if (rank := low.a.shape[0]) > self.max_rank:
                raise ModelError(
                    f"{directory}: the rank of {linear} is {rank}, above the limit of {self.max_rank}; raise "
                    "max_lora_rank."
                )
            if not isinstance(self.model.get_submodule(linear), FrozenLinear | BatchInvariantLinear):
                raise ModelError(f"{directory}: {linear} is computed in a way that takes no adapter; train without it.")
        size = 2 * sum(low.nbytes for low in low_ranks.values())  # stacks are copies, and the old ones are freed last
        if self.model.embedding.weight.device.type == "cpu" and size > (free := free_memory()):
            raise MachineError(f"{directory} needs {size:,} bytes and {free:,} are free; unload another adapter first.")

    def _part(self, linear: str, low: "LowRank") -> Part:
        base = self.model.get_submodule(linear)
        device = cast(Tensor, base.weight).device
        a, b = low.a.to(device), low.b.to(device)
        magnitude = None if low.magnitude is None else low.magnitude.to(device)
        return Part(a, b, low.scaling, factor_of(base, a, b, low.scaling, magnitude))

    def _free(self, adapter: LoadedAdapter) -> None:
        if adapter.retired and adapter.users == 0:
            del self._held[adapter.number]
            self._stack(adapter.parts)

    def _stack(self, linears: Mapping[str, Part]) -> None:
        """Stacks the parts of these linears anew."""
        pruned = set(self.model.pruned_names())
        for linear in linears:
            module = self.model.get_submodule(linear)
            parts = {number: held.parts[linear] for number, held in self._held.items() if linear in held.parts}
            bias = cast(Tensor | None, module.bias)
            adapters = ServedAdapters(self.assignment, parts, bias, is_pruned=linear in pruned) if parts else None
            attach(module, adapters)


def _digest(low_ranks: "Adapter") -> bytes:
    """A digest of all numbers of an adapter and of the names of their layers."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for linear, low in sorted(low_ranks.items()):
        digest.update(f"{linear} {low.scaling!r} {list(low.a.shape)} {low.magnitude is not None}".encode())
        for tensor in (low.a, low.b, *(() if low.magnitude is None else (low.magnitude,))):
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()
