"""Samples the next token of every sequence of a batch from its logits. No sequence affects another.

    penalties, logit bias -> banned tokens (bad words, min_tokens, grammar) -> temperature
    -> top_k, top_p, min_p -> one sample

The op `sample` (fp8/ops/sampling.py) evaluates the inverse of the cumulative distribution at a uniform number. This
number is a hash of the request's seed and the position of the token, so there is no generator whose state could depend
on other requests, on the order of arrival or on preemption. Every operation here is exact or works on each row alone.

Each feature that a request uses takes a few passes over [rows, vocab]. A step of 8 rows of 32,000 logits takes, with
one thread, 0.2 ms if it is greedy, 0.5 ms with a temperature and 0.8 ms with filters. On a GPU, only `_to_host` waits
for the device, in one copy. Inputs are copied to the device from pinned memory (`step.to_device`), and the device
itself checks whether the logits are finite.
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
    from fp8serve.engine.grammar import Mask  # only as a type, because the tests on a GPU have no llguidance

EARLY_END_LOGIT = -1e30
"""The logit of a token that would end the text before min_tokens. It is finite, so such a token is sampled if bad words
ban all other tokens."""
_keep_allowed = torch.ops.fp8serve.keep_allowed.default
_sample = torch.ops.fp8serve.sample.default


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampled token of one sequence, or None if its logits were not finite."""

    token_id: int | None
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class _TopLogprobs:
    """The log-probabilities of the rows that requested them, and the best of each row in descending order."""

    rows: list[int]
    index: Tensor  # int64 [rows]: `rows` on the device
    logprobs: Tensor  # FP32 [rows, vocab]
    top_values: Tensor  # FP32 [rows, MAX_LOGPROBS]
    top_ids: Tensor  # int64 [rows, MAX_LOGPROBS]


@torch.inference_mode()
def sample(logits: Tensor, seqs: list[Sequence], eos_ids: tuple[int, ...], mask: "Mask | None" = None) -> list[Sampled]:
    """Samples one token for each sequence from its logits, FP32 [sequences, vocab]. `mask` covers the sequences that
    have a grammar. Overwrites `logits`."""
    is_finite = logits.amax(-1).isfinite()
    if _waits_for_device(is_finite) or not is_finite.all():
        logits.masked_fill_(~is_finite[:, None], 0.0)
    top = _top_logprobs(logits, seqs)
    _apply_penalties(logits, seqs)
    _apply_logit_bias(logits, seqs)
    _ban_bad_words(logits, seqs)
    _ban_early_end(logits, seqs, eos_ids)
    if mask is not None:
        _apply_grammar(logits, mask)
    tokens = logits.argmax(-1)
    if rows := _rows_where(seqs, lambda params: not params.is_greedy):
        index = to_device(rows, torch.long, logits.device)
        selected = logits if len(rows) == len(seqs) else logits[index]
        tokens[index] = _sample_rows(selected, [seqs[row] for row in rows])
    return _to_host(tokens, is_finite, top, seqs)


def _waits_for_device(x: Tensor) -> bool:
    """Returns whether reading the tensor from Python would wait for a device."""
    return x.is_cuda


def uniform(seed: int, position: int) -> float:
    """Returns the number in [0, 1) from which the token at `position` is sampled; the first generated token has
    position 0."""
    digest = blake2b(seed.to_bytes(8, "little") + position.to_bytes(8, "little"), digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


def _rows_where(seqs: list[Sequence], predicate: Callable[[SamplingParams], bool]) -> list[int]:
    return list(compress(range(len(seqs)), [predicate(seq.params) for seq in seqs]))


def _column(logits: Tensor, values: list[float]) -> Tensor:
    """Returns the values as a column [rows, 1] with the dtype and device of `logits`."""
    return to_device(values, logits.dtype, logits.device)[:, None]


def _apply_penalties(logits: Tensor, seqs: list[Sequence]) -> None:
    """Applies the repetition, frequency and presence penalties in place, to the logits of previous tokens only."""
    pairs = [(row, *pair) for row in _rows_where(seqs, _has_penalty) for pair in _token_counts(seqs[row])]
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


def _token_counts(seq: Sequence) -> list[tuple[int, int]]:
    """Returns every distinct token of the sequence and how often it was generated."""
    generated = Counter(seq.token_ids[seq.num_prompt :])
    return [(token, generated[token]) for token in dict.fromkeys(seq.token_ids)]


def _has_penalty(params: SamplingParams) -> bool:
    return (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)


def _apply_logit_bias(logits: Tensor, seqs: list[Sequence]) -> None:
    """Adds the biases of `logit_bias`, which has each token of a request once."""
    triples = [(row, *pair) for row, seq in enumerate(seqs) for pair in seq.params.logit_bias]
    if triples:
        rows, tokens, values = zip(*triples, strict=True)
        index = to_device(rows, torch.long, logits.device), to_device(tokens, torch.long, logits.device)
        logits[index] += to_device(values, logits.dtype, logits.device)


def _ban_early_end(logits: Tensor, seqs: list[Sequence], eos_ids: tuple[int, ...]) -> None:
    """Bans the tokens that would end the text, while fewer than `min_tokens` are generated."""
    pairs: list[tuple[int, int]] = []
    for row, seq in enumerate(seqs):
        if seq.num_generated < seq.params.min_tokens:
            stop_ids = seq.params.stop_token_ids + (() if seq.params.ignore_eos else eos_ids)
            pairs += [(row, token) for token in stop_ids]
    if pairs:
        rows, tokens = (to_device(column, torch.long, logits.device) for column in zip(*pairs, strict=True))
        logits[rows, tokens] = to_device(EARLY_END_LOGIT, logits.dtype, logits.device)


def _ban_bad_words(logits: Tensor, seqs: list[Sequence]) -> None:
    """Bans the tokens that would complete a bad word."""
    for row, seq in enumerate(seqs):
        if seq.ban is not None:
            logits[row].index_fill_(0, to_device(seq.ban.tokens(), torch.long, logits.device), -torch.inf)


def _apply_grammar(logits: Tensor, mask: "Mask") -> None:
    """Bans the tokens that the grammars of requests do not allow."""
    allowed = to_device(mask.allowed(), torch.int32, logits.device)
    _keep_allowed(logits, to_device(mask.rows, torch.long, logits.device), allowed)


def _sample_rows(logits: Tensor, seqs: list[Sequence]) -> Tensor:
    """Samples one token for each row, with its temperature and filters."""
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


def _top_logprobs(logits: Tensor, seqs: list[Sequence]) -> _TopLogprobs | None:
    """Returns the log-probabilities of the rows that requested them, or None if no row did. Call it before penalties
    are applied to `logits`."""
    rows = _rows_where(seqs, lambda params: params.logprobs is not None)
    if not rows:
        return None
    index = to_device(rows, torch.long, logits.device)
    logprobs = torch.log_softmax(logits[index], -1)
    # The same k for every batch: topk's choice among equal values may depend on k, and so on other requests.
    top = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[-1]), -1)
    return _TopLogprobs(rows, index, logprobs, top.values, top.indices)


def _to_host(tokens: Tensor, is_finite: Tensor, top: _TopLogprobs | None, seqs: list[Sequence]) -> list[Sampled]:
    """Copies the results from the device in one transfer, packed as int64. A step waits for the device only here."""
    parts = [tokens, is_finite.long()]
    if top is not None:
        sampled = top.logprobs.gather(1, tokens[top.index][:, None])
        parts += [x.double().view(torch.long).flatten() for x in (sampled, top.top_values)] + [top.top_ids.flatten()]
    columns = torch.cat(parts).cpu().split_with_sizes([len(part) for part in parts])
    logprobs = {} if top is None else _unpack_logprobs(top.rows, columns[0].tolist(), columns[2:], seqs)
    pairs = zip(columns[0].tolist(), columns[1].tolist(), strict=True)
    return [Sampled(token, logprobs.get(row)) if finite else Sampled(None) for row, (token, finite) in enumerate(pairs)]


def _unpack_logprobs(
    rows: list[int], tokens: list[int], parts: tuple[Tensor, ...], seqs: list[Sequence]
) -> dict[int, TokenLogprob]:
    """Returns the log-probabilities of each row from the last three parts that `_to_host` packed."""
    sampled, top_values = (part.view(torch.double).view(len(rows), -1).tolist() for part in parts[:2])
    top_ids = parts[2].view(len(rows), -1).tolist()
    result = {}
    for row, (logprob,), values, ids in zip(rows, sampled, top_values, top_ids, strict=True):
        result[row] = TokenLogprob.ranked(tokens[row], logprob, ids, values, seqs[row].params.logprobs or 0)
    return result
