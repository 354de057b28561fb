"""Receives tensors from a trainer: by broadcasts in a process group, or from shared memory.

    group     rank 0 is the trainer, which opens the port of the store, to which the engine connects; gloo and NCCL
              also listen on ports of their own. `rendezvous` says how they form the group: as torch.distributed does
              (SGLang's trainers), or as vLLM does, which on GPUs uses NCCL directly (nccl_group.py)
    packed    vLLM's packed broadcasts: the bytes of consecutive tensors, until they exceed a size
    shared    a POSIX shared memory of the trainer with the bytes of all tensors, one after the other, without gaps

Tensors are kept here until all weights have arrived; the engine then takes them (`take`). A transfer runs in a thread
of its own, so the engine continues to generate. It has a deadline. If it fails, its group cannot be used any more and
all tensors that have arrived are dropped, so weights of two updates are never mixed.
"""

import math
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8serve.engine.nccl_group import NcclGroup
from fp8serve.errors import GroupError, MachineError, RequestError, one_line, os_reason
from fp8serve.model.storage.shards import DTYPES, type_name

c10d: Any = dist  # stores, backends and their options have no types
SHARED_MEMORY = Path("/dev/shm")
POLL_SECONDS = 0.001  # between two looks at a broadcast on a GPU
_SHARED_NAME = re.compile(r"/?[A-Za-z0-9_][A-Za-z0-9_.\-]{0,250}")
_DTYPES = {type_name(dtype): dtype for dtype in DTYPES.values()}


class TensorInfo(NamedTuple):
    """A tensor that is about to arrive."""

    name: str
    dtype: str
    shape: Sequence[int]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class GroupAddress:
    """Where a process group meets, and this engine's place in it."""

    name: str
    host: str
    port: int
    rank: int
    world_size: int
    backend: Literal["gloo", "nccl"]
    rendezvous: Literal["torch", "vllm"]
    packed_bytes: int | None = None  # of the broadcasts of all updates, unless an update names it

    def prefixes(self) -> tuple[str, ...]:
        """Returns the prefixes of the group's keys in the store, the outermost first."""
        if self.rendezvous == "vllm":
            return (f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}",)
        return self.name, f"{self.name}/", "cpu/" if self.backend == "gloo" else "cuda/"


class _TorchGroup:
    """A group of torch.distributed. It is not registered there, so it disturbs no other group."""

    def __init__(self, store: Any, address: GroupAddress, seconds: float) -> None:
        if address.backend == "gloo":
            timeout = timedelta(seconds=seconds)
            self._backend = c10d.ProcessGroupGloo(store, address.rank, address.world_size, timeout)
        else:  # its watchdog would end the process; `broadcast` has its own deadline
            self._backend = c10d.ProcessGroupNCCL(store, address.rank, address.world_size, timedelta(days=7))

    def broadcast(self, content: Tensor, deadline: float) -> None:
        """Fills `content`, uint8 [N], with what rank 0 broadcasts. Raises RuntimeError or GroupError after the
        deadline."""
        options = c10d.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        work = self._backend.broadcast([content], options)
        while content.is_cuda and not work.is_completed():
            if time.monotonic() > deadline:
                self.close()
                raise GroupError("The weights did not arrive in time, and the group was left.")
            time.sleep(POLL_SECONDS)
        work.wait(options.timeout)

    def close(self) -> None:
        """Leaves the group. Does nothing the second time. One of gloo ends with its last reference."""
        if self._backend.name() == "nccl":
            self._backend.abort()


@dataclass(frozen=True)
class _Group:
    members: _TorchGroup | NcclGroup
    device: torch.device  # on which tensors arrive
    packed_bytes: int | None


class WeightReceiver:
    """The groups of an engine and the tensors that have arrived for the next update. One transfer runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: dict[str, _Group] = {}
        self._tensors: dict[str, Tensor] = {}
        self._drops = self._drops_at_take = 0  # how often the tensors of an update were dropped
        self._lock = threading.Lock()  # held during a transfer
        self._state_lock = threading.RLock()  # of `_tensors`, because `put_back` does not wait for a transfer

    def join(self, address: GroupAddress, seconds: float) -> None:
        """Joins a group, instead of an earlier one of the same name. Raises GroupError if it cannot connect."""
        if address.backend == "nccl" and self._device.type != "cuda":
            raise GroupError(f"The engine runs on {self._device}, which has no NCCL; use the backend gloo.")
        if not 0 < address.rank < address.world_size:
            raise GroupError(
                f"The engine would be rank {address.rank} of {address.world_size}; the trainer is rank 0, so the "
                "engine's rank must be between them."
            )
        with self._transfer(address.name):
            self._drop()
            self._leave(address.name)
            self._groups[address.name] = _connect_within(seconds, lambda: self._connect(address, seconds))

    def leave(self, name: str) -> None:
        """Leaves a group and drops the tensors that have arrived. Does nothing if there is no such group."""
        with self._transfer(name):
            self._leave(name)
            self._drop()

    def receive(self, group: str, infos: Sequence[TensorInfo], packed_bytes: int | None, seconds: float) -> None:
        """Receives tensors that rank 0 of the group broadcasts. With `packed_bytes`, of this call or of the
        group, they are packed.

        Raises RequestError for a group that the engine has not joined, and GroupError if they do not arrive in time.
        """
        _check(infos)
        if group not in self._groups:
            raise RequestError(f"The engine is in no group {group!r}; join one first.")
        with self._transfer(group):
            deadline = time.monotonic() + seconds
            members, device = self._groups[group].members, self._groups[group].device
            packed_bytes = packed_bytes or self._groups[group].packed_bytes
            arrived: dict[str, Tensor] = {}
            for part in [[info] for info in infos] if packed_bytes is None else _packs(infos, packed_bytes):
                content = torch.empty(sum(info.nbytes for info in part), dtype=torch.uint8, device=device)
                if len(content):
                    members.broadcast(content, deadline)
                arrived |= _unpack(content, part)
            self._add(arrived)

    def read_shared(self, name: str, infos: Sequence[TensorInfo]) -> None:
        """Copies tensors from a shared memory. Raises RequestError if it does not exist or has another size."""
        _check(infos)
        with self._transfer(None):
            content = torch.empty(sum(info.nbytes for info in infos), dtype=torch.uint8)
            _read_shared_memory(name, content)
            self._add(_unpack(content, infos))

    def take(self) -> dict[str, Tensor]:
        """Returns the tensors that have arrived and forgets them. Raises RequestError during a transfer."""
        with self._transfer(None), self._state_lock:
            tensors, self._tensors = self._tensors, {}
            self._drops_at_take = self._drops
            return tensors

    def discard(self) -> None:
        """Drops the tensors that have arrived. Raises RequestError during a transfer."""
        with self._transfer(None):
            self._drop()

    def put_back(self, tensors: dict[str, Tensor]) -> None:
        """Keeps tensors that `take` returned, because others are still missing. Drops them if their update has ended
        since: because it failed, or because another one has begun."""
        with self._state_lock:
            if self._drops == self._drops_at_take and tensors.keys().isdisjoint(self._tensors):
                self._tensors = tensors | self._tensors

    def _add(self, tensors: dict[str, Tensor]) -> None:
        """Adds tensors that arrived. A name that has arrived before begins another update."""
        with self._state_lock:
            if not tensors.keys().isdisjoint(self._tensors):
                self._drop()
            self._tensors |= tensors

    def _drop(self) -> None:
        with self._state_lock:
            self._tensors = {}
            self._drops += 1

    @contextmanager
    def _transfer(self, group: str | None) -> Iterator[None]:
        """Runs a transfer alone. If it fails, the group and all tensors that have arrived are dropped."""
        if not self._lock.acquire(blocking=False):
            raise RequestError("Other weights are being received; send these when they have arrived.")
        try:
            yield
        except BaseException as error:
            self._drop()
            self._leave(group or "")
            if isinstance(error, RuntimeError | MemoryError):  # of torch, which has no class of its own for these
                raise GroupError(f"The transfer failed: {one_line(error)}.") from None
            raise
        finally:
            self._lock.release()

    def _leave(self, name: str) -> None:
        if (group := self._groups.pop(name, None)) is not None:
            group.members.close()

    def _connect(self, address: GroupAddress, seconds: float) -> _Group:
        timeout = timedelta(seconds=seconds)
        store: Any = c10d.TCPStore(address.host, address.port, address.world_size, False, timeout)
        if address.backend == "nccl" and address.rendezvous == "vllm":
            members = NcclGroup(store, address.rank, address.world_size, self._device, seconds)
            return _Group(members, self._device, address.packed_bytes)
        for prefix in address.prefixes():
            store = c10d.PrefixStore(prefix, store)
        device = self._device if address.backend == "nccl" else torch.device("cpu")
        return _Group(_TorchGroup(store, address, seconds), device, address.packed_bytes)


def _connect_within(seconds: float, connect: Callable[[], _Group]) -> _Group:
    """Returns the result of `connect`. Raises GroupError after `seconds` and leaves its thread behind: torch and NCCL
    wait without a deadline for a process that accepts the connection and says nothing."""
    future = Future[_Group]()

    def run() -> None:
        try:
            future.set_result(connect())
        except Exception as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not future.done():
        future.add_done_callback(_close_late)
        raise GroupError(f"The process group was not complete after {seconds:g} seconds.")
    return future.result()


def _close_late(future: Future[_Group]) -> None:
    if future.exception() is None:
        future.result().members.close()


def _check(infos: Iterable[TensorInfo]) -> None:
    names = set[str]()
    for info in infos:
        if info.dtype not in _DTYPES:
            raise RequestError(f"{info.name} has the type {info.dtype!r}; the types are {', '.join(_DTYPES)}.")
        if info.name in names:
            raise RequestError(f"{info.name} occurs twice.")
        names.add(info.name)


def _packs(infos: Iterable[TensorInfo], packed_bytes: int) -> Iterator[list[TensorInfo]]:
    """Yields the tensors of each packed broadcast: as many as it takes to exceed `packed_bytes`."""
    part, size = list[TensorInfo](), 0
    for info in infos:
        part.append(info)
        size += info.nbytes
        if size > packed_bytes:
            yield part
            part, size = [], 0
    if part:
        yield part


def _unpack(content: Tensor, infos: Iterable[TensorInfo]) -> dict[str, Tensor]:
    """Returns the tensors whose bytes are `content`, one after the other, as views where their addresses allow it."""
    tensors, start = {}, 0
    for info in infos:
        dtype, end = _DTYPES[info.dtype], start + info.nbytes
        raw = content[start:end]
        tensors[info.name] = (raw.clone() if start % dtype.itemsize else raw).view(dtype).view(list(info.shape))
        start = end
    return tensors


def _read_shared_memory(name: str, content: Tensor) -> None:
    """Fills `content` with the bytes of a shared memory."""
    if not _SHARED_NAME.fullmatch(name):
        raise RequestError("The name of a shared memory has letters, digits, dots, dashes and underscores.")
    try:
        descriptor = os.open(SHARED_MEMORY / name.removeprefix("/"), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise RequestError(f"The shared memory {name} cannot be opened: {os_reason(error)}.") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size < len(content):
            raise RequestError(
                f"The shared memory {name} has {status.st_size} bytes, and the tensors have {len(content)}."
            )
        view, start = content.numpy().data, 0
        while start < len(view):
            count = os.preadv(descriptor, [view[start:]], start)
            if not count:
                raise MachineError(f"The shared memory {name} became shorter while it was read.")
            start += count
    finally:
        os.close(descriptor)
