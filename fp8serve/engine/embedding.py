"""Embedding models and classifiers, which compute the texts of a call without a KV cache and without a scheduler.

`Embedder` computes one vector for each text. The engines have the interface that `worker.py` expects of an engine: a
call carries the texts of one HTTP request. The engine checks a call when it arrives, and then computes its texts in
steps. To fill a step, the engine takes one text of each call in turn. So small calls share a step, and no call waits
until a large call has ended. The result of a text does not depend on the other texts of its step (text_encoder.py).
"""

from base64 import b64encode
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8serve.engine.classifying import Classifier
from fp8serve.engine.memory import weight_bytes
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.output import RequestOutput
from fp8serve.engine.request import EngineLimits, Request, Task
from fp8serve.engine.text_encoder import TextEncoder
from fp8serve.errors import RequestError
from fp8serve.fp8 import ops
from fp8serve.model.network.pooling import Pooling, read_pooling, to_scores
from fp8serve.processes import Phases

Ids = Sequence[int]
Text = str | Sequence[int]


@dataclass(frozen=True)
class Embedded:
    """The vectors of some texts, FP32 [texts, dimensions]. `tokens` has the number of tokens of each text."""

    vectors: Tensor
    tokens: list[int]


class Embedder:
    """An embedding model, loaded from its directory.

    `options` are the fields of EngineOptions. Raises ModelError, ScalesError or RecipeError if the model cannot be
    loaded, and RequestError for an option that only models that generate text have.
    """

    def __init__(self, model_dir: str | Path, **options: Any) -> None:
        self.pooling: Pooling = read_pooling(model_dir)
        self.encoder = TextEncoder(model_dir, EngineOptions.of(options), "embed", self.pooling.max_length)
        self.options, self.model = self.encoder.options, self.encoder.model
        self.tokenizer, self.frozen = self.encoder.tokenizer, self.encoder.frozen

    @property
    def max_length(self) -> int:
        """The largest number of tokens of a text."""
        return self.encoder.max_length

    @property
    def dimensions(self) -> int:
        """The number of dimensions of a vector."""
        return self.model.config.hidden_size

    @torch.inference_mode()
    def embed(
        self,
        texts: Sequence[Text],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> Embedded:
        """Returns one vector for each text or list of token ids, in the same order.

        Args:
            prompt_name: the prompt of the model to put before each text; by default the model's default prompt, if any.
            dimensions: the number of dimensions to which the vectors are cut.
            truncate: whether to shorten texts that are too long. A special token at the end of a text is kept.

        Raises RequestError if a text is empty or too long, or a token id or option is unknown.
        """
        self.check(texts, dimensions)
        sequences = [self._ids(text, prompt_name, truncate) for text in texts]
        vectors = self.encoder.run(sequences, lambda hidden, lengths: self.pooling(hidden, lengths, dimensions))
        return Embedded(vectors.cpu(), [len(ids) for ids in sequences])

    def check(self, texts: Sequence[Text], dimensions: int | None) -> None:
        """Raises RequestError if there are no texts, or if the vectors have fewer than `dimensions` dimensions."""
        if isinstance(texts, str) or not texts or isinstance(texts[0], int):
            raise RequestError("embed takes a list of one or more texts: put the text in a list.")
        if dimensions is not None and not 1 <= dimensions <= self.dimensions:
            raise RequestError(f"dimensions is {dimensions}; for this model, use 1 to {self.dimensions}.")

    def _ids(self, text: Text, prompt_name: str | None, truncate: bool) -> list[int]:
        ids = self.tokenizer.encode(self.pooling.prompt(prompt_name) + text) if isinstance(text, str) else list(text)
        ids = self.tokenizer.truncate_ids(ids, self.max_length) if truncate else ids
        self.encoder.check(ids)
        return ids


@dataclass
class EncodingCall:
    """The texts of one request, as token ids. `segments` is 0 or 1 for every token of each text. `results` has an entry
    for each text, which is None until the text is computed."""

    number: int
    inputs: Sequence[Ids]
    segments: Sequence[Ids] | None = None
    dimensions: int | None = None
    results: list[Any] = field(init=False)
    num_scheduled: int = field(default=0, init=False)  # texts that have left the queue

    def __post_init__(self) -> None:
        self.results = [None] * len(self.inputs)

    @property
    def is_finished(self) -> bool:
        return None not in self.results


@dataclass(frozen=True)
class QueuedText:
    """One text of a call: the one at `index`."""

    call: EncodingCall
    index: int

    @property
    def ids(self) -> Ids:
        return self.call.inputs[self.index]

    @property
    def segments(self) -> Ids:
        return [0] * len(self.ids) if self.call.segments is None else self.call.segments[self.index]


class EncodingQueue:
    """The calls that have texts to compute. The calls take turns, one text at a time."""

    def __init__(self) -> None:
        self._calls: deque[EncodingCall] = deque()

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, call: EncodingCall) -> None:
        """Adds a call, which must have one or more texts."""
        self._calls.append(call)

    def cancel(self, number: int) -> None:
        """Removes the call of this number, if it is in the queue."""
        self._calls = deque(call for call in self._calls if call.number != number)

    def next_batch(self, max_tokens: int) -> list[QueuedText]:
        """Removes the texts of the next step from the queue and returns them: one text of any length, and more as long
        as the batch has at most `max_tokens` tokens."""
        batch = list[QueuedText]()
        while self._calls:
            call = self._calls[0]
            text = QueuedText(call, call.num_scheduled)
            if batch and len(text.ids) > max_tokens:
                break
            self._calls.popleft()
            call.num_scheduled += 1
            if call.num_scheduled < len(call.inputs):
                self._calls.append(call)
            max_tokens -= len(text.ids)
            batch.append(text)
        return batch


class EncoderEngine:
    """The base class of engines for models that do not generate text."""

    task: Task

    def __init__(self, model_dir: str | Path, encoder: TextEncoder, phases: Phases) -> None:
        """`phases` has measured the time since loading started."""
        self.model_dir, self.encoder = Path(model_dir), encoder
        self.limits = EngineLimits(encoder.max_length, 1, 1, encoder.model.config.vocab_size, task=self.task)
        self._queue, self._finished_calls = EncodingQueue(), list[EncodingCall]()
        self._totals: Counter[str] = Counter()
        self.phases = phases
        self.phases.end("load")

    def embed(self, call: EncodingCall) -> None:
        """Queues the texts of `call`. The results are vectors: little-endian FP32, as base64. Raises the errors of
        `Embedder.embed`, and RequestError if the model makes no vectors."""
        raise RequestError("This is a classifier, which makes no vectors; ask /classify for its labels.")

    def classify(self, call: EncodingCall) -> None:
        """Queues the texts of `call`. The results are the scores of all labels. Raises the errors of
        `Classifier.classify_ids`, and RequestError if the model has no labels."""
        raise RequestError("This is an embedding model, which has no labels; ask /v1/embeddings for vectors.")

    def cancel(self, number: int) -> None:
        """Cancels the call of this number, if it has not ended."""
        self._queue.cancel(number)

    def has_work(self) -> bool:
        return bool(self._queue)

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Computes one batch of queued texts. `pop_finished_calls` returns the results; the list returned here is
        empty, because no request generates text."""
        batch = self._queue.next_batch(self.encoder.options.step_tokens)
        texts, segments = [text.ids for text in batch], [text.segments for text in batch]
        rows = self.encoder.step(texts, self._pool, segments if any(map(any, segments)) else None)
        for text, result in zip(batch, self._results(batch, rows), strict=True):
            text.call.results[text.index] = result
            if text.call.is_finished:
                self._finished_calls.append(text.call)
        self._totals["computed"] += sum(map(len, texts))
        self._totals["steps"] += 1
        return []

    def pop_finished_calls(self) -> list[EncodingCall]:
        """Returns the calls that have finished since this method was last called."""
        calls, self._finished_calls = self._finished_calls, []
        return calls

    def _pool(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Returns a row for each text, FP32 [texts, ...], from the hidden states [tokens, H] of texts of these lengths.
        Runs in the thread that computed the hidden states."""
        raise NotImplementedError

    def _results(self, batch: Sequence[QueuedText], rows: Tensor) -> list[Any]:
        """Converts the rows that `_pool` returned for a batch to the result of each text, as JSON types."""
        raise NotImplementedError

    def add_request(self, request: Request, arrived: float | None = None) -> None:
        """Raises RequestError, because this model does not generate text."""
        self.limits.check(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Returns None, because there are no requests."""
        return None

    def abort_all(self) -> list[RequestOutput]:
        return []

    def pack_weights(self, seconds: float = 0.0) -> bool:
        return False

    def save_prefixes(self) -> None:
        """Does nothing, because there is no prefix cache."""

    def stats(self) -> dict[str, Any]:
        """Returns the counters of `Engine.stats`; those that belong to generation are 0."""
        zeros = dict.fromkeys((
            "running", "waiting", "kv_blocks", "kv_blocks_used", "kv_usage", "generated_tokens_total",
            "preemptions_total", "prefix_queried_tokens_total", "prefix_hit_tokens_total",
            "prefix_restored_hit_tokens_total",
            "drafts_total", "draft_tokens_total", "accepted_draft_tokens_total", "draft_model_tokens_total",
        ), 0)  # fmt: skip
        computed = self._totals["computed"]
        return zeros | {
            "steps_total": self._totals["steps"],
            "computed_tokens_total": computed,
            "prompt_tokens_total": computed,
            "finished_total": dict.fromkeys(("stop", "length", "abort", "error"), 0),
        }

    def scales(self) -> list[dict[str, Any]]:
        """Returns an empty list, because an encoder's inputs are not monitored."""
        return []

    def info(self) -> dict[str, Any]:
        """Returns the model, its options and its limits, as a JSON object."""
        encoder, options = self.encoder, self.encoder.options
        return {
            "model": str(self.model_dir),
            "architecture": encoder.model.config.architecture,
            "task": self.task,
            "recipe": options.recipe,
            "quantized_layers": len(encoder.frozen),
            "device": options.device,
            "threads": torch.get_num_threads(),
            "dtype": str(next(encoder.model.parameters()).dtype).removeprefix("torch."),
            "max_model_len": encoder.max_length,
            "max_batch_tokens": options.step_tokens,
            "weight_bytes": weight_bytes(encoder.model),
            "vocab_size": encoder.model.config.vocab_size,
            "kernels": ops.backends(torch.device(options.device).type),
            "load_seconds": self.phases.seconds["load"],
        }


class EmbeddingEngine(EncoderEngine):
    """The engine of an embedding model."""

    task = "embed"

    def __init__(self, model_dir: str | Path, **options: Any) -> None:
        """`options` are the fields of EngineOptions. Raises the errors of `Embedder`."""
        phases = Phases()
        self.embedder = Embedder(model_dir, **options)
        super().__init__(model_dir, self.embedder.encoder, phases)

    def embed(self, call: EncodingCall) -> None:
        """See `EncoderEngine.embed`."""
        self.embedder.check(call.inputs, call.dimensions)
        for ids in call.inputs:
            self.encoder.check(ids)
        self._queue.add(call)

    def _pool(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        return self.embedder.pooling.pool(hidden, lengths)

    def _results(self, batch: Sequence[QueuedText], rows: Tensor) -> list[Any]:
        pooling, row_of_text = self.embedder.pooling, zip(torch.split(rows, 1), batch, strict=True)
        vectors = [pooling.truncate_and_normalize(row, text.call.dimensions) for row, text in row_of_text]
        return [b64encode(vector[0].cpu().numpy().astype("<f4").tobytes()).decode() for vector in vectors]

    def info(self) -> dict[str, Any]:
        """Returns the object of `EncoderEngine.info` with the options of the pooling added."""
        pooling = self.embedder.pooling
        return super().info() | {
            "dimensions": self.embedder.dimensions,
            "pooling": pooling.mode,
            "normalized": pooling.normalized,
            "prompt": pooling.prompt(None),
            "prompts": dict(pooling.prompts),
        }


class ClassifyingEngine(EncoderEngine):
    """The engine of a classifier or reranker."""

    task = "classify"

    def __init__(self, model_dir: str | Path, **options: Any) -> None:
        """`options` are the fields of EngineOptions. Raises the errors of `Classifier`."""
        phases = Phases()
        self.classifier = Classifier(model_dir, **options)
        super().__init__(model_dir, self.classifier.encoder, phases)

    def classify(self, call: EncodingCall) -> None:
        """See `EncoderEngine.classify`."""
        if not call.inputs:
            raise RequestError("classify takes a list of one or more texts.")
        self.classifier.check(call.inputs, call.segments or ())
        self._queue.add(call)

    def _pool(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        return self.classifier.scorer.logits(hidden, lengths)

    def _results(self, batch: Sequence[QueuedText], rows: Tensor) -> list[Any]:
        return list(to_scores(rows.cpu(), self.classifier.head.activation).tolist())

    def info(self) -> dict[str, Any]:
        """Returns the object of `EncoderEngine.info` with the labels, activation and pair template added."""
        head, template = self.classifier.head, self.classifier.scorer.template
        return super().info() | {"labels": list(head.labels), "activation": head.activation, "pair": template}
