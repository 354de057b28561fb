"""A model that embeds or classifies, in the engine's process: what `worker.py` asks of an engine.

A call is checked when it comes and computed in steps, beside others: requests take turns, text by text, until
a step is full. Small requests share a step, and none waits for a large one to end. The result of a text does not depend
on its step (text_encoder.py).
"""

import time
from base64 import b64encode
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8serve.engine.classifying import Classifier
from fp8serve.engine.embedding import Embedder
from fp8serve.engine.memory import weight_bytes
from fp8serve.engine.output import RequestOutput
from fp8serve.engine.request import EngineLimits, Request, Task
from fp8serve.engine.text_encoder import TextEncoder
from fp8serve.errors import RequestError
from fp8serve.fp8 import ops
from fp8serve.model.network.pooling import scored

Ids = Sequence[int]


@dataclass
class EncodingCall:
    """The texts of one request. segments: 0 or 1 for every token of each text. answers: that of each text, None
    until it is computed."""

    number: int
    inputs: Sequence[Ids]
    segments: Sequence[Ids] | None = None
    dimensions: int | None = None
    answers: list[Any] = field(init=False)
    num_started: int = field(default=0, init=False)  # texts that have had their step

    def __post_init__(self) -> None:
        self.answers = [None] * len(self.inputs)

    @property
    def is_finished(self) -> bool:
        return None not in self.answers


@dataclass(frozen=True)
class QueuedText:
    """One text of a call."""

    call: EncodingCall
    index: int

    @property
    def ids(self) -> Ids:
        return self.call.inputs[self.index]

    @property
    def segments(self) -> Ids:
        return [0] * len(self.ids) if self.call.segments is None else self.call.segments[self.index]


class EncodingQueue:
    """Calls in the order in which it is their turn."""

    def __init__(self) -> None:
        self._calls: deque[EncodingCall] = deque()

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, call: EncodingCall) -> None:
        """A call of one or more texts."""
        self._calls.append(call)

    def forget(self, number: int) -> None:
        """Drop this call, because its caller no longer waits."""
        self._calls = deque(call for call in self._calls if call.number != number)

    def take(self, tokens: int) -> list[QueuedText]:
        """The texts of the next step: at most so many tokens together, but at least one text."""
        return list(self._next(tokens))

    def _next(self, room: int) -> Iterator[QueuedText]:
        is_first = True
        while self._calls:
            call = self._calls[0]
            text = QueuedText(call, call.num_started)
            if not is_first and len(text.ids) > room:
                return
            self._calls.popleft()
            call.num_started += 1
            if call.num_started < len(call.inputs):
                self._calls.append(call)
            room, is_first = room - len(text.ids), False
            yield text


class EncoderEngine:
    """Takes no requests that generate."""

    task: Task

    def __init__(self, model_dir: str | Path, encoder: TextEncoder, started: float) -> None:
        """started: on the monotonic clock."""
        self.model_dir, self.encoder = Path(model_dir), encoder
        self.limits = EngineLimits(encoder.max_length, 1, 1, encoder.model.config.vocab_size, task=self.task)
        self._queue, self._answered = EncodingQueue(), list[EncodingCall]()
        self._totals: Counter[str] = Counter()
        self._load_seconds = time.monotonic() - started

    def embed(self, call: EncodingCall) -> None:
        """Queues the texts of `call`; the answers are vectors, FP32, little-endian, as base64. RequestError: see
        `Embedder.embed`, or the model makes no vectors."""
        raise RequestError("This is a classifier, which makes no vectors; ask /classify for its labels.")

    def classify(self, call: EncodingCall) -> None:
        """Queues the texts of `call`; the answers are scores of every label. RequestError: see
        `Classifier.classify_ids`, or the model has no labels."""
        raise RequestError("This is an embedding model, which has no labels; ask /v1/embeddings for vectors.")

    def forget(self, number: int) -> None:
        """Drop this call, because its caller no longer waits."""
        self._queue.forget(number)

    def has_work(self) -> bool:
        return bool(self._queue)

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Computes as many waiting texts as fit a step; see `take_answered`. No request generates."""
        batch = self._queue.take(self.encoder.options.step_tokens)
        lengths = [len(text.ids) for text in batch]
        segments = [text.segments for text in batch]
        texts, parts = [text.ids for text in batch], segments if any(map(any, segments)) else None
        rows = self.encoder.step(texts, self._finish, parts)
        for text, answer in zip(batch, self._answers(batch, rows), strict=True):
            text.call.answers[text.index] = answer
            if text.call.is_finished:
                self._answered.append(text.call)
        self._totals["computed"] += sum(lengths)
        self._totals["steps"] += 1
        return []

    def take_answered(self) -> list[EncodingCall]:
        """The calls that are finished, each once."""
        answered, self._answered = self._answered, []
        return answered

    def _finish(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """hidden [tokens, H] of texts of these lengths -> FP32 [texts, ...], in the thread that computed them."""
        raise NotImplementedError

    def _answers(self, batch: Sequence[QueuedText], rows: Tensor) -> list[Any]:
        """The result of `_finish` for some texts -> the answer for each, as JSON types."""
        raise NotImplementedError

    def add_request(self, request: Request, arrived: float | None = None) -> None:
        """RequestError."""
        self.limits.check(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """There is none to abort."""
        return None

    def abort_all(self) -> list[RequestOutput]:
        return []

    def pack_weights(self, seconds: float = 0.0) -> bool:
        return False

    def save_prefixes(self) -> None:
        """There are none to keep."""

    def stats(self) -> dict[str, Any]:
        """The counters of `Engine.stats`."""
        none = dict.fromkeys((
            "running", "waiting", "kv_blocks", "kv_blocks_used", "kv_usage", "generated_tokens_total",
            "preemptions_total", "prefix_queried_tokens_total", "prefix_hit_tokens_total",
            "prefix_restored_hit_tokens_total",
            "drafts_total", "draft_tokens_total", "accepted_draft_tokens_total", "draft_model_tokens_total",
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
        """An encoder keeps no live figures."""
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

    def embed(self, call: EncodingCall) -> None:
        """See `EncoderEngine.embed`."""
        self.embedder.check(call.inputs, call.dimensions)
        for ids in call.inputs:
            self.encoder.check(ids)
        self._queue.add(call)

    def _finish(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        return self.embedder.pooling.pooled(hidden, lengths)

    def _answers(self, batch: Sequence[QueuedText], rows: Tensor) -> list[Any]:
        finished, each = self.embedder.pooling.finished, zip(torch.split(rows, 1), batch, strict=True)
        vectors = [finished(one, text.call.dimensions) for one, text in each]
        return [b64encode(vector[0].cpu().numpy().astype("<f4").tobytes()).decode() for vector in vectors]

    def info(self) -> dict[str, Any]:
        """That of `EncoderEngine`, and how vectors are made."""
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

    def classify(self, call: EncodingCall) -> None:
        """See `EncoderEngine.classify`."""
        if not call.inputs:
            raise RequestError("classify takes a list of one or more texts.")
        self.classifier.check(call.inputs, call.segments or ())
        self._queue.add(call)

    def _finish(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        return self.classifier.labelled.logits(hidden, lengths)

    def _answers(self, batch: Sequence[QueuedText], rows: Tensor) -> list[Any]:
        return list(scored(rows.cpu(), self.classifier.head.activation).tolist())

    def info(self) -> dict[str, Any]:
        """That of `EncoderEngine`, and what is scored."""
        head, around = self.classifier.head, self.classifier.labelled.around
        return super().info() | {"labels": list(head.labels), "activation": head.activation, "pair": around}
