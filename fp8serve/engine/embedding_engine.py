"""An embedding model in the engine's process: what `worker.py` asks of an engine, where nothing is generated."""

import time
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fp8serve.engine.embedding import Embedder
from fp8serve.engine.output import RequestOutput
from fp8serve.engine.request import EngineLimits, Request
from fp8serve.errors import RequestError
from fp8serve.fp8 import ops


class EmbeddingEngine:
    """Takes no requests that generate: every call of `embed` is answered at once."""

    def __init__(self, model_dir: str | Path, **options: Any) -> None:
        """As `Embedder`; RequestError, too, for an option that only a model which generates can have."""
        started = time.monotonic()
        if options.get("roll_history"):
            raise RequestError("roll_history is for models that generate, and this one embeds; leave it out.")
        self.embedder = Embedder(model_dir, **options)
        self.model_dir = Path(model_dir)
        self.limits = EngineLimits(
            self.embedder.max_length, 1, 1, self.embedder.model.config.vocab_size, generates=False
        )
        self._totals: Counter[str] = Counter()
        self._load_seconds = time.monotonic() - started

    def embed(self, inputs: Sequence[Sequence[int]], dimensions: int | None) -> list[str]:
        """Of each list of token ids the vector, FP32, little-endian, as base64. RequestError: see `Embedder.embed`."""
        found = self.embedder.embed(inputs, dimensions=dimensions)
        self._totals["computed"] += sum(found.tokens)
        self._totals["steps"] += 1
        return [b64encode(vector.numpy().astype("<f4").tobytes()).decode() for vector in found.vectors]

    def add_request(self, request: Request) -> None:
        """RequestError."""
        self.limits.check(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """There is none to abort."""
        return None

    def abort_all(self) -> list[RequestOutput]:
        return []

    def has_work(self) -> bool:
        return False

    def step(self) -> list[RequestOutput]:
        return []

    def pack_weights(self, seconds: float = 0.0) -> bool:
        return False

    def stats(self) -> dict[str, Any]:
        """The counters of `Engine.stats`."""
        none = dict.fromkeys((
            "running", "waiting", "kv_blocks", "kv_blocks_used", "kv_usage", "generated_tokens_total",
            "preemptions_total", "prefix_queried_tokens_total", "prefix_hit_tokens_total",
            "drafts_total", "draft_tokens_total", "accepted_draft_tokens_total",
        ), 0)  # fmt: skip
        computed = self._totals["computed"]
        done = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        return none | {
            "steps_total": self._totals["steps"],
            "computed_tokens_total": computed,
            "prompt_tokens_total": computed,
            "finished_total": done,
        }

    def scales(self) -> list[dict[str, Any]]:
        """Of an encoder no live figures are kept."""
        return []

    def info(self) -> dict[str, Any]:
        """What runs, and with which limits."""
        embedder, pooling = self.embedder, self.embedder.pooling
        return {
            "model": str(self.model_dir),
            "architecture": embedder.model.config.architecture,
            "task": "embed",
            "recipe": embedder.options.recipe,
            "fp8_layers": len(embedder.frozen),
            "device": embedder.options.device,
            "dtype": str(next(embedder.model.parameters()).dtype).removeprefix("torch."),
            "max_model_len": embedder.max_length,
            "dimensions": embedder.dimensions,
            "pooling": pooling.mode,
            "normalized": pooling.normalized,
            "prompt": pooling.prompt(None),
            "vocab_size": embedder.model.config.vocab_size,
            "kernels": ops.backends(torch.device(embedder.options.device).type),
            "load_seconds": round(self._load_seconds, 3),
        }
