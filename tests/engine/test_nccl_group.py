"""A group of NCCL as vLLM's trainers form it. Two processes need two GPUs, so a group of one process stands for it."""

import ctypes
import os
import pickle
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp8serve.engine.nccl_group import ID_BYTES, ID_KEY, NcclGroup, read_id
from fp8serve.errors import GroupError

IDENTITY = bytes(range(ID_BYTES))


class ncclUniqueId(ctypes.Structure):  # noqa: N801 - vLLM's name
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


def test_the_id_is_read_from_the_pickle_of_vllm() -> None:
    for protocol in range(3, pickle.HIGHEST_PROTOCOL + 1):
        assert read_id(pickle.dumps(ncclUniqueId.from_buffer_copy(IDENTITY), protocol)) == IDENTITY


class Hostile:
    def __reduce__(self) -> Any:
        return os._exit, (3,)


def of_a_trillion_values() -> bytes:
    """Returns a pickle of 8 kB."""
    value: Any = 1
    for _ in range(4):
        value = (value,) * 1000
    return pickle.dumps(value)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"nonsense", pickle.dumps(Hostile()), pickle.dumps(IDENTITY[1:]), pickle.dumps((IDENTITY, IDENTITY)),
        pytest.param(of_a_trillion_values(), id="a trillion values"),
    ],
)  # fmt: skip
def test_other_data_are_refused_and_not_run(data: bytes) -> None:
    with pytest.raises(GroupError, match="The trainer's store holds no id of an NCCL group"):
        read_id(data)


def test_a_group_is_left_once() -> None:
    left: list[int] = []
    group = NcclGroup.__new__(NcclGroup)
    group._nccl = SimpleNamespace(ncclCommAbort=lambda comm: left.append(comm.value))  # type: ignore[assignment]
    group._comm = ctypes.c_void_p(7)
    group.close()
    group.close()
    assert left == [7]


@pytest.mark.gpu
def test_a_group_of_one_process_broadcasts_on_a_gpu() -> None:
    device, identity = torch.device("cuda", torch.cuda.current_device()), ncclUniqueId()
    torch.zeros(1, device=device)
    assert ctypes.CDLL("libnccl.so.2").ncclGetUniqueId(ctypes.byref(identity)) == 0
    store = dist.HashStore()
    store.set(ID_KEY, pickle.dumps(identity))
    group = NcclGroup(store, 0, 1, device, 600)
    content = torch.arange(100, dtype=torch.uint8, device=device)
    group.broadcast(content, time.monotonic() + 600)
    assert content.tolist() == list(range(100))
    group.close()
    group.close()  # changes nothing
