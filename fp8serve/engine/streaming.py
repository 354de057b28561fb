"""Serves a model whose weights are larger than memory, on a CPU: layers are read from the mapped files in every step.

Memory keeps as many layers as fit. The others are streamed: a thread reads the next one in order while a layer is
computed, and its pages are dropped after its use. So memory holds at most two of them, and a step takes the time to
read what does not fit, or the time to compute, whichever is longer. Streamed layers are spread evenly over the model,
so that the disk is busy all the time. Left to itself, the system would drop the pages that were not used for the
longest time, which are those that the next layers need, and so would read every layer in every step, in small parts.

A layer whose weights were copied when they were loaded (cast by the recipe, or dequantized) is in memory already.
Experts of a mixture are not streamed, because a step needs few of them: those that the router chose are read ahead
together, and the system keeps what is used often. Experts are not stacked, layers are not joined and weights are not
packed, all of which would copy them. The bits are the same.
"""

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fp8serve.engine.options import EngineOptions
from fp8serve.errors import MachineError
from fp8serve.model.building import Model
from fp8serve.model.device import estimate_weight_memory
from fp8serve.model.network.decoder import Decoder
from fp8serve.model.network.experts import mixtures
from fp8serve.model.storage.mapping import CAN_READ_AHEAD, Span, join_spans, span_of
from fp8serve.model.storage.memory import free_memory

log = logging.getLogger("fp8serve.engine")
MIN_STREAMED_BYTES = 1 << 16  # smaller tensors (norms, scales, biases) stay in memory
MAX_MEMORY_FRACTION = 0.85  # of free memory, for weights and the KV cache; activations need the rest


@dataclass(frozen=True)
class Part:
    """A layer or the head, with the spans of its weights in mapped files."""

    module: nn.Module
    spans: Sequence[Span]

    @property
    def size(self) -> int:
        return sum(span.size for span in self.spans)

    def read(self) -> None:
        for span in self.spans:
            span.read()

    def drop(self) -> None:
        for span in self.spans:
            span.drop()


class WeightStreamer:
    """Reads the weights of a model from its files before they are used.

    `is_kept` says which parts stay in memory after their first use. `experts` are the mixtures of the model.
    """

    def __init__(self, parts: Sequence[Part], is_kept: Sequence[bool], experts: Iterable[nn.Module] = ()) -> None:
        self._parts, self._is_kept = parts, is_kept
        self._reads: dict[int, Future[None]] = {}  # of the parts that memory holds, or that are being read
        self._reader = ThreadPoolExecutor(1, "weight-reader")
        for index, part in enumerate(parts):
            part.module.register_forward_pre_hook(partial(self._begin, index))
            part.module.register_forward_hook(partial(self._end, index))
        mixture_spans = {mixture: [_spans(expert) for expert in mixture.children()] for mixture in experts}
        streamed = [part for part, kept in zip(parts, is_kept, strict=True) if not kept]
        expert_spans = [span for spans in mixture_spans.values() for expert in spans for span in expert]
        for span in (*expert_spans, *(span for part in streamed for span in part.spans)):
            span.read_exactly()  # but not those of kept parts, which the system may drop and faults read back
        for mixture, spans in mixture_spans.items():
            mixture.register_forward_pre_hook(partial(_advise_chosen, spans))
        part_bytes = sum(part.size for part in streamed)
        self.kept_bytes = sum(part.size for part in parts) - part_bytes
        self.streamed_bytes = part_bytes + sum(span.size for span in expert_spans)

    def _begin(self, index: int, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].size(0) > 0:  # otherwise it is the head, in a step without samples
            self._prepare(index)

    def prepare(self, weight: Tensor) -> None:
        """Waits until memory holds a weight for a use outside of a step, and starts to read the part after its own."""
        span = span_of(weight)
        if span is None:  # it was copied
            return
        index = next((i for i, part in enumerate(self._parts) if any(map(span.is_inside, part.spans))), None)
        if index is None:  # it is small, or belongs to an expert
            span.read()
        else:
            self._prepare(index)

    def _prepare(self, index: int) -> None:
        """Waits until memory holds the part, and starts to read the next one."""
        following = (*range(index + 1, len(self._parts)), *range(index))
        ahead = next((i for i in following if not self._is_kept[i] or i not in self._reads), index)
        for unused in [i for i in self._reads if i not in (index, ahead) and not self._is_kept[i]]:
            self._drop(unused)  # it was read ahead, and another part was needed
        self._read(index).result()
        self._read(ahead)

    def _end(self, index: int, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if index in self._reads and not self._is_kept[index]:
            self._drop(index)

    def _read(self, index: int) -> Future[None]:
        if index not in self._reads:
            self._reads[index] = self._reader.submit(self._parts[index].read)
        return self._reads[index]

    def _drop(self, index: int) -> None:
        del self._reads[index]
        self._reader.submit(self._parts[index].drop)


def check_copies(model_dir: Path, options: EngineOptions) -> None:
    """Raises MachineError if loading would copy more weights than memory has room for."""
    weights = estimate_weight_memory(model_dir, options.recipe, options.head_dtype, options.scales)
    copied, free = weights.copied, free_memory()
    if copied > free:
        raise MachineError(
            f"{model_dir} needs {_gib(copied)} of memory for weights that are converted when they are loaded, and "
            f"{_gib(free)} are free; serve it as it is stored, or calibrate the model first (gpt-oss in MXFP4: "
            "convert it to compressed-tensors): stored weights are read from their files."
        )


def create_streamer(model: Model, model_dir: Path, reserved_bytes: int) -> WeightStreamer | None:
    """Returns the streamer of a loaded model, or None if memory has room for all of its weights. `reserved_bytes` of
    the free memory belong to the KV cache and to other weights.

    Raises MachineError if memory has no room for the two largest layers.
    """
    free = free_memory()
    experts = list(mixtures(model).values())
    excluded = {id(tensor) for mixture in experts for tensor in (*mixture.parameters(), *mixture.buffers())}
    parts = [Part(module, _spans(module, excluded)) for module in (*model.parts, model.head)]
    sizes = [part.size for part in parts] + [span.size for mixture in experts for span in _spans(mixture)]
    usable, size = int(MAX_MEMORY_FRACTION * free), sum(sizes)
    budget = usable - reserved_bytes
    if size <= budget:
        return None
    if not isinstance(model, Decoder) or not CAN_READ_AHEAD:
        log.warning(
            "%s of weights do not fit in the free memory and are read by page faults, which is slow: models that "
            "transformers computes are not streamed, nor any on another system than Linux.", _gib(size),
        )  # fmt: skip
        return None
    is_kept = choose_kept([part.size for part in parts], budget)
    if is_kept is None and size <= usable:  # a cache takes memory only when it fills
        log.warning(
            "The KV cache and other weights may take %s of the %s that are free, beside %s of weights: lower "
            "num_blocks or kv_cache_bytes if memory runs short.", _gib(reserved_bytes), _gib(free), _gib(size),
        )  # fmt: skip
        return None
    if is_kept is None:
        largest = sum(sorted(part.size for part in parts)[-2:])
        raise MachineError(
            f"{model_dir} does not fit: {_gib(largest)} of memory are needed for its two largest layers at a time, and "
            f"{_gib(max(0, budget))} of {_gib(free)} are left by its KV cache and activations; lower num_blocks or "
            "kv_cache_bytes, or use a machine with more memory."
        )
    streamer = WeightStreamer(parts, is_kept, experts)
    for span in [] if model.config.tie_word_embeddings else _spans(model.embedding):
        span.read_exactly()
    log.info(
        "%s of weights do not fit in the free memory: %s (%d of %d layers, with the head) stay in memory, and %s are "
        "read from the files %s",
        _gib(size), _gib(streamer.kept_bytes), sum(is_kept), len(parts), _gib(streamer.streamed_bytes),
        "as the router chooses experts" if experts else "in every step",
    )  # fmt: skip
    return streamer


def choose_kept(sizes: Sequence[int], budget: int) -> list[bool] | None:
    """Returns which parts stay in memory, for the `sizes` of the layers and, last, of the head. Returns None if
    `budget` bytes are too few for the two largest parts, between which a step may be.

    The head is kept if it takes at most half of the budget, because steps without samples do not need it. Kept and
    streamed layers alternate in the proportion of their bytes.
    """
    *layers, head = sizes
    if sum(sizes) <= budget:
        return [True] * len(sizes)
    keeps_head = head + max(head, sum(sorted(layers)[-2:])) <= budget
    streamed = layers if keeps_head else list(sizes)
    budget -= sum(sorted(streamed)[-2:]) + (head if keeps_head else 0)
    if budget < 0:
        return None
    is_kept, kept_bytes, seen_bytes = [], 0, 0
    for size in streamed:
        seen_bytes += size
        is_kept.append(kept_bytes + size <= budget * seen_bytes / sum(streamed))
        kept_bytes += size if is_kept[-1] else 0
    return [*is_kept, True] if keeps_head else is_kept


def _spans(module: nn.Module, excluded: frozenset[int] | set[int] = frozenset()) -> list[Span]:
    """Returns the spans of the module's large tensors that are views of mapped files, without the tensors whose ids are
    `excluded`."""
    tensors = (tensor for tensor in (*module.parameters(), *module.buffers()) if id(tensor) not in excluded)
    spans = (span_of(tensor) for tensor in tensors if tensor.nbytes >= MIN_STREAMED_BYTES)
    return join_spans(span for span in spans if span is not None)


def _advise_chosen(spans: Sequence[Sequence[Span]], module: nn.Module, args: tuple[Any, ...]) -> None:
    """Starts to read the weights of the experts that the router chose: `args` are those of `Experts.forward`."""
    for expert in args[1].unique().tolist():
        for span in spans[expert]:
            span.advise()


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
