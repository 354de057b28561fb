"""Starts and connects the ranks of an engine (rank_group.py): child processes of this one, or those of torchrun.

Child processes use a store on a free port of 127.0.0.1, and gloo on the loopback interface. Each rank on a CPU has its
share of the cores and of the free memory, and each rank on GPUs has the GPU of its number on its machine.
"""

import hashlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from fp8serve import __version__, logs
from fp8serve.engine.defaults import with_device
from fp8serve.engine.options import LOST_SECONDS, EngineOptions
from fp8serve.engine.rank_group import OnLoss, RankGroup, end_children
from fp8serve.errors import Fp8ServeError, GroupError, RequestError, one_line
from fp8serve.fp8.ops import cpu_kernels
from fp8serve.model.config.decoder import read_config
from fp8serve.model.config.sharding import shard_config
from fp8serve.model.storage.memory import share_memory
from fp8serve.model.storage.opening import open_file
from fp8serve.model.storage.versions import weight_version
from fp8serve.processes import describe_exit, module_command, without_interrupts
from fp8serve.ranks import Ranks, is_rank, join_group, join_torchrun

T = TypeVar("T")
READY_KEY = "ready"  # of the store: the number of child processes that are ready to connect
POLL_SECONDS = 0.02


def start(
    model_dir: Path, options: EngineOptions, on_loss: OnLoss | None = None, lost_seconds: float = LOST_SECONDS
) -> tuple[RankGroup, EngineOptions]:
    """Connects this process with the other ranks of an engine, which it starts unless torchrun has started them.

    Returns the group and the options of this rank. Raises RequestError or ModelError, before a process is started, if
    the model cannot be divided or an option does not suit, and GroupError if the ranks cannot connect.
    """
    shard_config(read_config(model_dir), options.tensor_parallel)
    options = with_device(options, model_dir)
    _check_options(options)
    if dist.is_initialized():
        raise GroupError(
            "This process is a rank of torch.distributed already; create an engine with tensor_parallel in a process "
            "of its own, and close it before the next one."
        )
    if is_rank():
        return _join_started(model_dir, options, on_loss, lost_seconds)
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    children: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(1, options.tensor_parallel):
            children.append(_start_follower(model_dir, options, rank, lost_seconds, f"{host}:{port}"))
        _wait_for_all(store, children)
        return _connect(model_dir, options, 0, store, _connect_store(host, port), children, on_loss, lost_seconds)
    except BaseException:
        end_children(children)
        raise


def join_started_by_engine(
    model_dir: Path, options: EngineOptions, rank: int, address: str, lost_seconds: float
) -> tuple[RankGroup, EngineOptions]:
    """Connects this child process with the engine whose store has the address HOST:PORT, as `start` does."""
    host, _, port = address.partition(":")
    store = _connect_store(host, int(port))
    store.add(READY_KEY, 1)
    return _connect(model_dir, options, rank, store, _connect_store(host, int(port)), (), None, lost_seconds)


def _connect(
    model_dir: Path,
    options: EngineOptions,
    rank: int,
    store: Any,
    watch_store: Any,
    children: Sequence[subprocess.Popen[bytes]],
    on_loss: OnLoss | None,
    lost_seconds: float,
) -> tuple[RankGroup, EngineOptions]:
    on_gpu = options.device.startswith("cuda")
    try:
        if on_gpu:
            torch.cuda.set_device(rank)
        with _loopback():
            ranks = _run_beside(
                children, lambda: join_group(PrefixStore("group", store), rank, options.tensor_parallel, on_gpu=on_gpu)
            )
    except RuntimeError as error:
        raise GroupError(f"The ranks of the engine could not connect; torch says: {one_line(error)}.") from None
    group = RankGroup(ranks, watch_store, children, on_loss, lost_seconds)
    return _create_group(model_dir, options, ranks, rank, ranks.size, group)


def _join_started(
    model_dir: Path, options: EngineOptions, on_loss: OnLoss | None, lost_seconds: float
) -> tuple[RankGroup, EngineOptions]:
    """Connects with the ranks that torchrun has started."""
    if (size := int(os.environ["WORLD_SIZE"])) != options.tensor_parallel:
        raise GroupError(
            f"tensor_parallel is {options.tensor_parallel}, and torchrun has started {size} processes; make them equal."
        )
    store = _connect_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    attempt = PrefixStore(f"engine {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    if os.environ["RANK"] == "0" and attempt.add("engines", 1) > 1:
        raise GroupError(
            "The ranks of torchrun have run their engine already. On one machine, torchrun --max-restarts starts them "
            "again; on several, start the command again."
        )
    ranks = join_torchrun(options.device)
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    group = RankGroup(ranks, attempt, (), on_loss, lost_seconds)
    return _create_group(model_dir, options, ranks, local_rank, local_size, group)


def _create_group(
    model_dir: Path, options: EngineOptions, ranks: Ranks, local_rank: int, local_size: int, group: RankGroup
) -> tuple[RankGroup, EngineOptions]:
    """Returns the group, and the options with the GPU or the cores of this rank. Raises GroupError if the ranks
    differ."""
    try:
        with group.errors():
            check_identities(ranks.gather(_identity(model_dir, options)))
    except BaseException:
        group.close()
        raise
    share_memory(local_size)
    if options.device == "cuda":
        return group, replace(options, device=f"cuda:{local_rank}", cuda_graphs=False)
    cores = len(os.sched_getaffinity(0))
    return group, replace(options, threads=options.threads or max(1, cores // local_size))


def _identity(model_dir: Path, options: EngineOptions) -> dict[str, object]:
    """Returns what must be equal on all ranks. Paths may differ."""
    names = ["recipe", "head_dtype", "kv_cache_dtype", "invariant", "max_lora_rank"]
    names += ["max_num_seqs", "max_model_len", "max_batch_tokens", "block_size"]
    files = {"the model files": weight_version(model_dir), "the file of scales": _digest(options.scales)}
    versions = {"fp8serve's version": __version__, "torch's version": torch.__version__}
    classes = {op: kernel["numerics"] for op, kernel in cpu_kernels().items()} if options.device == "cpu" else {}
    if not options.invariant:  # each rank has its own heads, so that roundings of attention may differ
        classes.pop("paged_attention", None)
    versions |= {"the numerics classes of its processor's kernels": str(classes)}
    return versions | {f"the option {name}": getattr(options, name) for name in names} | files


def _digest(path: str | None) -> str | None:
    """Returns a digest of a file, or None if it cannot be read, which `load` reports."""
    if path is None:
        return None
    try:
        with open_file(Path(path)) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, Fp8ServeError):
        return None


def check_identities(identities: Sequence[dict[str, object]]) -> None:
    """Raises GroupError if the results of `_identity` on the ranks differ."""
    for rank, identity in enumerate(identities):
        if different := [name for name, value in identities[0].items() if identity.get(name) != value]:
            raise GroupError(
                f"The ranks of an engine must be equal, and rank {rank} differs from rank 0 in {different[0]}; start "
                "all with the same command and installation."
            )


def _check_options(options: EngineOptions) -> None:
    """Raises RequestError for an option that the ranks do not support."""
    if options.device.startswith("cuda:"):
        raise RequestError(f"With tensor_parallel each rank has its own GPU; use device cuda, not {options.device}.")
    if options.device == "cuda" and options.head_dtype != "bf16":
        raise RequestError("tensor_parallel on GPUs computes the head in BF16; leave head_dtype out.")
    local_size = int(os.environ["LOCAL_WORLD_SIZE"]) if is_rank() else options.tensor_parallel
    if options.device == "cuda" and local_size > (num_gpus := torch.cuda.device_count()):
        raise RequestError(
            f"tensor_parallel needs a GPU for each rank; {local_size} ranks would run on this machine, whose number of "
            f"GPUs is {num_gpus}."
        )


def _start_follower(
    model_dir: Path, options: EngineOptions, rank: int, lost_seconds: float, address: str
) -> subprocess.Popen[bytes]:
    log_format = "json" if logs.writes_json() else "plain"
    arguments = ["--model", str(model_dir), "--options", options.to_json(), "--log-format", log_format]
    arguments += "--rank", str(rank), "--lost-seconds", str(lost_seconds), "--store", address
    command = module_command("fp8serve.engine.follower", *arguments)
    with without_interrupts():
        return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def _wait_for_all(store: Any, children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Returns when all child processes are ready to connect. Raises GroupError if one has ended."""
    while store.add(READY_KEY, 0) < len(children):
        _check_alive(children)
        time.sleep(POLL_SECONDS)


def _run_beside(children: Sequence[subprocess.Popen[bytes]], function: Callable[[], T]) -> T:
    """Returns the result of `function`. It runs in a thread, because torch would wait for days for a child process that
    has ended. Raises GroupError if one has."""
    result: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while not futures.wait([result], POLL_SECONDS).done:
        _check_alive(children)
    return result.result()


def _check_alive(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank, child in enumerate(children, 1):
        if child.poll() is not None:
            raise GroupError(f"Rank {rank} of the engine did not start: {describe_exit(child.returncode)}.")


def _connect_store(host: str, port: int) -> Any:
    """Returns a new connection to a store. Each thread needs its own, because a connection blocks while it waits."""
    try:
        return TCPStore(host, port, is_master=False)
    except RuntimeError as error:
        raise GroupError(f"The store of the ranks at {host}:{port} cannot be reached: {one_line(error)}.") from None


@contextmanager
def _loopback() -> Iterator[None]:
    """Makes gloo use the loopback interface, unless the environment names another one."""
    is_set = "GLOO_SOCKET_IFNAME" in os.environ
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        yield
    finally:
        if not is_set:
            del os.environ["GLOO_SOCKET_IFNAME"]
