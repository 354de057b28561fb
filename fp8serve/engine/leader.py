"""The parts of rank 0's engine with `tensor_parallel` that the other ranks follow: the runner, which sends each step to
them before it runs its own part, the adapters, the counters of inputs, and the packer of weights.

The other ranks call the same functions of the plain classes in the same order (follower.py). If an error ends a step
here, they wait for a collective that never comes, so the error becomes a MachineError, which ends the engine.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8serve.engine.adapters import Adapters, LoadedAdapter, digest
from fp8serve.engine.input_counters import Counters, InputCounters
from fp8serve.engine.output import TokenLogprob
from fp8serve.engine.packing import Packer
from fp8serve.engine.rank_group import Op, RankGroup
from fp8serve.engine.runner import Runner
from fp8serve.engine.scheduler import StepWork, Work
from fp8serve.engine.sequence import Sequence
from fp8serve.engine.step import flatten, pack, unpack
from fp8serve.errors import ModelError
from fp8serve.model.building import Model
from fp8serve.ranks import Ranks

CPU = torch.device("cpu")


class LeadingRunner(Runner):
    """A Runner that the other ranks of `group` follow."""

    def __init__(self, group: RankGroup, model: Model, *args: Any) -> None:
        super().__init__(model, *args)
        self._group = group
        self.adapters = LeadingAdapters(group, model, self.adapters.max_rank)

    @torch.inference_mode()
    def run(self, work: StepWork) -> Tensor:
        with self._group.errors():
            return self.model.logits(self._send_and_run(list(work), Op.STEP_AND_LOGITS))

    def run_scoring(self, work: StepWork) -> tuple[Tensor, list[tuple[Sequence, list[TokenLogprob]]]]:
        with self._group.errors():
            return super().run_scoring(work)

    def _hidden_states(self, work: list[Work]) -> Tensor:
        return self._send_and_run(work, Op.STEP)

    def _logits(self, hidden: Tensor) -> Tensor:
        hidden = hidden.contiguous()
        self._group.send(Op.LOGITS, torch.tensor([len(hidden)]))
        dist.broadcast(hidden, 0)
        return super()._logits(hidden)

    def _send_and_run(self, work: list[Work], op: Op) -> Tensor:
        step = flatten(work, self.block_size, CPU)
        values = pack(step)
        self._group.send(op, values)
        return self.run_step(step if self.device == CPU else unpack(values, self.device))


class LeadingAdapters(Adapters):
    """Adapters that are read and freed on all ranks. The other ranks know an adapter by its number."""

    def __init__(self, group: RankGroup, model: Model, max_rank: int) -> None:
        super().__init__(model, max_rank)
        self._group = group

    def read(self, name: str, directory: Path) -> LoadedAdapter:
        path = torch.frombuffer(bytearray(str(directory.absolute()).encode()), dtype=torch.uint8)
        with self._group.errors():
            self._group.send(Op.READ_ADAPTER, path.to(torch.long))
            return read_together(self._group.ranks, self, name, directory)

    def free(self, adapter: LoadedAdapter) -> None:
        with self._group.errors():
            self._group.send(Op.FREE_ADAPTER, torch.tensor([adapter.number]))
            super().free(adapter)


def read_together(ranks: Ranks, adapters: Adapters, name: str, directory: Path) -> LoadedAdapter:
    """Reads an adapter on every rank. If one rank raises an Fp8ServeError, every rank raises it and has no adapter.
    The same holds if the ranks read different adapters, which would use different collectives."""
    with ranks.shared_errors():
        low_ranks = adapters.read_weights(directory)
    if len(set(ranks.gather(digest(low_ranks)))) > 1:
        raise ModelError(
            f"{directory} does not hold the same adapter for all ranks: it was replaced while they read it, or their "
            "machines have different copies; load it again from equal files."
        )
    return adapters.add(name, low_ranks)  # may use collectives


class LeadingCounters(InputCounters):
    """Counters to which those of the other ranks are added when they are read."""

    def __init__(self, group: RankGroup, *args: Any) -> None:
        super().__init__(*args)
        self._group = group

    def copy_and_reset(self) -> None:
        self._collect()
        super().copy_and_reset()

    def current(self) -> Counters:
        self._collect()
        return super().current()

    def _collect(self) -> None:
        if self.has_shards:
            with self._group.errors():
                self._group.send(Op.COLLECT_COUNTERS)
                self.move_to_first(is_first=True)


class LeadingPacker(Packer):
    """A packer with which every rank packs a weight at the same time, so that no rank waits long for another one."""

    def __init__(self, group: RankGroup, *args: Any) -> None:
        super().__init__(*args)
        self._group = group

    def pack_next(self) -> None:
        with self._group.errors():
            self._group.send(Op.PACK)
        super().pack_next()
