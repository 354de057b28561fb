"""Generates text for the report: both models continue a few held-out prompts with the same random numbers.

Greedy decoding makes a small model repeat itself without end. So tokens are sampled with the Gumbel-max trick: both
models add the same noise to their logits, and sample the same token unless FP8 changes which sum is largest. The prompt
of a chat ends where its first answer begins.

The model after calibration is read from the written directory. All prompts run together, with one token of each prompt
per pass. The keys and values are cached as in serving, in FP8 if the directory has scales for the KV cache. Every pass
reads all weights. A model larger than memory would be read from its file a hundred times, so no text is generated for
such a model.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path

import torch
from torch import Tensor

from fp8serve.calibration.data import IGNORE_INDEX, Batch
from fp8serve.calibration.options import CalibrationOptions
from fp8serve.calibration.progress import Stages
from fp8serve.calibration.result import GeneratedReport
from fp8serve.model.building import Model
from fp8serve.model.checkpoint import kv_scales, load_servable
from fp8serve.model.network.decoder import make_attend
from fp8serve.model.network.rotary import Attend
from fp8serve.model.storage.memory import free_memory
from fp8serve.model.text.tokenizer import Tokenizer

NEW_TOKENS = 48  # generated for each prompt
MAX_PROMPT_TOKENS = 24  # of a text; the prompt of a short sample is half of its tokens
MAX_CHAT_PROMPT_TOKENS = 256  # before the first answer of a chat
TEMPERATURE = 0.7
TOO_LARGE = "No text was generated for the report: the weights are larger than the free memory."
BLOCK = 16  # tokens in a block of the cache

_paged_attention = torch.ops.fp8serve.paged_attention.default
_write_kv = torch.ops.fp8serve.write_kv.default
KVScales = Mapping[int, tuple[Tensor, Tensor]]  # layer -> scales that quantize keys and values, FP32 []
Generated = tuple[tuple[GeneratedReport, ...], tuple[str, ...]]  # (texts, notes)


def generate_samples(
    decoder: Model, batches: Sequence[Batch], settings: CalibrationOptions, stages: Stages, folder: Path
) -> Generated:
    """Continues prompts from `batches` with `decoder` and with the FP8 model in `folder`."""
    if not settings.generated_samples:
        return (), ()
    bf16_bytes = sum(parameter.nbytes for parameter in decoder.parameters())
    if bf16_bytes * 3 // 2 > free_memory():  # FP8 takes half as much
        return (), (TOO_LARGE,)
    with stages.stage("generate"):
        prompts, tokenizer = list(islice(_prompts(batches), settings.generated_samples)), Tokenizer.from_dir(folder)
        before = generate_continuations(decoder, prompts)
        after = generate_continuations(load_servable(folder, device=settings.device), prompts, kv_scales(folder))
        return tuple(_report(tokenizer, *texts) for texts in zip(prompts, before, after, strict=True)), ()


def _prompts(batches: Sequence[Batch]) -> Iterator[list[int]]:
    for batch in batches:
        for ids, targets in zip(
            *(torch.split(part, batch.lengths) for part in (batch.ids, batch.targets)), strict=True
        ):
            length = int((targets != IGNORE_INDEX).int().argmax()) + 1  # of a chat's prompt, which is not scored
            is_chat = 1 < length <= MAX_CHAT_PROMPT_TOKENS
            yield ids[: length if is_chat else min(MAX_PROMPT_TOKENS, len(ids) // 2)].tolist()


@torch.no_grad()
def generate_continuations(
    decoder: Model,
    prompts: Sequence[Sequence[int]],
    scales: KVScales | None = None,
    tokens: int = NEW_TOKENS,
    temperature: float = TEMPERATURE,
) -> list[list[int]]:
    """Samples at most `tokens` tokens after each prompt, fewer if the context of the model ends.

    The random numbers depend only on the prompt. Temperature 0 is greedy decoding. `scales` are the scales of an FP8 KV
    cache; if they are None, the cache is in BF16. A prompt has at least one token.
    """
    tokens = min(tokens, decoder.config.max_position_embeddings - max(map(len, prompts)))
    device = decoder.embedding.weight.device
    cache = _Cache(decoder, [len(p) + tokens for p in prompts], device, scales or {})
    ids, columns = torch.tensor([i for p in prompts for i in p], device=device), list[list[int]]()
    new = [len(p) for p in prompts]
    generators = [torch.Generator().manual_seed(zlib.crc32(repr(list(p)).encode())) for p in prompts]
    for _ in range(tokens):
        last_rows = torch.tensor(new, device=device).cumsum(0) - 1
        logits = decoder.logits(decoder(ids, *cache.append(new), last_rows)).float()
        ids, new = (logits + temperature * _gumbel(logits, generators)).argmax(-1), [1] * len(prompts)
        columns.append(ids.tolist())
    return [list(column) for column in zip(*columns, strict=True)]


def _gumbel(logits: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Returns Gumbel noise, FP32 [prompts, vocabulary], with one row from each generator; equal on all devices."""
    rows = [torch.empty(logits.shape[-1]).exponential_(generator=generator) for generator in generators]
    return -torch.stack(rows).clamp_min(1e-10).log().to(logits.device)  # log(0) would be infinite


class _Cache:
    """A paged KV cache of sequences with at most `max_lengths` tokens."""

    def __init__(self, decoder: Model, max_lengths: Sequence[int], device: torch.device, scales: KVScales) -> None:
        config = decoder.config
        per_sequence = -(-max(max_lengths) // BLOCK)
        blocks = per_sequence * len(max_lengths)
        self._decoder, self._device = decoder, device
        self._scales = {layer: (k.to(device), v.to(device)) for layer, (k, v) in scales.items()}
        self._tables = torch.arange(blocks, dtype=torch.int32, device=device).view(len(max_lengths), per_sequence)
        self._first_slots = [i * per_sequence * BLOCK for i in range(len(max_lengths))]
        self._lengths = [0] * len(max_lengths)
        shape = 2, blocks, BLOCK, config.num_kv_heads, config.head_dim
        dtype = torch.float8_e4m3fn if scales else torch.bfloat16
        self._layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]

    def append(self, new: Sequence[int]) -> tuple[Tensor, Attend]:
        """Reserves slots for `new` tokens of each sequence; returns their positions and their attention function."""
        old_lengths = self._lengths
        self._lengths = [old + more for old, more in zip(old_lengths, new, strict=True)]
        positions = [range(old, length) for old, length in zip(old_lengths, self._lengths, strict=True)]
        slots = self._tensor([s + p for s, row in zip(self._first_slots, positions, strict=True) for p in row])
        lengths = self._tensor(self._lengths).int()
        queries = torch.nn.functional.pad(self._tensor(new).cumsum(0), (1, 0)).int()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._layers[layer]
            scales = self._scales.get(layer, (None, None))
            _write_kv(k, v, keys, values, slots, *scales)
            scales_inv = (None if s is None else s.reciprocal() for s in scales)
            options = self._decoder.attention_options(layer)
            return _paged_attention(q, keys, values, self._tables, lengths, queries, *scales_inv, *options)  # type: ignore[no-any-return]

        return self._tensor([p for row in positions for p in row]), make_attend(attend)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _report(tokenizer: Tokenizer, prompt: list[int], before: list[int], after: list[int]) -> GeneratedReport:
    requested = len(before)
    before, after = (list(takewhile(lambda i: i not in tokenizer.eos_ids, ids)) for ids in (before, after))
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
    prompt_text = tokenizer.decode(prompt)
    texts = [tokenizer.decode(prompt + ids).removeprefix(prompt_text) for ids in (before, after)]
    shown_prompt = tokenizer.decode(prompt, skip_special_tokens=False)  # special tokens separate a chat's messages
    return GeneratedReport(shown_prompt, texts[0], texts[1], requested, same)
