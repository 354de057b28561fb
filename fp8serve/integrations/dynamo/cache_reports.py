"""Reports to Dynamo's router which blocks the prefix cache of a worker holds, and how full its KV cache is.

The router hashes the tokens of each block itself, so a request goes to the worker that has computed most of its prompt.
Changes are read from the engine's process a few times a second. A block that was restored from a file (`--cache-dir`)
is reported when a request shares it, because the file has no tokens.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from fp8serve.errors import Fp8ServeError
from fp8serve.server.serving.served_model import ServedModel
from fp8serve.server.serving.served_weights import ServedWeights

log = logging.getLogger("fp8serve.server")

REPORT_SECONDS = 0.2
RETRY_SECONDS = 5.0  # after a report that failed
RANK = 0  # a worker is one rank for the router, also with tensor_parallel


class CacheReports:
    """Reports about one model. Dynamo sets the publishers after the model is loaded; without them, nothing is sent.
    `snapshot` creates a report of the load (ComponentSnapshot of dynamo.common.backend)."""

    def __init__(self, model: ServedModel, snapshot: Callable[..., Any]) -> None:
        self._model = model
        self._snapshot = snapshot
        self.blocks: Any = None  # dynamo.llm.KvEventPublisher
        self.load: Any = None  # SnapshotPublisher of dynamo.common.backend
        self._served: ServedWeights | None = None  # whose blocks were reported
        self._hashes: set[int] = set()  # of the blocks that the router knows

    async def run(self) -> None:
        """Sends reports until it is cancelled."""
        while True:
            try:
                await self.report()
                await asyncio.sleep(REPORT_SECONDS)
            except Exception:
                log.exception("a report to the router failed; requests may go to workers without their prefixes")
                await asyncio.sleep(RETRY_SECONDS)

    async def report(self) -> None:
        """Reports what has changed since the last call."""
        if self.blocks is not None:
            await self._report_blocks()
        if self.load is not None and (stats := self._model.stats):
            queried, hits = stats["prefix_queried_tokens_total"], stats["prefix_hit_tokens_total"]
            self.load.publish(
                RANK,
                self._snapshot(
                    kv_used_blocks=stats["kv_blocks_used"],
                    kv_total_blocks=stats["kv_blocks"],
                    gpu_cache_usage=stats["kv_usage"],
                    dp_rank=RANK,
                    kv_cache_hit_rate=hits / queried if queried else None,
                ),
            )

    async def _report_blocks(self) -> None:
        served = self._model.current
        if served is not None and not served.engine.alive:
            served = None
        if served is not self._served:  # the blocks ended with their engine, and a new one has none
            self._remove(self._hashes)
            self._served = served
        changes: list[tuple[str, str | None, list[int], str]] = []
        if served is not None:
            with contextlib.suppress(Fp8ServeError):  # the engine's process ends, and will be restarted
                changes = await served.engine.pop_block_changes()
        for key, previous, tokens, salt in changes:
            if tokens:
                self._hashes.add(_number(key))
                parent = None if previous is None else _number(previous)
                self.blocks.publish_stored(tokens, [len(tokens)], [_number(key)], parent, cache_salt=salt or None)
            else:
                self._remove({_number(key)} if key else self._hashes)

    def _remove(self, hashes: set[int]) -> None:
        """Reports that blocks were removed, as far as the router knows them."""
        known = hashes & self._hashes
        self._hashes -= known
        if known:
            self.blocks.publish_removed(list(known))


def _number(key: str) -> int:
    """Returns the hash of a block as the router takes it, a signed number of 64 bits."""
    return int.from_bytes(bytes.fromhex(key)[:8], "little", signed=True)
