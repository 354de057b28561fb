"""A process group as vLLM's trainers form it on GPUs: NCCL without torch.distributed.

Rank 0 writes NCCL's id of the group to the store, as a pickle, which is read without running it. All ranks then connect
and add up one number, with which vLLM warms the group up. The library is the one that torch has loaded.
"""

import ctypes
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fp8serve.errors import GroupError, ScalesError
from fp8serve.model.formats.restricted_pickle import Call, read_pickle

ID_KEY = "broadcast_from/0/0"
ID_BYTES = 128
MAX_VALUES = 64  # of the pickle that are looked at; that of vLLM has fewer
POLL_SECONDS = 0.001
_UINT8, _FLOAT32, _SUM = 1, 7, 0  # of nccl.h


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


class NcclGroup:
    """Receives broadcasts of rank 0 on a GPU. NCCL has no deadline for connecting, so the caller must have one."""

    def __init__(self, store: Any, rank: int, world_size: int, device: torch.device, seconds: float) -> None:
        self._nccl = ctypes.CDLL("libnccl.so.2")
        self._device, self._comm = device, ctypes.c_void_p()
        identity = _UniqueId.from_buffer_copy(read_id(store.get(ID_KEY)))
        try:
            with torch.cuda.device(device):
                self._check(self._nccl.ncclCommInitRank(ctypes.byref(self._comm), world_size, identity, rank))
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            number = torch.zeros(1, device=device)
            self._call("ncclAllReduce", number, _FLOAT32, _SUM)
            self._wait(time.monotonic() + seconds)
        except BaseException:
            self.close()
            raise

    def broadcast(self, content: Tensor, deadline: float) -> None:
        """Fills `content`, uint8 [N], with what rank 0 broadcasts. Raises GroupError after the deadline, on the
        monotonic clock; the group then cannot be used any more."""
        self._call("ncclBroadcast", content, _UINT8, 0)
        self._wait(deadline)

    def close(self) -> None:
        """Leaves the group and frees its memory. Does nothing the second time."""
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm.value is not None:
            self._nccl.ncclCommAbort(comm)

    def _call(self, name: str, tensor: Tensor, dtype: int, option: int) -> None:
        """Starts a collective on `tensor`, in place. `option` is the rank that sends, or the reduction."""
        data = ctypes.c_void_p(tensor.data_ptr())
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        count = ctypes.c_size_t(tensor.numel())
        with torch.cuda.device(self._device):
            self._check(getattr(self._nccl, name)(data, data, count, dtype, option, self._comm, stream))
        tensor.record_stream(self._stream)

    def _wait(self, deadline: float) -> None:
        status = ctypes.c_int()
        while not self._stream.query():
            self._check(self._nccl.ncclCommGetAsyncError(self._comm, ctypes.byref(status)))
            if status.value or time.monotonic() > deadline:
                self.close()
                raise GroupError("The weights did not arrive in time, and the group was left.")
            time.sleep(POLL_SECONDS)

    def _check(self, status: int) -> None:
        if status:
            self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
            raise GroupError(f"NCCL failed: {self._nccl.ncclGetErrorString(status).decode()}.")


def read_id(data: bytes) -> bytes:
    """Returns NCCL's id of a group from the pickle of vLLM's `ncclUniqueId`. Raises GroupError if it is another."""
    try:
        values = islice(_values(read_pickle(data), depth=4), MAX_VALUES)
        candidates = [value for value in values if isinstance(value, bytes)]
    except ScalesError:
        candidates = []
    if [len(value) for value in candidates] != [ID_BYTES]:
        raise GroupError("The trainer's store holds no id of an NCCL group; check the versions of trainer and server.")
    return candidates[0]


def _values(value: Any, depth: int) -> Iterator[Any]:
    """Yields the values in tuples and in arguments of calls, down to a depth."""
    parts = value.args if isinstance(value, Call) else value if isinstance(value, tuple) else ()
    yield value
    for part in parts if depth else ():
        yield from _values(part, depth - 1)
