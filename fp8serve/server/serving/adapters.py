"""Adapters by name beside a served model: its engine computes them together with everything else.

A request for one is a request to its model that names the adapter. It waits in the model's queue, and is counted under
the adapter's name. A request that uses an adapter holds a lease on it, so that the adapter leaves the engine only after
the last of its answers.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fp8serve.server.serving.admission import Admission
from fp8serve.server.serving.served import Served


@dataclass(frozen=True)
class AdapterSource:
    """A directory as peft writes it. `key`: the id of the job that made it, or "" for any other. `root`: its name at
    its source. `required`: whether its model must not serve without it.
    """

    name: str
    root: str
    directory: Path
    key: str = ""
    required: bool = False


@dataclass(eq=False)
class ServedAdapter:
    """An adapter that is loaded, or will be with its model. `engine_name`: its name in the engine; a new one each
    time, because its own name may be used again while answers are under way. `facts`: the engine's facts about it.
    """

    source: AdapterSource
    engine_name: str
    admission: Admission
    facts: dict[str, Any] = field(default_factory=dict)
    leases: int = 0
    free: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return self.source.name

    def served_with(self, base: Served) -> "AdaptedServed":
        """The weights of the model with this adapter, for one request."""
        source = replace(base.source, key=self.source.key or base.source.key, model_id=self.name)
        version = f"{base.weight_version}+{self.facts.get('digest', '')[:12]}"
        parts = source, base.engine, base.tokenizer, self.admission, version, base.answers
        return AdaptedServed(*parts, adapter=self.engine_name, base=base, held=self)

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        """While it is held the adapter stays in the engine."""
        self.leases += 1
        self.free.clear()
        try:
            yield
        finally:
            self.leases -= 1
            if self.leases == 0:
                self.free.set()

    def view(self) -> dict[str, Any]:
        """The adapter as routes show it, without places on the server's disk."""
        facts = {name: self.facts.get(name) for name in ("method", "rank", "layers", "bytes")}
        return {"name": self.name, "root": self.source.root, "in_flight": self.admission.in_flight, **facts}


@dataclass(eq=False, kw_only=True)
class AdaptedServed(Served):
    """See `ServedAdapter.served_with`."""

    base: Served
    held: ServedAdapter

    @contextlib.contextmanager
    def lease(self) -> Iterator[Served]:
        """Holds the engine and the adapter."""
        with self.base.lease(), self.held.lease():
            yield self
