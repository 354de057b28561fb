"""Samples the next token of every sequence of a batch from its logits. No sequence affects another.

    penalties, logit bias -> banned tokens (bad words, min_tokens, grammar) -> temperature
    -> top_k, top_p, min_p -> one sample

The op `sample` (fp8/ops/sampling.py) evaluates the inverse of the cumulative distribution at a uniform number. This
number is a hash of the request's seed and the position of the token, so there is no generator whose state could depend
on other requests, on the order of arrival or on preemption. Every operation here is exact or works on each row alone.

Each feature that a request uses takes a few passes over [rows, vocab]. A step of 8 rows of 32,000 logits takes, with
one thread, 0.2 ms if it is greedy, 0.5 ms with a temperature and 0.8 ms with filters.

`launch_sampling` does not wait for a GPU, and `Samples.read` waits for one copy. Inputs are copied to the device from
pinned memory (`step.to_device`), and the device itself checks whether the logits are finite. A decoding step mostly
samples the same sequences as the step before, so everything that depends only on their parameters is in a
`SamplingPlan`, which the engine keeps until the sequences change.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8serve.engine.flights import HostCopy
from fp8serve.engine.output import TokenLogprob
from fp8serve.engine.sampling_params import MAX_LOGPROBS
from fp8serve.engine.sequence import Sequence, Status
from fp8serve.engine.step import to_device
from fp8serve.fp8 import ops as ops  # registers the ops called below
from fp8serve.fp8.batch_invariant import log_softmax

if TYPE_CHECKING:
    from fp8serve.engine.grammar import Mask  # only as a type, because the tests on a GPU have no llguidance

EARLY_END_LOGIT = -1e30
"""The logit of a token that would end the text before min_tokens. It is finite, so such a token is sampled if bad words
ban all other tokens."""
_greedy_tokens = torch.ops.fp8serve.greedy_tokens.default
_keep_allowed = torch.ops.fp8serve.keep_allowed.default
_sample = torch.ops.fp8serve.sample.default


NOT_FINITE = -1  # instead of a token, if the logits of a row are not finite


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampled token of one sequence, or None if its logits were not finite."""

    token_id: int | None
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class _TopLogprobs:
    """The log-probabilities of the rows that requested them, and the best of each row in descending order."""

    logprobs: Tensor  # FP32 [rows, vocab]
    top_values: Tensor  # FP32 [rows, MAX_LOGPROBS]
    top_ids: Tensor  # int64 [rows, MAX_LOGPROBS]


_SAMPLING_STEPS: dict[str, Callable[[Sequence], bool]] = {
    "sampled": lambda seq: not seq.params.is_greedy,
    "logprobs": lambda seq: seq.params.logprobs is not None,
    "penalized": lambda seq: seq.params.has_penalty,
    "biased": lambda seq: bool(seq.params.logit_bias),
    "min_tokens": lambda seq: seq.params.min_tokens > 0,
    "banned": lambda seq: seq.ban is not None,
    "grammar": lambda seq: seq.matcher is not None,
}
"""The operations that not every row needs, and which sequences need them. They are looked up once for each sequence,
because a new plan is made whenever a sequence starts or ends, which is in most steps of a busy server."""


class SamplingPlan:
    """The rows of a batch that need each operation, with parameters of the sequences as tensors on the device."""

    sampled_rows: Tensor  # int64; this and the next three attributes exist only if some row needs them
    logprob_rows: Tensor
    seed_hashes: tuple[blake2b, ...]  # of the sampled rows
    filters: tuple[Tensor, ...]  # temperature, top_k, top_p and min_p of the sampled rows

    def __init__(self, seqs: list[Sequence], device: torch.device) -> None:
        rows: dict[str, list[int]] = {name: [] for name in _SAMPLING_STEPS}
        for row, seq in enumerate(seqs):
            if seq.sampling is None:
                names = tuple(name for name, applies in _SAMPLING_STEPS.items() if applies(seq))
                params = seq.params
                filters = params.temperature, params.top_k, params.top_p, params.min_p
                seq.sampling = names, _seed_hash(seq.seed), filters
            for name in seq.sampling[0]:
                rows[name].append(row)
        self.seqs = seqs
        self.sampled, self.logprobs, self.penalized = rows["sampled"], rows["logprobs"], rows["penalized"]
        self.biased, self.min_tokens, self.banned = rows["biased"], rows["min_tokens"], rows["banned"]
        self.has_grammar = bool(rows["grammar"])
        # whether the next tokens cannot be sampled before the values of all previous tokens are known
        self.depends_on_tokens = bool(self.has_grammar or self.banned or self.penalized)
        self.is_plain = not (self.logprobs or self.penalized or self.biased or self.min_tokens or self.banned)
        if self.logprobs:
            self.logprob_rows = to_device(self.logprobs, torch.long, device)
        if self.sampled:
            _, self.seed_hashes, filters = zip(*[seqs[row].sampling for row in self.sampled], strict=True)
            self.sampled_rows = to_device(self.sampled, torch.long, device)
            columns = np.array(filters, np.float64).T
            temperature, top_k, top_p, min_p = to_device(np.ascontiguousarray(columns), torch.float64, device)
            self.filters = temperature, top_k.long(), top_p, min_p


class Samples:
    """The sampled tokens of a step, which are being copied to the host."""

    def __init__(self, tokens: Tensor, top: _TopLogprobs | None, plan: SamplingPlan) -> None:
        self.tokens = tokens  # int64 [rows], on the device
        self._seqs, self._logprob_rows = plan.seqs, plan.logprobs
        parts = [tokens]
        if top is not None:
            sampled = top.logprobs.gather(1, tokens[plan.logprob_rows][:, None].clamp(min=0))
            parts += [x.double().view(torch.long).flatten() for x in (sampled, top.top_values)]
            parts.append(top.top_ids.flatten())
        self._sizes = [len(part) for part in parts]
        self._copy = HostCopy(tokens if top is None else torch.cat(parts))

    def read(self) -> tuple[list[int], Mapping[int, TokenLogprob]]:
        """Waits for the copy. Returns the token of each row, or NOT_FINITE, and the requested log-probabilities by
        row."""
        tokens, *rest = self._copy.read().split_with_sizes(self._sizes)
        ids = tokens.tolist()
        return ids, _unpack_logprobs(self._logprob_rows, ids, rest, self._seqs) if rest else {}


@torch.inference_mode()
def launch_sampling(
    logits: Tensor, plan: SamplingPlan, eos_ids: tuple[int, ...], mask: "Mask | None" = None
) -> Samples:
    """Samples one token for each sequence of the plan from its logits, FP32 [sequences, vocab]. `mask` covers the
    sequences that have a grammar. Overwrites `logits`. Does not wait for a GPU."""
    if plan.is_plain and mask is None and not plan.sampled:
        return Samples(_greedy_tokens(logits), None, plan)
    is_finite = logits.amax(-1).isfinite()
    if _waits_for_device(is_finite) or not is_finite.all():
        logits.masked_fill_(~is_finite[:, None], 0.0)
    top = _top_logprobs(logits, plan)
    _apply_penalties(logits, plan)
    _apply_logit_bias(logits, plan)
    _ban_bad_words(logits, plan)
    _ban_early_end(logits, plan, eos_ids)
    if mask is not None:
        allowed = to_device(mask.allowed(), torch.int32, logits.device)
        _keep_allowed(logits, to_device(mask.rows, torch.long, logits.device), allowed)
    return Samples(torch.where(is_finite, _choose(logits, plan), NOT_FINITE), top, plan)


def sample(logits: Tensor, seqs: list[Sequence], eos_ids: tuple[int, ...], mask: "Mask | None" = None) -> list[Sampled]:
    """Samples one token for each sequence as `launch_sampling` does, and waits for the tokens."""
    tokens, logprobs = launch_sampling(logits, SamplingPlan(seqs, logits.device), eos_ids, mask).read()
    return [Sampled(None if t == NOT_FINITE else t, logprobs.get(row)) for row, t in enumerate(tokens)]


def _waits_for_device(x: Tensor) -> bool:
    """Returns whether reading the tensor from Python would wait for a device."""
    return x.is_cuda


def uniform(seed: int, position: int) -> float:
    """Returns the number in [0, 1) from which the token at `position` is sampled; the first generated token has
    position 0."""
    return float(_uniforms([_seed_hash(seed)], [position])[0])


def _seed_hash(seed: int) -> blake2b:
    return blake2b(seed.to_bytes(8, "little"), digest_size=8)


def _uniforms(seed_hashes: Items[blake2b], positions: list[int]) -> NDArray[np.floating[Any]]:
    """Returns `uniform` for each pair of a hashed seed and a position."""
    digests = []
    for seed_hash, position in zip(seed_hashes, positions, strict=True):
        state = seed_hash.copy()
        state.update(position.to_bytes(8, "little"))
        digests.append(state.digest())
    return (np.frombuffer(b"".join(digests), "<u8") >> 11) * 2.0**-53


def _apply_penalties(logits: Tensor, plan: SamplingPlan) -> None:
    """Applies the repetition, frequency and presence penalties in place, to the logits of previous tokens only."""
    pairs = [(row, *pair) for row in plan.penalized for pair in _token_counts(plan.seqs[row])]
    if not pairs:
        return
    rows, tokens, counts = (to_device(column, torch.long, logits.device) for column in zip(*pairs, strict=True))
    params = [seq.params for seq in plan.seqs]
    penalties = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
    repetition, frequency, presence = to_device(penalties, logits.dtype, logits.device)[rows].unbind(1)
    values = logits[rows, tokens]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[rows, tokens] = values - counts * frequency - (counts > 0) * presence


def _token_counts(seq: Sequence) -> list[tuple[int, int]]:
    """Returns every distinct token of the sequence and how often it was generated."""
    generated = Counter(seq.token_ids[seq.num_prompt :])
    return [(token, generated[token]) for token in dict.fromkeys(seq.token_ids)]


def _apply_logit_bias(logits: Tensor, plan: SamplingPlan) -> None:
    """Adds the biases of `logit_bias`, whose tokens are unique (sampling_params.py), as `+=` with an index requires."""
    triples = [(row, *pair) for row in plan.biased for pair in plan.seqs[row].params.logit_bias]
    if triples:
        rows, tokens, values = zip(*triples, strict=True)
        index = to_device(rows, torch.long, logits.device), to_device(tokens, torch.long, logits.device)
        logits[index] += to_device(values, logits.dtype, logits.device)


def _ban_early_end(logits: Tensor, plan: SamplingPlan, eos_ids: tuple[int, ...]) -> None:
    """Bans the tokens that would end the text, while fewer than `min_tokens` are generated."""
    pairs: list[tuple[int, int]] = []
    for row in plan.min_tokens:
        params = plan.seqs[row].params
        if _position(plan.seqs[row]) < params.min_tokens:
            stop_ids = params.stop_token_ids + (() if params.ignore_eos else eos_ids)
            pairs += [(row, token) for token in stop_ids]
    if pairs:
        rows, tokens = (to_device(column, torch.long, logits.device) for column in zip(*pairs, strict=True))
        logits[rows, tokens] = to_device(EARLY_END_LOGIT, logits.dtype, logits.device)


def _ban_bad_words(logits: Tensor, plan: SamplingPlan) -> None:
    for row in plan.banned:
        seq = plan.seqs[row]
        if seq.ban is not None and seq.status is not Status.FINISHED:
            logits[row].index_fill_(0, to_device(seq.ban.tokens(), torch.long, logits.device), -torch.inf)


def _choose(logits: Tensor, plan: SamplingPlan) -> Tensor:
    """Returns the most likely token of each greedy row, and a random token of each other row, int64 [rows]."""
    if len(plan.sampled) == len(plan.seqs):
        return _sample_rows(logits, plan)
    tokens = logits.argmax(-1)
    if plan.sampled:
        tokens[plan.sampled_rows] = _sample_rows(logits[plan.sampled_rows], plan)
    return tokens


def _sample_rows(logits: Tensor, plan: SamplingPlan) -> Tensor:
    uniforms = _uniforms(plan.seed_hashes, [_position(plan.seqs[row]) for row in plan.sampled])
    uniform_tensor = to_device(uniforms, torch.float64, logits.device)
    return _sample(logits, *plan.filters, uniform_tensor)  # type: ignore[no-any-return]


def _position(seq: Sequence) -> int:
    """Returns the position of the sampled token among the generated tokens."""
    return seq.num_tokens - seq.num_prompt


def _top_logprobs(logits: Tensor, plan: SamplingPlan) -> _TopLogprobs | None:
    """Returns the log-probabilities of the rows that requested them, or None if no row did. Call it before penalties
    are applied to `logits`."""
    if not plan.logprobs:
        return None
    logprobs = log_softmax(logits[plan.logprob_rows])
    # The same k for every batch: topk's choice among equal values may depend on k, and so on other requests.
    top = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[-1]), -1)
    return _TopLogprobs(logprobs, top.values, top.indices)


def _unpack_logprobs(
    rows: list[int], tokens: list[int], parts: list[Tensor], seqs: list[Sequence]
) -> dict[int, TokenLogprob]:
    """Returns the log-probabilities of each row from the last three parts that `Samples` packed."""
    sampled, top_values = (part.view(torch.double).view(len(rows), -1).tolist() for part in parts[:2])
    top_ids = parts[2].view(len(rows), -1).tolist()
    result = {}
    for row, (logprob,), values, ids in zip(rows, sampled, top_values, top_ids, strict=True):
        result[row] = TokenLogprob.ranked(tokens[row], logprob, ids, values, seqs[row].params.logprobs or 0)
    return result
