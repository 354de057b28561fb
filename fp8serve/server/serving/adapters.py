"""Adapters beside a served model. The model's engine computes requests with and without adapters in one batch.

A request for an adapter is a request to its model that names the adapter. It waits in the model's queue and is counted
under the adapter's name. It holds a lease on the adapter, so the engine unloads an adapter only after the last response
that uses it.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fp8serve.server.serving.admission import Admission
from fp8serve.server.serving.served_weights import ServedWeights


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
class ServedAdapter:
    """An adapter that the engine has loaded, or will load when the model starts.

    `engine_name` is the adapter's name in the engine. It is new at every load, because `name` may be used again while
    responses with the previous adapter are still being generated. `facts` is the engine's report about the adapter.
    """

    source: AdapterSource
    engine_name: str
    admission: Admission
    facts: dict[str, Any] = field(default_factory=dict)
    leases: int = 0
    unleased: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return self.source.name

    def served_with(self, base: ServedWeights) -> "AdaptedWeights":
        """Returns the weights of the model with this adapter, for one request."""
        source = replace(base.source, key=self.source.key or base.source.key, model_id=self.name)
        version = f"{base.weight_version}+{self.facts.get('digest', '')[:12]}"
        parts = source, base.engine, base.tokenizer, self.admission, version, base.output_format
        return AdaptedWeights(*parts, adapter=self.engine_name, base=base, leased_adapter=self)

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        """Keeps the adapter in the engine, even if it is unloaded by name meanwhile."""
        self.leases += 1
        self.unleased.clear()
        try:
            yield
        finally:
            self.leases -= 1
            if self.leases == 0:
                self.unleased.set()

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
    def lease(self) -> Iterator[ServedWeights]:
        with self.base.lease(), self.leased_adapter.lease():
            yield self
