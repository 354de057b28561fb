"""A model that embeds or classifies, in the engine's process: what `worker.py` asks of an engine."""

import time
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fp8serve.engine.classifying import Classifier
from fp8serve.engine.embedding import Embedder
from fp8serve.engine.loading import weight_bytes
from fp8serve.engine.output import RequestOutput
from fp8serve.engine.request import EngineLimits, Request, Task
from fp8serve.engine.text_encoder import TextEncoder
from fp8serve.errors import RequestError
from fp8serve.fp8 import ops


class EncoderEngine:
    """Takes no requests that generate: every call is answered at once."""

    task: Task

    def __init__(self, model_dir: str | Path, encoder: TextEncoder, started: float) -> None:
        """started: on the monotonic clock."""
        self.model_dir, self.encoder = Path(model_dir), encoder
        self.limits = EngineLimits(encoder.max_length, 1, 1, encoder.model.config.vocab_size, task=self.task)
        self._totals: Counter[str] = Counter()
        self._load_seconds = time.monotonic() - started

    def embed(self, inputs: Sequence[Sequence[int]], dimensions: int | None) -> list[str]:
        """RequestError: the model makes no vectors."""
        raise RequestError("This is a classifier, which makes no vectors; ask /classify for its labels.")

    def classify(self, inputs: Sequence[Sequence[int]], segments: Sequence[Sequence[int]]) -> list[list[float]]:
        """RequestError: the model has no labels."""
        raise RequestError("This is an embedding model, which has no labels; ask /v1/embeddings for vectors.")

    def _count(self, tokens: Sequence[int]) -> None:
        self._totals["computed"] += sum(tokens)
        self._totals["steps"] += 1

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
        encoder, options = self.encoder, self.encoder.options
        return {
            "model": str(self.model_dir),
            "architecture": encoder.model.config.architecture,
            "task": self.task,
            "recipe": options.recipe,
            "fp8_layers": len(encoder.frozen),
            "device": options.device,
            "threads": torch.get_num_threads(),
            "dtype": str(next(encoder.model.parameters()).dtype).removeprefix("torch."),
            "max_model_len": encoder.max_length,
            "weight_bytes": weight_bytes(encoder.model),
            "vocab_size": encoder.model.config.vocab_size,
            "kernels": ops.backends(torch.device(options.device).type),
            "load_seconds": round(self._load_seconds, 3),
        }


class EmbeddingEngine(EncoderEngine):
    """Makes vectors."""

    task = "embed"

    def __init__(self, model_dir: str | Path, **options: Any) -> None:
        """As `Embedder`."""
        started = time.monotonic()
        self.embedder = Embedder(model_dir, **options)
        super().__init__(model_dir, self.embedder.encoder, started)

    def embed(self, inputs: Sequence[Sequence[int]], dimensions: int | None) -> list[str]:
        """Of each list of token ids the vector, FP32, little-endian, as base64. RequestError: see `Embedder.embed`."""
        found = self.embedder.embed(inputs, dimensions=dimensions)
        self._count(found.tokens)
        return [b64encode(vector.numpy().astype("<f4").tobytes()).decode() for vector in found.vectors]

    def info(self) -> dict[str, Any]:
        """And how vectors are made."""
        pooling = self.embedder.pooling
        return super().info() | {
            "dimensions": self.embedder.dimensions,
            "pooling": pooling.mode,
            "normalized": pooling.normalized,
            "prompt": pooling.prompt(None),
            "prompts": dict(pooling.prompts),
        }


class ClassifyingEngine(EncoderEngine):
    """Scores labels."""

    task = "classify"

    def __init__(self, model_dir: str | Path, **options: Any) -> None:
        """As `Classifier`."""
        started = time.monotonic()
        self.classifier = Classifier(model_dir, **options)
        super().__init__(model_dir, self.classifier.encoder, started)

    def classify(self, inputs: Sequence[Sequence[int]], segments: Sequence[Sequence[int]]) -> list[list[float]]:
        """Of each list of token ids the score of every label. RequestError: see `Classifier.classify_ids`."""
        found = self.classifier.classify_ids(inputs, segments)
        self._count(found.tokens)
        rows: list[list[float]] = found.scores.tolist()
        return rows

    def info(self) -> dict[str, Any]:
        """And what is scored."""
        head, around = self.classifier.head, self.classifier.labelled.around
        return super().info() | {"labels": list(head.labels), "activation": head.activation, "pair": around}
