"""A model's output before and after: a few held-out prompts, continued by both models with the same random numbers.

With the likeliest token every time a small model repeats itself without end. So tokens are drawn, by the Gumbel-max
trick: both models add the same noise to their logits, and draw the same token unless FP8 has changed which sum is
largest. The prompt of a chat ends where its first answer begins.

"After" is the written directory, read back. All prompts run together, with one token each per pass; keys and values are
kept as in serving, in FP8 where the directory has scales for them. A pass reads all weights: a model larger than memory
would be read from its file a hundred times, so nothing is generated for such a model.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path

import torch
from torch import Tensor

from fp8serve.calibration.data import IGNORED, Batch
from fp8serve.calibration.options import CalibrationOptions
from fp8serve.calibration.progress import Stages
from fp8serve.calibration.result import GeneratedReport
from fp8serve.model.building import Model
from fp8serve.model.checkpoint import kv_scales, load_servable
from fp8serve.model.network.decoder import rotated
from fp8serve.model.network.rotary import Attend
from fp8serve.model.storage.memory import free_memory
from fp8serve.model.text.tokenizer import Tokenizer

TOKENS = 48  # that are generated
PROMPT = 24  # the most tokens of a text's beginning; a short sample gives half of its tokens
QUESTION = 256  # the most tokens of what stands before the first answer of a chat
TEMPERATURE = 0.7
TOO_LARGE = "No text was generated for the report: the weights are larger than the free memory."
BLOCK = 16  # tokens in a block of the cache

_paged_attention = torch.ops.fp8serve.paged_attention.default
_write_kv = torch.ops.fp8serve.write_kv.default
KVScales = Mapping[int, tuple[Tensor, Tensor]]  # by layer, the quantizing scales of k and v, FP32 []


Generated = tuple[tuple[GeneratedReport, ...], tuple[str, ...]]  # the texts, and notes


def before_and_after(
    decoder: Model, batches: Sequence[Batch], settings: CalibrationOptions, stages: Stages, folder: Path
) -> Generated:
    """The continuations by `decoder` and by the FP8 model in `folder` of the beginnings of the first samples of
    `batches`."""
    if not settings.generated_samples:
        return (), ()
    if not _fits(decoder):
        return (), (TOO_LARGE,)
    with stages.stage("generate"):
        prompts, tokenizer = list(islice(_prompts(batches), settings.generated_samples)), Tokenizer.from_dir(folder)
        before = continued(decoder, prompts)
        after = continued(load_servable(folder, device=settings.device), prompts, kv_scales(folder))
        return tuple(_report(tokenizer, *texts) for texts in zip(prompts, before, after, strict=True)), ()


def _fits(decoder: Model) -> bool:
    """Whether the weights, and half as much again for FP8, fit in free memory."""
    return sum(parameter.nbytes for parameter in decoder.parameters()) * 3 // 2 <= free_memory()


def _prompts(batches: Sequence[Batch]) -> Iterator[list[int]]:
    for batch in batches:
        for ids, targets in zip(
            *(torch.split(part, batch.lengths) for part in (batch.ids, batch.targets)), strict=True
        ):
            question = int((targets != IGNORED).int().argmax()) + 1  # tokens before the first that is scored
            yield ids[: question if 1 < question <= QUESTION else min(PROMPT, len(ids) // 2)].tolist()


@torch.no_grad()
def continued(
    decoder: Model,
    prompts: Sequence[Sequence[int]],
    scales: KVScales | None = None,
    tokens: int = TOKENS,
    temperature: float = TEMPERATURE,
) -> list[list[int]]:
    """At most `tokens` tokens after each prompt of at least one token, fewer where the context ends; drawn with random
    numbers that depend on the prompt only. temperature: 0 takes the likeliest token. scales: of an FP8 cache for keys
    and values.
    """
    tokens = min(tokens, decoder.config.max_position_embeddings - max(map(len, prompts)))
    device = decoder.embedding.weight.device
    cache = _Cache(decoder, [len(p) + tokens for p in prompts], device, scales or {})
    ids, columns = torch.tensor([i for p in prompts for i in p], device=device), list[list[int]]()
    new = [len(p) for p in prompts]
    generators = [torch.Generator().manual_seed(zlib.crc32(repr(list(p)).encode())) for p in prompts]
    for _ in range(tokens):
        last = torch.tensor(new, device=device).cumsum(0) - 1
        logits = decoder.logits(decoder(ids, *cache.extended(new), last)).float()
        ids, new = (logits + temperature * _gumbel(logits, generators)).argmax(-1), [1] * len(prompts)
        columns.append(ids.tolist())
    return [list(column) for column in zip(*columns, strict=True)]


def _gumbel(logits: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Gumbel noise of the shape of `logits`, FP32 [prompts, vocabulary]; a row from each generator, on any device the
    same."""
    rows = [torch.empty(logits.shape[-1]).exponential_(generator=generator) for generator in generators]
    return -torch.stack(rows).clamp_min(1e-10).log().to(logits.device)  # 0 would win against everything


class _Cache:
    """Keys and values of sequences that grow to at most `rooms` tokens."""

    def __init__(self, decoder: Model, rooms: Sequence[int], device: torch.device, scales: KVScales) -> None:
        config = decoder.config
        per_sequence = -(-max(rooms) // BLOCK)
        blocks = per_sequence * len(rooms)
        self._decoder, self._device = decoder, device
        self._scales = {layer: (k.to(device), v.to(device)) for layer, (k, v) in scales.items()}
        self._tables = torch.arange(blocks, dtype=torch.int32, device=device).view(len(rooms), per_sequence)
        self._starts = [i * per_sequence * BLOCK for i in range(len(rooms))]  # slots of the first tokens
        self._lengths = [0] * len(rooms)
        shape = 2, blocks, BLOCK, config.num_kv_heads, config.head_dim
        dtype = torch.float8_e4m3fn if scales else torch.bfloat16
        self._layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]

    def extended(self, new: Sequence[int]) -> tuple[Tensor, Attend]:
        """(positions, attention) of the next tokens, `new` of each sequence."""
        before = self._lengths
        self._lengths = [old + more for old, more in zip(before, new, strict=True)]
        positions = [range(old, length) for old, length in zip(before, self._lengths, strict=True)]
        slots = self._tensor([start + p for start, row in zip(self._starts, positions, strict=True) for p in row])
        lengths = self._tensor(self._lengths).int()
        queries = torch.nn.functional.pad(self._tensor(new).cumsum(0), (1, 0)).int()

        def mix(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._layers[layer]
            scales = self._scales.get(layer, (None, None))
            _write_kv(k, v, keys, values, slots, *scales)
            inverse = (None if s is None else s.reciprocal() for s in scales)
            options = self._decoder.attention_options(layer)
            return _paged_attention(q, keys, values, self._tables, lengths, queries, *inverse, *options)  # type: ignore[no-any-return]

        return self._tensor([p for row in positions for p in row]), rotated(mix)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _report(tokenizer: Tokenizer, prompt: list[int], before: list[int], after: list[int]) -> GeneratedReport:
    requested = len(before)
    before, after = (list(takewhile(lambda i: i not in tokenizer.eos_ids, ids)) for ids in (before, after))
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
    beginning = tokenizer.decode(prompt)
    texts = [tokenizer.decode(prompt + ids).removeprefix(beginning) for ids in (before, after)]
    whole = tokenizer.decode(prompt, skip_special_tokens=False)  # a chat without its marks reads like one text
    return GeneratedReport(whole, texts[0], texts[1], requested, same)
