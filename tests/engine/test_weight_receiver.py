"""Tensors arrive over process groups and from shared memory, whole or not at all."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from fp8serve.engine import weight_receiver
from fp8serve.engine.weight_receiver import GroupAddress, TensorInfo, WeightReceiver
from fp8serve.errors import GroupError, RequestError
from tests.patience import PATIENCE

from .trainer import TrainerGroup, bytes_of, infos_of, shared

TENSORS = {
    "a": torch.arange(7, dtype=torch.float32),
    "b": torch.arange(6).reshape(2, 3).to(torch.float8_e4m3fn),
    "c": torch.tensor(3.5, dtype=torch.bfloat16),
    "d": torch.zeros(0, 4),
    "e": torch.arange(5).bfloat16(),
}


def address(group: TrainerGroup, rendezvous: Literal["torch", "vllm"] = "torch", **more: Any) -> GroupAddress:
    fields = {"name": "w", "host": "127.0.0.1", "port": group.port, "rank": 1, "world_size": 2, "backend": "gloo"}
    return GroupAddress(**fields | {"rendezvous": rendezvous} | more)


def joined(receiver: WeightReceiver, rendezvous: Literal["torch", "vllm"] = "torch") -> TrainerGroup:
    group = TrainerGroup("w", rendezvous)
    with ThreadPoolExecutor() as pool:
        future = pool.submit(receiver.join, address(group, rendezvous), PATIENCE)
        group.connect()
        future.result()
    return group


def assert_equal(received: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    assert received.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (received[name].dtype, received[name].shape) == (tensor.dtype, tensor.shape)
        assert bytes_of({name: received[name]}).equal(bytes_of({name: tensor})), name


@pytest.fixture
def receiver() -> WeightReceiver:
    return WeightReceiver(torch.device("cpu"))


@pytest.mark.parametrize("rendezvous", ["torch", "vllm"])
@pytest.mark.parametrize("packed_bytes", [None, 1, 40, 1 << 62])
def test_tensors_arrive_over_a_group(
    receiver: WeightReceiver, rendezvous: Literal["torch", "vllm"], packed_bytes: int | None
) -> None:
    group = joined(receiver, rendezvous)
    with ThreadPoolExecutor() as pool:
        future = pool.submit(receiver.receive, "w", infos_of(TENSORS), packed_bytes, PATIENCE)
        for part in packs(packed_bytes):
            if len(content := bytes_of(part)):
                group.broadcast(content)
        future.result()
    assert_equal(receiver.take(), TENSORS)
    assert receiver.take() == {}


def packs(packed_bytes: int | None) -> list[dict[str, Tensor]]:
    """Returns the tensors of each broadcast, as vLLM's trainer divides them."""
    if packed_bytes is None:
        return [{name: tensor} for name, tensor in TENSORS.items()]
    result: list[dict[str, Tensor]] = [{}]
    for name, tensor in TENSORS.items():
        if len(bytes_of(result[-1] or {"": torch.zeros(0)})) > packed_bytes:
            result.append({})
        result[-1][name] = tensor
    return result


def test_a_trainer_that_ends_in_the_middle_is_noticed(receiver: WeightReceiver) -> None:
    group = joined(receiver)
    with shared({"x": TENSORS["a"]}) as name:
        receiver.read_shared(name, infos_of({"x": TENSORS["a"]}))
    with ThreadPoolExecutor() as pool:
        future = pool.submit(receiver.receive, "w", infos_of(TENSORS), None, PATIENCE)
        group.broadcast(TENSORS["a"])
        group.end()
        with pytest.raises(GroupError, match="The transfer failed"):
            future.result()
    assert receiver.take() == {}  # what arrived before is dropped, too
    with pytest.raises(RequestError, match="The engine is in no group 'w'"):
        receiver.receive("w", infos_of(TENSORS), None, PATIENCE)
    group = joined(receiver)
    with ThreadPoolExecutor() as pool:
        future = pool.submit(receiver.receive, "w", infos_of({"a": TENSORS["a"]}), None, PATIENCE)
        group.broadcast(TENSORS["a"])
        future.result()
    assert_equal(receiver.take(), {"a": TENSORS["a"]})


def test_a_trainer_that_sends_nothing_misses_the_deadline(receiver: WeightReceiver) -> None:
    joined(receiver)
    with pytest.raises(GroupError, match="The transfer failed"):
        receiver.receive("w", infos_of(TENSORS), None, 0.05)


def test_a_group_that_does_not_form_misses_the_deadline(receiver: WeightReceiver) -> None:
    group = TrainerGroup("w", "torch")  # its port accepts connections and nobody answers
    with pytest.raises(GroupError, match=r"The process group was not complete after 0\.05 seconds|The transfer failed"):
        receiver.join(address(group), 0.05)
    group.end()


def test_groups_that_cannot_be_joined_are_refused(receiver: WeightReceiver) -> None:
    group = TrainerGroup("w", "torch")
    with pytest.raises(GroupError, match="which has no NCCL; use the backend gloo"):
        receiver.join(address(group, backend="nccl"), PATIENCE)
    for rank in (0, 2):
        with pytest.raises(GroupError, match=f"The engine would be rank {rank} of 2"):
            receiver.join(address(group, rank=rank), PATIENCE)
    group.end()


def test_one_transfer_runs_at_a_time(receiver: WeightReceiver) -> None:
    group = joined(receiver)
    started = threading.Event()
    with ThreadPoolExecutor() as pool:
        with receiver._transfer(None):
            started.set()
            with pytest.raises(RequestError, match="Other weights are being received"):
                receiver.take()
            with pytest.raises(RequestError, match="Other weights are being received"):
                receiver.leave("w")
        future = pool.submit(receiver.receive, "w", infos_of({"a": TENSORS["a"]}), None, PATIENCE)
        group.broadcast(TENSORS["a"])
        future.result()
    receiver.leave("w")
    assert receiver.take() == {}


class Members:
    """A group that says when it is left, and whose broadcasts fail."""

    def __init__(self) -> None:
        self.is_closed = threading.Event()

    def broadcast(self, content: Tensor, deadline: float) -> None:
        raise RuntimeError("Connection closed by peer.")

    def close(self) -> None:
        assert not self.is_closed.is_set()
        self.is_closed.set()


def test_a_group_that_ends_is_left(receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[Members] = []

    def connect(*_: Any) -> Any:
        groups.append(Members())
        return weight_receiver._Group(groups[-1], torch.device("cpu"), None)  # type: ignore[arg-type]

    monkeypatch.setattr(receiver, "_connect", connect)
    where = GroupAddress("w", "127.0.0.1", 1, 1, 2, "gloo", "vllm")
    receiver.join(where, PATIENCE)
    receiver.join(where, PATIENCE)
    assert [group.is_closed.is_set() for group in groups] == [True, False]
    receiver.leave("w")
    receiver.leave("w")
    receiver.join(where, PATIENCE)
    with pytest.raises(GroupError, match="The transfer failed: Connection closed by peer"):
        receiver.receive("w", infos_of(TENSORS), None, PATIENCE)
    assert [group.is_closed.is_set() for group in groups] == [True, True, True]


def test_a_group_that_is_complete_too_late_is_left(receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    members, may_connect = Members(), threading.Event()

    def connect(*_: Any) -> Any:
        may_connect.wait()
        return weight_receiver._Group(members, torch.device("cpu"), None)  # type: ignore[arg-type]

    monkeypatch.setattr(receiver, "_connect", connect)
    with pytest.raises(GroupError, match=r"The process group was not complete after 0\.01 seconds"):
        receiver.join(GroupAddress("w", "127.0.0.1", 1, 1, 2, "gloo", "vllm"), 0.01)
    may_connect.set()
    assert members.is_closed.wait(PATIENCE)


@pytest.mark.parametrize(
    ("event", "remaining"),
    [("none", "ab"), ("more arrive", "abc"), ("a name arrives again", "a"), ("discard", ""), ("leave", ""),
     ("a transfer fails", "")],
)  # fmt: skip
def test_tensors_are_put_back_if_their_update_goes_on(receiver: WeightReceiver, event: str, remaining: str) -> None:
    def arrive(names: str, number: float) -> None:
        tensors = {name: torch.tensor(number) for name in names}
        with shared(tensors) as memory:
            receiver.read_shared(memory, infos_of(tensors))

    arrive("ab", 0.0)
    tensors = receiver.take()
    if event == "more arrive":
        arrive("c", 0.0)
    if event == "a name arrives again":
        arrive("a", 1.0)
    if event == "discard":
        receiver.discard()
    if event == "leave":
        receiver.leave("w")
    if event == "a transfer fails":
        with pytest.raises(RequestError, match="cannot be opened"):
            receiver.read_shared("nothing", [])
    receiver.put_back(tensors)
    expected = 1.0 if event == "a name arrives again" else 0.0
    assert_equal(receiver.take(), {name: torch.tensor(expected) for name in remaining})


def test_tensors_are_copied_from_shared_memory(receiver: WeightReceiver) -> None:
    with shared(TENSORS) as name:
        receiver.read_shared(f"/{name}", infos_of(TENSORS))
        assert (Path("/dev/shm") / name).exists()  # the trainer owns it
    assert_equal(receiver.take(), TENSORS)


def test_shared_memory_that_cannot_be_read_is_refused(
    receiver: WeightReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_receiver, "SHARED_MEMORY", tmp_path)
    infos = [TensorInfo("a", "float32", [4])]
    (tmp_path / "short").write_bytes(bytes(15))
    (tmp_path / "link").symlink_to(tmp_path / "short")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, message in {
        "short": "has 15 bytes, and the tensors have 16",
        "link": "cannot be opened",
        "pipe": "has 0 bytes",
        "folder": r"cannot be opened|has \d+ bytes",
        "nothing": "cannot be opened: No such file or directory",
        "../short": "The name of a shared memory",
        ".": "The name of a shared memory",
        "a/b": "The name of a shared memory",
    }.items():
        with pytest.raises(RequestError, match=message):
            receiver.read_shared(name, infos)


@pytest.mark.parametrize(
    ("infos", "message"),
    [
        ([TensorInfo("a", "complex64", [1])], "a has the type 'complex64'; the types are"),
        ([TensorInfo("a", "__class__", [1])], "has the type"),
        ([TensorInfo("a", "int8", [1]), TensorInfo("a", "int8", [1])], "a occurs twice"),
    ],
)
def test_descriptions_that_mean_nothing_are_refused(
    receiver: WeightReceiver, infos: list[TensorInfo], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        receiver.read_shared("x", infos)


def test_tensors_for_which_there_is_no_memory_are_refused(receiver: WeightReceiver) -> None:
    with pytest.raises(GroupError, match="The transfer failed"):
        receiver.read_shared("x", [TensorInfo("a", "float32", [1 << 38, 1 << 6])])
