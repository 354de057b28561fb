"""The front process's handle on an engine process: asyncio, no torch. (Signatures first; the body follows.)"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fp8serve.engine.options import EngineOptions
from fp8serve.engine.request import Limits, Request, RequestOutput


class EngineClient:
    """One engine process. `limits` and `info` are known once `start` has returned."""

    limits: Limits
    info: dict[str, Any]

    @classmethod
    async def start(cls, model_dir: str | Path, options: EngineOptions | None = None) -> "EngineClient":
        """Spawns the process and waits until it is ready; raises the worker's own error if it is not."""
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        """The process runs and its connection is open."""
        raise NotImplementedError

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the process last gave a sign of life."""
        raise NotImplementedError

    def check(self, request: Request) -> None:
        """RequestError, before anything is sent, when the request could never run."""
        raise NotImplementedError

    def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """Outputs until one has a finish_reason; closing the iterator early aborts the request."""
        raise NotImplementedError

    async def abort(self, request_id: str) -> None:
        raise NotImplementedError

    async def stats(self) -> dict[str, Any]:
        raise NotImplementedError

    async def scales(self) -> list[dict[str, Any]]:
        raise NotImplementedError

    async def drain(self, deadline: float) -> None:
        """Takes no new request, lets running ones finish for `deadline` seconds, then ends the process."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError
