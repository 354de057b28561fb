"""Directories of weights and adapters that can be served, and those that a running engine has loaded.

A model's engine computes requests with and without adapters in one batch. A request for an adapter is a request to its
model that names the adapter. It waits in the model's queue and is counted under the adapter's name.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fp8serve.engine.client import EngineClient
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.task import task_of
from fp8serve.errors import Fp8ServeError, ModelError
from fp8serve.logs import LogFormat
from fp8serve.model.config.decoder import check_any_config, read_config
from fp8serve.model.config.sharding import shard_config
from fp8serve.model.storage.opening import open_member
from fp8serve.model.text.tokenizer_facts import TokenizerFacts, describe
from fp8serve.server.output_parsers.output_format import OutputFormat
from fp8serve.server.serving.admission import Admission

MAX_SECONDS_PER_UPDATE = 1.0
log = logging.getLogger("fp8serve.server")
PLAIN = OutputFormat("none", "none")
AUTO_FORMAT = OutputFormat("auto", "auto")


@dataclass(frozen=True)
class WeightSource:
    """A directory of weights that can be served.

    `key` is "base", a job id, or a job id with a checkpoint's step. `model_id` is the name for exactly these weights.
    `output_format` says how tool calls and reasoning are parsed, with "auto" where the operator chose nothing.
    """

    key: str
    model_id: str
    directory: Path
    options: EngineOptions
    output_format: OutputFormat = AUTO_FORMAT


@dataclass(eq=False, kw_only=True)
class Leased:
    """What an engine has loaded and keeps while a request has a lease on it, even if it is replaced or unloaded."""

    leases: int = 0
    unleased: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        self.leases += 1
        self.unleased.clear()
        try:
            yield
        finally:
            self.leases -= 1
            if self.leases == 0:
                self.unleased.set()


@dataclass(eq=False)
class ServedWeights(Leased):
    """Weights with a running engine process. `admission` counts their requests.

    `weight_version` identifies the bytes of the weights. `output_format` says how tool calls and reasoning are parsed.
    `adapter` is the name that the engine has for the adapter, if requests use one.
    """

    source: WeightSource
    engine: EngineClient
    tokenizer: TokenizerFacts
    admission: Admission
    weight_version: str
    output_format: OutputFormat = PLAIN
    silence: float = 0.0  # for how many seconds the engine process has sent no heartbeat
    has_reported: bool = False  # whether the engine has reported statistics since it began to serve
    prefilling_ids: frozenset[str] = frozenset()  # requests that were in prefill at the engine's last report
    adapter: str | None = None
    overwritten_from: Path | None = None  # the directory whose weights were copied over those of `source`

    @cached_property
    def directory(self) -> str:
        """The path of the directory without symbolic links, which may change while these weights serve."""
        return str(self.source.directory.resolve())

    @property
    def accepts_requests(self) -> bool:
        return self.engine.alive and not self.engine.is_draining

    def update_silence(self, seconds: float) -> None:
        """Updates `silence`, `seconds` after the last update. An update adds at most MAX_SECONDS_PER_UPDATE: if the
        server itself was suspended, the engine is not blamed for it."""
        self.silence = min(self.silence + min(seconds, MAX_SECONDS_PER_UPDATE), self.engine.heartbeat_age)


@dataclass(frozen=True)
class AdapterSource:
    """A directory with an adapter, as peft writes it.

    `key` is the id of the job that trained the adapter, or "". `root` is the adapter's original name, which may differ
    from `name`. If `required`, the model must not be served without the adapter.
    """

    name: str
    root: str
    directory: Path
    key: str = ""
    required: bool = False


@dataclass(eq=False)
class ServedAdapter(Leased):
    """An adapter that the engine has loaded, or will load when the model starts.

    `engine_name` is the adapter's name in the engine. It is new at every load, because `name` may be used again while
    responses with the previous adapter are still being generated. `facts` is the engine's report about the adapter.
    """

    source: AdapterSource
    engine_name: str
    admission: Admission
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.source.name

    def served_with(self, base: ServedWeights) -> "AdaptedWeights":
        """Returns the weights of the model with this adapter, for one request."""
        source = replace(base.source, key=self.source.key or base.source.key, model_id=self.name)
        version = f"{base.weight_version}+{self.facts.get('digest', '')[:12]}"
        parts = source, base.engine, base.tokenizer, self.admission, version, base.output_format
        return AdaptedWeights(*parts, adapter=self.engine_name, base=base, leased_adapter=self)

    def view(self) -> dict[str, Any]:
        """Returns the adapter as routes show it, without paths on the server's disk."""
        facts = {name: self.facts.get(name) for name in ("method", "rank", "layers", "bytes")}
        return {"name": self.name, "root": self.source.root, "in_flight": self.admission.in_flight, **facts}


@dataclass(eq=False, kw_only=True)
class AdaptedWeights(ServedWeights):
    """Served weights with an adapter, for one request. A lease keeps the engine open and the adapter loaded."""

    base: ServedWeights
    leased_adapter: ServedAdapter

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        with self.base.lease(), self.leased_adapter.lease():
            yield


Launch = Callable[[WeightSource], Awaitable[tuple[EngineClient, TokenizerFacts]]]


async def launch(source: WeightSource, log_format: LogFormat = "plain") -> tuple[EngineClient, TokenizerFacts]:
    """Starts an engine process, and meanwhile reads the tokenizer in a limited process. Raises Fp8ServeError if either
    fails."""
    await asyncio.to_thread(_check_config, source)
    size = sum(file.stat().st_size for file in source.directory.glob("*.safetensors") if file.is_file())
    log.info("loading %s (%.1f GiB) on %s", source.model_id, size / 2**30, source.options.device)
    engine = asyncio.create_task(EngineClient.start(source.directory, source.options, log_format))
    try:
        tokenizer = await asyncio.to_thread(describe, source.directory)
        return await engine, tokenizer
    except BaseException:
        engine.cancel()  # which kills the process
        with contextlib.suppress(asyncio.CancelledError, Fp8ServeError, OSError):
            await (await engine).kill("The tokenizer cannot be read.")
        raise


def _check_config(source: WeightSource) -> None:
    """Refuses a bad directory with the clearest error, and a model that cannot be divided before a process starts."""
    check_any_config(source.directory)
    ranks, task = source.options.tensor_parallel, task_of(source.directory, source.options.task)
    if ranks > 1 and task == "generate":  # the engine refuses ranks for other tasks
        shard_config(read_config(source.directory), ranks)


TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
              "chat_template.jinja", "chat_template.json")  # fmt: skip


def have_same_text_files(a: Path, b: Path) -> bool:
    """Whether two directories have the same tokenizer, chat template and generation config, byte for byte."""
    return all(_read_if_present(a / name) == _read_if_present(b / name) for name in TEXT_FILES)


def _read_if_present(path: Path) -> bytes | None:
    try:
        with open_member(path, error=ModelError) as file:
            return file.read()
    except (OSError, ModelError):
        return None
