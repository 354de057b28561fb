"""Reports to Dynamo's router which blocks the prefix cache of a worker holds, and how full its KV cache is.

The router hashes the tokens of each block itself, so a request goes to the worker that has computed most of its prompt.
Changes are read from the engine's process a few times a second. A block that was restored from a file (`--cache-dir`)
is not reported, because the file has no tokens.
"""

import asyncio
import contextlib
from typing import Any

from dynamo.common.backend.publisher import ComponentSnapshot

from fp8serve.errors import Fp8ServeError
from fp8serve.server.serving.served_model import ServedModel
from fp8serve.server.serving.served_weights import ServedWeights

REPORT_SECONDS = 0.2
RANK = 0  # a worker is one rank for the router, also with tensor_parallel


class CacheReports:
    """Reports about one model. Dynamo sets the publishers after the model is loaded; without them, nothing is sent."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self.blocks: Any = None  # dynamo.llm.KvEventPublisher
        self.load: Any = None  # SnapshotPublisher of dynamo.common.backend
        self._served: ServedWeights | None = None  # whose blocks were reported
        self._hashes: set[int] = set()  # of the blocks that the router knows

    async def run(self) -> None:
        """Sends reports until it is cancelled."""
        while True:
            served = self._model.current
            if self.blocks is not None and served is not None and served.engine.alive:
                with contextlib.suppress(Fp8ServeError):  # the engine's process ends, and will be restarted
                    await self._report_blocks(served)
            if self.load is not None and (stats := self._model.stats):
                queried, hits = stats["prefix_queried_tokens_total"], stats["prefix_hit_tokens_total"]
                self.load.publish(
                    RANK,
                    ComponentSnapshot(
                        kv_used_blocks=stats["kv_blocks_used"],
                        kv_total_blocks=stats["kv_blocks"],
                        gpu_cache_usage=stats["kv_usage"],
                        dp_rank=RANK,
                        kv_cache_hit_rate=hits / queried if queried else None,
                    ),
                )
            await asyncio.sleep(REPORT_SECONDS)

    async def _report_blocks(self, served: ServedWeights) -> None:
        changes = await served.engine.pop_block_changes()
        if served is not self._served:  # a new engine has an empty cache
            self._remove(list(self._hashes))
            self._served = served
        for key, previous, tokens, salt in changes:
            if tokens:
                self._hashes.add(_number(key))
                parent = None if previous is None else _number(previous)
                self.blocks.publish_stored(tokens, [len(tokens)], [_number(key)], parent, cache_salt=salt or None)
            else:
                self._remove([_number(key)])

    def _remove(self, hashes: list[int]) -> None:
        if hashes:
            self._hashes.difference_update(hashes)
            self.blocks.publish_removed(hashes)


def _number(key: str) -> int:
    """Returns the hash of a block as the router takes it, a signed number of 64 bits."""
    return int.from_bytes(bytes.fromhex(key)[:8], "little", signed=True)
