"""A trainer's side of the transfer of weights: shared memory, and process groups in the ways of torch and of vLLM."""

import contextlib
import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from fp8serve.engine.engine import Engine
from fp8serve.engine.weight_receiver import TensorInfo
from tests.patience import PATIENCE

State = Mapping[str, Tensor]


def infos_of(tensors: State) -> list[TensorInfo]:
    return [TensorInfo(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()]


def bytes_of(tensors: State) -> Tensor:
    """Returns the bytes of all tensors, one after the other."""
    return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors.values()])


@contextlib.contextmanager
def shared(tensors: State) -> Iterator[str]:
    """Yields the name of a shared memory with the tensors."""
    content = bytes_of(tensors)
    memory = SharedMemory(create=True, size=len(content))
    try:
        memory.buf[: len(content)] = content.numpy().tobytes()
        yield memory.name
    finally:
        memory.close()
        memory.unlink()


def send(engine: Engine, tensors: State) -> None:
    """Sends tensors to an engine in this process."""
    with shared(tensors) as name:
        engine.receiver.read_shared(name, infos_of(tensors))


def update(engine: Engine, tensors: State) -> None:
    """Sends all weights and serves them."""
    send(engine, tensors)
    engine.stage_received_weights()
    engine.swap_weights()


def tensors_in(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


class TrainerGroup:
    """Rank 0 of a group of two with the backend gloo. `rendezvous` is that of the engine's GroupAddress."""

    def __init__(self, name: str, rendezvous: str, port: int = 0) -> None:
        self._name, self._rendezvous = name, rendezvous
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]

    def connect(self) -> None:
        """Returns when the engine has joined."""
        timeout = timedelta(seconds=PATIENCE)
        fd = self._listener.detach()
        self._store = dist.TCPStore("127.0.0.1", self.port, 2, True, timeout, master_listen_fd=fd, use_libuv=False)
        is_torch = self._rendezvous == "torch"
        store: dist.Store = self._store
        for prefix in (self._name, f"{self._name}/", "cpu/") if is_torch else (f"tcp://127.0.0.1:{self.port}",):
            store = dist.PrefixStore(prefix, store)
        self._group = dist.ProcessGroupGloo(store, 0, 2, timeout)

    def end(self) -> None:
        """Closes the connections, as the end of the trainer's process does."""
        self._listener.close()
        for name in ("_group", "_store"):
            self.__dict__.pop(name, None)

    def broadcast(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor.contiguous().reshape(-1).view(torch.uint8)], options).wait()
