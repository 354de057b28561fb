"""Logits become tokens, all sequences of a batch at once, none affecting another.

    penalties, biases -> forbidden tokens (an early end; bad words; another form) -> temperature
    -> top_k, top_p, min_p -> one draw

A draw (the op `sample`, fp8/ops/sampling.py) is the inverse of the cumulative distribution at one uniform number, and
that number is a hash of the request's seed and of how many tokens it has generated. No generator is advanced, so
neither neighbours, nor the order of arrival, nor being preempted and computed again changes what is drawn. Every
operation here is exact or works on a row alone.

Cost: a few passes over [rows, vocab] for each feature that a row asked for. A step of 8 rows of 32,000, one thread: 0.2
ms greedy, 0.5 with a temperature, 0.8 with filters. On a GPU only `_read` waits for the device; it brings
everything back in one copy. Data for the device go through pinned memory (`step.to_device`). Whether a row of
logits is finite is decided on the device.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import compress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8serve.engine.output import TokenLogprob
from fp8serve.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from fp8serve.engine.sequence import Sequence
from fp8serve.engine.step import to_device
from fp8serve.fp8 import ops as ops  # registers the op called below

if TYPE_CHECKING:
    from fp8serve.engine.grammar import Mask  # which needs a library that the GPU's tests do not

TOO_EARLY = -1e30
"""The logit of an end that would come too early: it is taken only if bad words leave nothing else."""
_keep_allowed = torch.ops.fp8serve.keep_allowed.default
_sample = torch.ops.fp8serve.sample.default


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sequence's new token; None when its logits were not finite."""

    token_id: int | None
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class _Ranked:
    """Log-probabilities of the `rows` that asked for them, and the best of each, in descending order."""

    rows: list[int]
    index: Tensor  # int64, the rows
    table: Tensor  # FP32 [rows, vocab]
    values: Tensor  # FP32 [rows, best]
    ids: Tensor  # int64 [rows, best]


@torch.inference_mode()
def sample(logits: Tensor, seqs: list[Sequence], eos_ids: tuple[int, ...], mask: "Mask | None" = None) -> list[Sampled]:
    """FP32 logits [sequences, vocab] -> one token for each sequence; `mask` covers those that have a form. `logits` is
    overwritten.
    """
    finite = logits.amax(-1).isfinite()
    if not _is_cheap_to_read(finite) or not finite.all():
        logits.masked_fill_(~finite[:, None], 0.0)
    ranked = _ranked(logits, seqs)
    _penalise(logits, seqs)
    _bias(logits, seqs)
    _forbid_bad_words(logits, seqs)
    _forbid_the_end(logits, seqs, eos_ids)
    if mask is not None:
        _forbid_other_forms(logits, mask)
    tokens = logits.argmax(-1)
    if rows := _rows(seqs, lambda params: not params.greedy):
        index = to_device(rows, torch.long, logits.device)
        chosen = logits if len(rows) == len(seqs) else logits[index]
        tokens[index] = _draw(chosen, [seqs[row] for row in rows])
    return _read(tokens, finite, ranked, seqs)


def _is_cheap_to_read(x: Tensor) -> bool:
    """Whether reading the tensor does not have to wait for a device."""
    return not x.is_cuda


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) for the token at `position` (0 is the first generated) of a request with this seed."""
    digest = blake2b(seed.to_bytes(8, "little") + position.to_bytes(8, "little"), digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


def _rows(seqs: list[Sequence], predicate: Callable[[SamplingParams], bool]) -> list[int]:
    return list(compress(range(len(seqs)), [predicate(seq.params) for seq in seqs]))


def _column(logits: Tensor, values: list[float]) -> Tensor:
    """[rows, 1], in the dtype and on the device of `logits`."""
    return to_device(values, logits.dtype, logits.device)[:, None]


def _penalise(logits: Tensor, seqs: list[Sequence]) -> None:
    """Repetition (divides or multiplies what was seen), frequency (per occurrence) and presence penalties, in place.

    Works on pairs (row, token seen) only, each once.
    """
    pairs = [(row, *pair) for row in _rows(seqs, _has_penalty) for pair in _seen(seqs[row])]
    if not pairs:
        return
    rows, tokens, counts = (to_device(column, torch.long, logits.device) for column in zip(*pairs, strict=True))
    params = [seq.params for seq in seqs]
    repetition = _column(logits, [p.repetition_penalty for p in params])[rows, 0]
    frequency = _column(logits, [p.frequency_penalty for p in params])[rows, 0]
    presence = _column(logits, [p.presence_penalty for p in params])[rows, 0]
    values = logits[rows, tokens]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[rows, tokens] = values - counts * frequency - (counts > 0) * presence


def _seen(seq: Sequence) -> list[tuple[int, int]]:
    """Every token of prompt and answer, and how often the answer has it."""
    generated = Counter(seq.token_ids[seq.num_prompt :])
    return [(token, generated[token]) for token in dict.fromkeys(seq.token_ids)]


def _has_penalty(params: SamplingParams) -> bool:
    return (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)


def _bias(logits: Tensor, seqs: list[Sequence]) -> None:
    """Adds the biases that requests give to the logits of some tokens; a request names each token once."""
    triples = [(row, *pair) for row, seq in enumerate(seqs) for pair in seq.params.logit_bias]
    if triples:
        rows, tokens, values = zip(*triples, strict=True)
        place = to_device(rows, torch.long, logits.device), to_device(tokens, torch.long, logits.device)
        logits[place] += to_device(values, logits.dtype, logits.device)


def _forbid_the_end(logits: Tensor, seqs: list[Sequence], eos_ids: tuple[int, ...]) -> None:
    """Forbids the tokens that would end the text, while fewer than `min_tokens` are generated."""
    pairs: list[tuple[int, int]] = []
    for row, seq in enumerate(seqs):
        if seq.num_generated < seq.params.min_tokens:
            ends = seq.params.stop_token_ids + (() if seq.params.ignore_eos else eos_ids)
            pairs += [(row, token) for token in ends]
    if pairs:
        rows, tokens = (to_device(column, torch.long, logits.device) for column in zip(*pairs, strict=True))
        logits[rows, tokens] = to_device(TOO_EARLY, logits.dtype, logits.device)


def _forbid_bad_words(logits: Tensor, seqs: list[Sequence]) -> None:
    """Forbids the tokens that would complete a bad word."""
    for row, seq in enumerate(seqs):
        if seq.ban is not None:
            logits[row].index_fill_(0, to_device(seq.ban.tokens(), torch.long, logits.device), -torch.inf)


def _forbid_other_forms(logits: Tensor, mask: "Mask") -> None:
    """Allows only the tokens that the grammar allows, where a request has one."""
    allowed = to_device(mask.allowed(), torch.int32, logits.device)
    _keep_allowed(logits, to_device(mask.rows, torch.long, logits.device), allowed)


def _draw(logits: Tensor, seqs: list[Sequence]) -> Tensor:
    """One token for each row, after its temperature and filters."""
    params = [seq.params for seq in seqs]

    def column(values: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
        return to_device(values, dtype, logits.device)

    return _sample(  # type: ignore[no-any-return]
        logits,
        column([p.temperature for p in params]),
        column([p.top_k for p in params], torch.int64),
        column([p.top_p for p in params]),
        column([p.min_p for p in params]),
        column([uniform(seq.seed, seq.num_generated) for seq in seqs]),
    )


def _ranked(logits: Tensor, seqs: list[Sequence]) -> _Ranked | None:
    """Taken before `logits` is overwritten."""
    rows = _rows(seqs, lambda params: params.logprobs is not None)
    if not rows:
        return None
    index = to_device(rows, torch.long, logits.device)
    table = torch.log_softmax(logits[index], -1)
    # always the same number: which of several equal values topk returns must not depend on the neighbours' requests
    best = table.topk(min(MAX_LOGPROBS, table.shape[-1]), -1)
    return _Ranked(rows, index, table, best.values, best.indices)


def _read(tokens: Tensor, finite: Tensor, ranked: _Ranked | None, seqs: list[Sequence]) -> list[Sampled]:
    """Reads everything needed from the device in one copy: the step waits here, and nowhere else."""
    parts = [tokens, finite.long()]
    if ranked is not None:
        chosen = ranked.table.gather(1, tokens[ranked.index][:, None])
        parts += [x.double().view(torch.long).flatten() for x in (chosen, ranked.values)] + [ranked.ids.flatten()]
    columns = torch.cat(parts).cpu().split_with_sizes([len(part) for part in parts])
    logprobs = {} if ranked is None else _by_row(ranked.rows, columns[0].tolist(), columns[2:], seqs)
    pairs = zip(columns[0].tolist(), columns[1].tolist(), strict=True)
    return [Sampled(token, logprobs.get(row)) if good else Sampled(None) for row, (token, good) in enumerate(pairs)]


def _by_row(
    rows: list[int], tokens: list[int], parts: tuple[Tensor, ...], seqs: list[Sequence]
) -> dict[int, TokenLogprob]:
    """parts: what `_read` packed for these rows."""
    chosen, values = (part.view(torch.double).view(len(rows), -1).tolist() for part in parts[:2])
    ids = parts[2].view(len(rows), -1).tolist()
    result = {}
    for row, (value,), tops, names in zip(rows, chosen, values, ids, strict=True):
        result[row] = TokenLogprob.ranked(tokens[row], value, names, tops, seqs[row].params.logprobs or 0)
    return result
