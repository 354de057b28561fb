"""The LoRA and DoRA adapters that an engine has loaded, by name. Sequences of one batch may use different adapters.

A request may name an adapter, which is then applied to the rows of its sequence only (fp8/lora.py). A
sequence uses the same adapter from its start to its end. So an unloaded adapter stays in memory until its last sequence
has ended, although another adapter may already be loaded under its name. The prefix cache, also on disk, identifies an
adapter by a digest of its contents.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from fp8serve.errors import MachineError, ModelError, RequestError, shown
from fp8serve.fp8.batch_invariant import BatchInvariantLinear
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.lora import AdapterAssignment, AdapterWeights, ServedAdapters, dora_factor, weight_of
from fp8serve.model.building import Model
from fp8serve.model.storage.memory import free_memory

if TYPE_CHECKING:
    from fp8serve.engine.streaming import WeightStreamer
    from fp8serve.model.adapters import Adapter, LinearAdapter

DIGEST_BYTES = 16


@dataclass(eq=False)
class LoadedAdapter:
    """One adapter. `digest` is the hash of its contents, and `num_users` is the number of sequences that use it."""

    name: str
    number: int
    digest: bytes
    rank: int
    nbytes: int
    weights: dict[str, AdapterWeights]  # by the name of the linear layer
    num_users: int = 0
    is_unloaded: bool = False

    def view(self) -> dict[str, Any]:
        """Returns a description of the adapter as a JSON object."""
        method = "dora" if any(layer.factor is not None for layer in self.weights.values()) else "lora"
        description = {"name": self.name, "method": method, "rank": self.rank, "layers": len(self.weights)}
        return description | {"bytes": self.nbytes, "digest": self.digest.hex()}


@dataclass
class Adapters:
    """Loads and unloads adapters of one model. The model's linear layers must not be replaced afterwards."""

    model: Model
    max_rank: int
    assignment: AdapterAssignment = field(default_factory=AdapterAssignment)
    by_name: dict[str, LoadedAdapter] = field(default_factory=dict)
    streamer: "WeightStreamer | None" = None  # of weights that may not be in memory

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self._by_number: dict[int, LoadedAdapter] = {}  # includes unloaded adapters that sequences still use

    @property
    def has_adapters(self) -> bool:
        """Whether an adapter is in memory, which a sequence may then use."""
        return bool(self._by_number)

    def load(self, name: str, directory: Path) -> LoadedAdapter:
        """Loads an adapter from a PEFT directory. Raises ModelError if the adapter does not fit the model, RequestError
        if the name is in use, and MachineError if memory is short. After an error nothing has changed."""
        if name in self.by_name:
            raise RequestError(f"There is an adapter {shown(name)} already; unload it first, or choose another name.")
        self.by_name[name] = adapter = self.read(name, directory)
        return adapter

    def read(self, name: str, directory: Path) -> LoadedAdapter:
        """Reads an adapter from a PEFT directory and adds it. Raises the errors of `load`."""
        return self.add(name, self.read_weights(directory))

    def read_weights(self, directory: Path) -> "Adapter":
        """Reads the weights of an adapter and checks them. Raises the errors of `load`."""
        from fp8serve.model.adapters import read_adapter  # imported here because it needs safetensors

        low_ranks = read_adapter(directory, self.model.config)
        self._check(directory, low_ranks)
        return low_ranks

    def add(self, name: str, low_ranks: "Adapter") -> LoadedAdapter:
        """Gives an adapter the next number, and applies it to the rows that have this number."""
        number = next(self._numbers)
        weights = {linear: self._layer_weights(linear, low) for linear, low in low_ranks.items()}
        rank, size = max(low.a.shape[0] for low in low_ranks.values()), sum(low.nbytes for low in low_ranks.values())
        adapter = LoadedAdapter(name, number, digest(low_ranks), rank, size, weights)
        self._by_number[number] = adapter
        self._rebuild_stacks(weights)
        return adapter

    def unload(self, name: str) -> None:
        """Unloads an adapter: new sequences cannot use it. Raises RequestError if no adapter has this name."""
        adapter = self.find(name)
        del self.by_name[name]
        adapter.is_unloaded = True
        self._free_if_unused(adapter)

    def find(self, name: str) -> LoadedAdapter:
        """Returns the adapter of this name. Raises RequestError if there is none."""
        if (adapter := self.by_name.get(name)) is None:
            raise RequestError(f"There is no adapter {shown(name)} here; load it first.")
        return adapter

    def acquire(self, name: str | None) -> LoadedAdapter | None:
        """Returns the adapter for a new sequence and counts the sequence as its user, or returns None if `name` is
        None. Raises RequestError if no adapter has this name."""
        if name is None:
            return None
        adapter = self.find(name)
        adapter.num_users += 1
        return adapter

    def release(self, adapter: LoadedAdapter | None) -> None:
        """Records that a sequence with this adapter has ended."""
        if adapter is not None:
            adapter.num_users -= 1
            self._free_if_unused(adapter)

    def _check(self, directory: Path, low_ranks: "Adapter") -> None:
        """Raises ModelError if an adapter does not fit the model, and MachineError if memory is short."""
        for linear, low in low_ranks.items():
            if (rank := low.a.shape[0]) > self.max_rank:
                raise ModelError(
                    f"{directory}: the rank of {linear} is {rank}, above the limit of {self.max_rank}; raise "
                    "max_lora_rank."
                )
            if not isinstance(self.model.get_submodule(linear), FrozenLinear | BatchInvariantLinear):
                raise ModelError(f"{directory}: this engine applies no adapter to {linear}; train without that layer.")
        # twice, because the new stack is built while the old one is still in memory
        size = 2 * sum(low.nbytes for low in low_ranks.values())
        if self.model.embedding.weight.device.type == "cpu" and size > (free := free_memory()):
            raise MachineError(f"{directory} needs {size:,} bytes and {free:,} are free; unload another adapter first.")

    def _layer_weights(self, linear: str, low: "LinearAdapter") -> AdapterWeights:
        base = self.model.get_submodule(linear)
        device = cast(Tensor, base.weight).device
        rows = getattr(base, "row_ranges", [slice(None)])  # those of the weight that the layer has (fp8/sharded.py)
        shard = cast(FrozenLinear | BatchInvariantLinear, base).input_shard
        columns = slice(None) if shard is None else shard.rows(low.a.shape[1])
        a, b = low.a[:, columns].contiguous().to(device), torch.cat([low.b[part] for part in rows]).to(device)
        magnitude = None if low.magnitude is None else torch.cat([low.magnitude[part] for part in rows]).to(device)
        if magnitude is not None and self.streamer is not None:  # norms of the rows of the weight follow
            self.streamer.prepare(weight_of(base))
        return AdapterWeights(a, b, low.scaling, dora_factor(base, a, b, low.scaling, magnitude))

    def free(self, adapter: LoadedAdapter) -> None:
        """Frees the memory of an adapter that no sequence uses."""
        del self._by_number[adapter.number]
        self._rebuild_stacks(adapter.weights)

    def free_number(self, number: int) -> None:
        """Frees the memory of the adapter with this number."""
        self.free(self._by_number[number])

    def _free_if_unused(self, adapter: LoadedAdapter) -> None:
        if adapter.is_unloaded and adapter.num_users == 0:
            self.free(adapter)

    def _rebuild_stacks(self, linears: Iterable[str]) -> None:
        """Rebuilds the stacked adapters of these linear layers from all adapters in memory."""
        pruned = set(self.model.pruned_names())
        for linear in linears:
            module = self.model.get_submodule(linear)
            parts = {number: a.weights[linear] for number, a in self._by_number.items() if linear in a.weights}
            bias = cast(Tensor | None, module.bias)
            adapters = ServedAdapters(self.assignment, parts, bias, is_pruned=linear in pruned) if parts else None
            cast(BatchInvariantLinear | FrozenLinear, module).adapters = adapters


def digest(low_ranks: "Adapter") -> bytes:
    """Returns a digest of the contents of an adapter."""
    result = blake2b(digest_size=DIGEST_BYTES)
    for linear, low in sorted(low_ranks.items()):
        result.update(f"{linear} {low.scaling!r} {list(low.a.shape)} {low.magnitude is not None}".encode())
        for tensor in (low.a, low.b, *(() if low.magnitude is None else (low.magnitude,))):
            result.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return result.digest()
