"""Runs a function on several gloo processes, and counts its collectives.

The processes are forked from a server that has imported torch and has no threads; a fork of the test process itself,
which may have threads, could crash. Their store is a file. A rank that fails or hangs fails the test: collectives time
out after PATIENCE seconds, and the processes are killed 10 seconds later.
"""

import faulthandler
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fp8serve.fp8.distributed  # noqa: F401
from tests.patience import PATIENCE

IMPORTED = [  # once, by the server
    *("pytest", "torch.distributed.fsdp", "torch._dynamo", "torch._inductor", __name__),
    *("tests.train.test_processes", "fp8serve.train.methods.dpo.method", "fp8serve.train.sharded.building"),
]
multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED)


def _entry(rank: int, world: int, folder: str, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with Path(f"{folder}/{rank}.fault").open("w", encoding="utf-8") as stacks:
        faulthandler.enable(stacks)
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", store, timedelta(seconds=PATIENCE), world_size=world, rank=rank)
        torch.save(body(rank, *args), f"{folder}/{rank}")
        dist.barrier()  # a rank must not exit while another still communicates with it
        dist.destroy_process_group()
        faulthandler.disable()


def on_ranks(world: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs `body(rank, *args)` on `world` processes with a default process group; returns the results by rank."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, folder, body, args)
        context = mp.start_processes(_entry, arguments, nprocs=world, join=False, start_method="forkserver")
        assert context is not None
        deadline = time.monotonic() + PATIENCE + 10
        try:
            while not context.join(timeout=1):
                assert time.monotonic() < deadline, f"{body.__name__} hangs on {world} ranks"
        except mp.ProcessExitedException as error:
            stacks = [path.read_text(encoding="utf-8") for path in Path(folder).glob("*.fault")]
            raise AssertionError("\n".join([str(error), *stacks])) from None
        finally:
            for process in context.processes:
                process.kill()
        return [torch.load(Path(folder) / str(rank), weights_only=True) for rank in range(world)]


class Wire(TorchDispatchMode):
    """Counts the collectives of this rank, and the bytes of its inputs, for each kind of collective."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.__name__.split(".")[0].strip("_")
            tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
            self.calls[name] += 1
            self.bytes[name] += min(t.nbytes for t in tensors)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Wire]:
    with Wire() as wire:
        yield wire
