"""Weights that can be served, and weights that are: a directory, its engine process, and facts about its tokenizer."""

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from fp8serve.engine.client import EngineClient
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.output import RequestOutput
from fp8serve.engine.request import EngineLimits, Request
from fp8serve.errors import ModelError
from fp8serve.logs import LogFormat
from fp8serve.model.config.decoder import check_any_config
from fp8serve.model.storage.opening import open_member
from fp8serve.model.text.tokenizer_facts import TokenizerFacts, describe
from fp8serve.server.answers.choice import AnswerFormat
from fp8serve.server.serving.admission import Admission

MOST_PER_TURN = 1.0


class HeartbeatMonitor:
    """Counts the silence of one engine; `turn` is called regularly."""

    def __init__(self) -> None:
        self.silence = 0.0

    def turn(self, age: float, since_last_turn: float) -> None:
        """`age`: seconds since the last sign of life."""
        self.silence = min(self.silence + min(since_last_turn, MOST_PER_TURN), age)


SAMPLE_BYTES = 1 << 16
log = logging.getLogger("fp8serve.server")
PLAIN = AnswerFormat("none", "none")
AUTO_FORMAT = AnswerFormat("auto", "auto")


class EngineHandle(Protocol):
    """The part of `fp8serve.engine.client.EngineClient` that the server uses."""

    limits: EngineLimits
    info: dict[str, Any]

    @property
    def alive(self) -> bool: ...
    @property
    def heartbeat_age(self) -> float: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def step_seconds(self) -> float: ...
    def check(self, request: Request) -> None: ...
    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]: ...
    async def abort(self, request_id: str) -> None: ...
    async def embed(self, inputs: Sequence[Sequence[int]], dimensions: int | None = None) -> list[bytes]: ...
    async def classify(
        self, inputs: Sequence[Sequence[int]], segments: Sequence[Sequence[int]]
    ) -> list[list[float]]: ...
    async def stats(self) -> dict[str, Any]: ...
    async def scales(self) -> list[dict[str, Any]]: ...
    async def save_scales(self, path: Path) -> int: ...
    async def load_weights(self, directory: Path) -> int: ...
    async def load_adapter(self, name: str, directory: Path) -> dict[str, Any]: ...
    async def unload_adapter(self, name: str) -> None: ...
    async def drain(self, deadline: float) -> None: ...
    async def close(self) -> None: ...
    async def kill(self, why: str) -> None: ...


@dataclass(frozen=True)
class Source:
    """Weights that can be served: `key` is "base" or a job id, `model_id` the name for exactly these. `readers`: how
    answers are read, as far as the operator said.
    """

    key: str
    model_id: str
    directory: Path
    options: EngineOptions
    readers: AnswerFormat = AUTO_FORMAT


@dataclass(eq=False)
class Served:
    """Weights that answer requests, which `admission` counts. `weight_version` identifies their bytes; `answers` says
    how their answers are read. `adapter`: the engine's name of the adapter beside them.
    """

    source: Source
    engine: EngineHandle
    tokenizer: TokenizerFacts
    admission: Admission
    weight_version: str
    answers: AnswerFormat = PLAIN
    heartbeat: HeartbeatMonitor = field(default_factory=HeartbeatMonitor)
    proven: bool = False  # it has answered since it began to serve
    prefilling: frozenset[str] = frozenset()  # ids of requests whose prompts it was computing at its last report
    leases: int = 0
    free: asyncio.Event = field(default_factory=asyncio.Event)
    adapter: str | None = None
    written: Path | None = None  # where the weights came from that were written over those of the source

    @contextlib.contextmanager
    def lease(self) -> Iterator["Served"]:
        """While the lease is held, a swap does not close the engine of these weights."""
        self.leases += 1
        self.free.clear()
        try:
            yield self
        finally:
            self.leases -= 1
            if self.leases == 0:
                self.free.set()


Launch = Callable[[Source], Awaitable[tuple[EngineHandle, TokenizerFacts]]]


async def launch(source: Source, log_format: LogFormat = "plain") -> tuple[EngineHandle, TokenizerFacts]:
    """Has the tokenizer read under limits, then starts an engine process. Raises Fp8ServeError when either is
    impossible."""
    await asyncio.to_thread(check_any_config, source.directory)  # the clearest error for a bad directory
    size = sum(file.stat().st_size for file in source.directory.glob("*.safetensors") if file.is_file())
    log.info("loading %s (%.1f GiB) on %s", source.model_id, size / 2**30, source.options.device)
    tokenizer = await asyncio.to_thread(describe, source.directory)
    return await EngineClient.start(source.directory, source.options, log_format), tokenizer


def weight_version(directory: Path) -> str:
    """12 hex digits from the config and from size, head, middle and tail of every weight file, which is cheap and
    distinguishes results.
    """
    digest = hashlib.sha256()
    for path in [directory / "config.json", *sorted(directory.glob("*.safetensors"))]:
        if path.is_file():
            with open_member(path, error=ModelError) as file:
                _sample(file, path.name, digest)
    return digest.hexdigest()[:12]


def _sample(file: BinaryIO, name: str, digest: "hashlib._Hash") -> None:
    size = os.fstat(file.fileno()).st_size
    digest.update(f"{name}:{size}".encode())
    for offset in sorted({0, max(0, size // 2), max(0, size - SAMPLE_BYTES)}):
        file.seek(offset)
        digest.update(file.read(SAMPLE_BYTES))
