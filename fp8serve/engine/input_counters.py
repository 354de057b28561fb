"""The counters of all FP8 layers that monitor their input, as views of two tensors.

A FrozenLinear records the amax of its input and counts saturated elements (fp8/frozen.py). Reading and resetting the
counters of each layer on its own would launch four kernels a layer and wait for the device. Here the counters of all
layers are views of one tensor of amaxes and one of saturated elements. So `copy_and_reset` queues two copies to pinned
memory and two `zero_`, and records an event. It does not wait: the caller reads the copies when the event has
completed. On a CPU they can be read at once.

With `tensor_parallel`, the counters of a layer with some columns are those of these columns; `move_to_first` adds them
up.

Layers that read the same input share their counters. The counters of stacked experts (fp8/stacked.py) are adjacent,
because one op updates those of all experts.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.stacked import StackedExperts


class Counters(NamedTuple):
    """The amax and the number of saturated elements of every layer's input, by the name of the layer."""

    amaxes: dict[str, float]
    saturated: dict[str, int]


class InputCounters:
    """The counters of those `layers` that have a stored input scale. `stacks` are the stacked experts of the model.

    Create it before CUDA graphs are captured, because it replaces the layers' counters by views.
    """

    @torch.inference_mode(False)  # an inference tensor cannot be written to outside of inference mode
    @torch.no_grad()
    def __init__(self, layers: Mapping[str, FrozenLinear], stacks: Iterable[StackedExperts] = ()) -> None:
        static = {name: layer for name, layer in layers.items() if layer.input_scale is not None}
        stacks = [stack for stack in stacks if stack.has_input_scale]
        stacked = {id(layer) for stack in stacks for layer in stack.layers()}
        groups: dict[int, list[FrozenLinear]] = {}
        for layer in static.values():
            if id(layer) not in stacked:
                groups.setdefault(id(layer.amax), []).append(layer)
        count = len(groups) + sum(stack.num_experts for stack in stacks)
        device = next((layer.amax.device for layer in static.values()), torch.device("cpu"))
        self._amax = torch.zeros(count, device=device)
        self._saturated = torch.zeros(count, dtype=torch.int64, device=device)
        self._share(groups.values(), stacks)
        first, size = self._amax.data_ptr(), self._amax.element_size()
        self._index = {name: (layer.amax.data_ptr() - first) // size for name, layer in static.items()}
        shards = [self._index[name] for name, layer in static.items() if layer.input_shard is not None]
        self.has_shards, self._is_shard = bool(shards), torch.zeros(count, dtype=torch.bool, device=device)
        self._is_shard[torch.tensor(shards, dtype=torch.long)] = True
        pinned = device.type == "cuda"
        self._amax_copy = torch.zeros(count, pin_memory=pinned)
        self._saturated_copy = torch.zeros(count, dtype=torch.int64, pin_memory=pinned)
        self._event: torch.cuda.Event | None = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def _share(self, groups: Iterable[list[FrozenLinear]], stacks: Iterable[StackedExperts]) -> None:
        """Replaces the counters of groups of layers, and of stacks, by views."""
        start = 0
        for stack in stacks:
            end = start + stack.num_experts
            stack.move_counters(self._amax[start:end], self._saturated[start:end])
            start = end
        for index, group in enumerate(groups, start):
            amax, saturated = self._amax[index], self._saturated[index]
            for layer in group:
                layer.amax, layer.saturated = amax, saturated

    @torch.no_grad()
    def move_to_first(self, *, is_first: bool) -> None:
        """Adds the counters of all ranks of a group to those of rank 0, and resets the others. All ranks must call it.
        If ranks have the whole input of a layer (fp8/sharded.py), rank 0 has counted it already."""
        if not is_first:
            self._saturated.masked_fill_(~self._is_shard, 0)
        dist.reduce(self._amax, 0, dist.ReduceOp.MAX)
        dist.reduce(self._saturated, 0)
        if not is_first:
            self._amax.zero_()
            self._saturated.zero_()

    @torch.no_grad()
    def copy_and_reset(self) -> None:
        """Starts copying the counters to the host, and resets them. Does not wait for the device."""
        self._amax_copy.copy_(self._amax, non_blocking=True)
        self._saturated_copy.copy_(self._saturated, non_blocking=True)
        self._amax.zero_()
        self._saturated.zero_()
        if self._event is not None:
            self._event.record()

    def are_copied(self) -> bool:
        """Returns whether the copies that the last `copy_and_reset` queued are complete."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def copied_counters(self) -> Counters:
        """Waits for the copies of the last `copy_and_reset`, and returns them."""
        if self._event is not None:
            self._event.synchronize()
        return self._by_name(self._amax_copy, self._saturated_copy)

    def current(self) -> Counters:
        """Returns the counters since the last `copy_and_reset`. Waits for the device."""
        return self._by_name(self._amax, self._saturated)

    def _by_name(self, amax: Tensor, saturated: Tensor) -> Counters:
        amaxes, numbers = amax.tolist(), saturated.tolist()
        return Counters(
            {name: amaxes[index] for name, index in self._index.items()},
            {name: numbers[index] for name, index in self._index.items()},
        )
