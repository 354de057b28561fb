"""Speculative decoding with a draft model: a smaller model with the same vocabulary proposes the next tokens. In this
module, "the model" is the target model that verifies the drafts.

The scheduler reserves space for a draft of each sequence. Then this module generates the drafts of all sequences of the
step together: each pass adds a token to every draft. The draft model samples with the sequence's own parameters and
random numbers (sampler.py), so that a draft is also likely to be accepted at a temperature above 0. Drafts do not
change a bit of a completion; drafting.py says how they are verified.

KV cache. The draft model's cache has as many blocks as the model's. A block number stands for the same tokens in both
caches, so blocks of both are freed, shared and evicted together (kv_cache.py). The draft model computes only tokens
that a draft needs: at the first draft of a sequence its prompt, in chunks, and later the tokens added since. The keys
and values of rejected tokens are overwritten. The draft model has no adapters, and its cache is BF16.

Cost. As in drafting.py, each sequence has a balance. The price of a drafted token is one pass of the draft model and
one row of the model's step. A second balance, for the whole engine, limits the total cost. It starts at `START_STEPS`,
grows by the fraction `ALLOWANCE` of every step, gains what accepted tokens save, and pays for every pass and every
drafted row. While this balance is empty, nothing is drafted. So a draft model whose tokens are never accepted costs the
fraction `ALLOWANCE` of the time, and `START_STEPS` steps once. All amounts are in steps of the model with one sequence.
They are computed from fixed prices and not measured, so the same requests get the same drafts on every machine.

The length of a draft follows from the recent acceptance rate: its last token must be likely enough to be worth its
price. A draft ends early at an end-of-text token. If the draft model fails or its logits are not finite, nothing is
drafted.
"""

import logging
import math
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8serve.engine.drafting import ALLOWANCE, Balance, row_price
from fp8serve.engine.kv_cache import BlockPool
from fp8serve.engine.memory import weight_bytes
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.runner import Runner
from fp8serve.engine.sampler import sample
from fp8serve.engine.scheduler import StepWork, Work
from fp8serve.engine.sequence import Sequence
from fp8serve.engine.task import check_generates
from fp8serve.errors import ModelError, shown
from fp8serve.model.building import Model
from fp8serve.model.checkpoint import load_servable, open_checkpoint
from fp8serve.model.config.decoder import read_config
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.network.experts import mixtures
from fp8serve.model.text.tokenizer import Tokenizer

log = logging.getLogger("fp8serve.engine")
ROW_COST = 0.08  # the measured cost of another row, in steps of one sequence (docs/performance-log.md)
START_STEPS, MAX_STEPS = 8.0, 64.0  # the initial value and the maximum of the engine's balance
PRIOR_ACCEPTED, PRIOR_TRIED = 1.4, 2.0  # token counts with which the acceptance rate of a new sequence starts
DECAY = 0.9  # the factor by which these counts shrink at each draft
MAX_PREFILL_COST = 0.5  # of a sequence's prefill by the draft model, in steps for each token still to generate


def draft_config(directory: Path, model_dir: Path, config: ModelConfig) -> ModelConfig:
    """Returns the draft model's configuration. `config` is the configuration of the model in `model_dir`. Raises
    ModelError if the draft model does not generate text or has another vocabulary."""
    try:
        draft = read_config(directory)
        check_generates(directory, None)
    except ModelError as problem:
        raise ModelError(f"The draft model cannot be used: {problem}") from None
    _check_vocabulary(directory, draft, model_dir, config)
    return draft


@dataclass(frozen=True)
class LoadedDraft:
    """A draft model without its KV cache. `cost` is the result of `_pass_cost`."""

    name: str
    model: Model
    cost: float


def load_draft(directory: Path, model: Model, options: EngineOptions) -> LoadedDraft:
    """Loads the draft model for `model`. Logs a warning if it is too large to save time."""
    has_scales = open_checkpoint(directory).has_scales
    draft = load_servable(directory, "stored" if has_scales else "bf16", None, options.device, head=options.head_dtype)
    loaded = LoadedDraft(directory.resolve().name, draft, _pass_cost(draft, model))
    if loaded.cost + row_price(1) >= 1:
        log.warning(
            "A pass of the draft model %s costs %.2f of a step of the model. This is too much for drafts to save time, "
            "so nothing is drafted. Use a smaller draft model.",
            loaded.name,
            loaded.cost,
        )
    return loaded


def _pass_cost(draft: Model, model: Model) -> float:
    """Estimates the cost of a pass of the draft model in steps of the model, both with one sequence.

    A step reads all weights and runs all layers, so its time is a sum of a term for bytes and a term for layers. The
    ratio of two such times lies between the ratio of bytes and the ratio of layers. The larger ratio is returned.
    """
    return max(_read_bytes(draft) / _read_bytes(model), draft.config.num_layers / model.config.num_layers)


def _check_vocabulary(directory: Path, draft: ModelConfig, model_dir: Path, config: ModelConfig) -> None:
    draft_vocabulary, vocabulary = _vocabulary(directory), _vocabulary(model_dir)
    if draft_vocabulary is None or vocabulary is None:
        if draft.vocab_size != config.vocab_size:
            raise ModelError(
                f"The draft model {directory} has {draft.vocab_size} tokens and {model_dir} has {config.vocab_size}; "
                "a draft model must have the same vocabulary."
            )
        return
    if draft_vocabulary != vocabulary:
        token, number = min(vocabulary.items() ^ draft_vocabulary.items(), key=lambda pair: pair[1])
        raise ModelError(
            f"The draft model {directory} has another vocabulary than {model_dir}: only one of them has the token "
            f"{shown(token)} with id {number}. Use a draft model of the same family."
        )


def _vocabulary(directory: Path) -> dict[str, int] | None:
    return Tokenizer.from_dir(directory).vocabulary if (directory / "tokenizer.json").is_file() else None


def _read_bytes(model: Model) -> float:
    """Returns the bytes of the weights that a step of one token reads."""
    nbytes = weight_bytes(model)
    if model.embedding.weight.data_ptr() != cast(Tensor, model.head.weight).data_ptr():
        nbytes -= model.embedding.weight.nbytes
    experts = model.config.experts
    if experts is None:
        return nbytes
    return nbytes - (1 - experts.per_token / experts.count) * weight_bytes(*mixtures(model).values())


@dataclass(frozen=True, slots=True)
class DraftParts:
    """A draft model that is ready to run, with its KV cache."""

    name: str
    runner: Runner
    max_length: int  # tokens of a sequence
    cost: float  # of a pass, in steps of the model, both with one sequence

    def info(self) -> dict[str, object]:
        """Returns a description of the draft model as a JSON object."""
        model = self.runner.model
        sizes = {"layers": model.config.num_layers, "weight_bytes": weight_bytes(model)}
        return {"name": self.name, **sizes, "step_cost": round(self.cost, 3)}


class DraftModel:
    """Generates the drafts of an engine. `config` is the model's configuration."""

    def __init__(self, parts: DraftParts, pool: BlockPool, options: EngineOptions, config: ModelConfig) -> None:
        self.max_tokens, self.max_length = options.drafted_tokens, parts.max_length
        self._parts, self._pool, self._chunk_tokens = parts, pool, options.prefill_tokens
        self._vocab_size, self._eos_ids = config.vocab_size, config.eos_token_ids
        self._balance = Balance(START_STEPS, MAX_STEPS)
        self.num_computed = 0  # tokens, since the start
        self._has_failed = False

    def price(self, rows: int) -> float:
        """Returns the price of a drafted token in a step of `rows` rows, in steps of one sequence."""
        return self._parts.cost + row_price(rows)

    def has_tokens(self, token_ids: Items[int]) -> bool:
        """Returns whether the draft model's vocabulary, which may have less padding at its end, has these tokens."""
        size = self._parts.runner.model.config.vocab_size
        return size >= self._vocab_size or max(token_ids, default=0) < size

    def fill(self, work: list[Work]) -> list[Work]:
        """Replaces the placeholder drafts of `work` by generated drafts, which may be shorter or empty."""
        self._balance.add(ALLOWANCE * step_price(sum(item.count - len(item.draft) for item in work)))
        drafting = [item for item in work if item.draft]
        if not drafting:
            return work
        drafts = self._try_generate(drafting) if self._balance.steps > 0 else {}
        self._balance.add(-ROW_COST * sum(map(len, drafts.values())))
        for item in drafting:
            item.draft = drafts.get(item.seq, ())
            item.count = 1 + len(item.draft)
        return work

    def record(self, seq: Sequence, start: int, computed: int, accepted: int, rows: int) -> None:
        """Records that `accepted` tokens of the draft of `seq`, which began at `start`, were accepted in a step of
        `rows` rows. Each saves a sequence's share of such a step. `computed` is the number of drafted tokens whose keys
        and values are in the draft model's cache."""
        self._balance.add(accepted * step_price(rows) / rows)
        if seq.block_table:
            self._pool.mark_draft_computed(seq, start, start + min(computed, accepted))

    def _try_generate(self, drafting: list[Work]) -> dict[Sequence, tuple[int, ...]]:
        try:
            return self._generate(drafting)
        except (RuntimeError, MemoryError) as problem:  # an error of the device: the model itself may still run
            if not self._has_failed:
                log.warning("The draft model %s failed, so nothing is drafted: %s", self._parts.name, problem)
            self._has_failed = True
            return {}

    def _generate(self, drafting: list[Work]) -> dict[Sequence, tuple[int, ...]]:
        drafts: dict[Sequence, list[int]] = {item.seq: [] for item in drafting}
        max_tokens = {item.seq: len(item.draft) for item in drafting}
        prefill = self._prefill(drafting)
        sampled = self._run(prefill)
        for seq, work in prefill:
            self._pool.mark_draft_computed(seq, work.start, work.start + work.count)
        while sampled:
            for seq, token in sampled:
                drafts[seq].append(token)
            unfinished = [s for s, token in sampled if len(drafts[s]) < max_tokens[s] and token not in self._eos_ids]
            sampled = self._run([(seq, _decode(seq, drafts[seq])) for seq in unfinished])
        return {seq: tuple(draft) for seq, draft in drafts.items()}

    def _prefill(self, drafting: list[Work]) -> list[tuple[Sequence, Work]]:
        """Schedules the tokens that the draft model must compute before it can draft, at most `chunk_tokens` in all.
        A sequence is drafted once all its tokens are computed; until then it waits for a later step."""
        prefill, budget = [], self._chunk_tokens
        for seq in (item.seq for item in drafting):
            start, end = min(self._pool.num_draft_computed(seq), len(seq.token_ids) - 1), len(seq.token_ids)
            if (count := min(end - start, budget)) > 0 and self._is_worth_prefill(seq, end - start):
                prefill.append((seq, Work(replace(seq, adapter=None), start, count)))
                budget -= count
        return prefill

    def _is_worth_prefill(self, seq: Sequence, num_uncomputed: int) -> bool:
        """Returns whether the sequence has enough tokens to generate to justify the prefill by the draft model."""
        remaining = seq.params.max_new_tokens - seq.num_generated
        return self._parts.cost * ROW_COST * (num_uncomputed - 1) <= MAX_PREFILL_COST * remaining

    def _run(self, scheduled: list[tuple[Sequence, Work]]) -> list[tuple[Sequence, int]]:
        """Runs one pass of the draft model and returns the sampled tokens. Sequences whose work does not end with their
        last token, or whose logits are not finite, get none."""
        work = [item for _, item in scheduled]
        if not work:
            return []
        tokens = sum(item.count for item in work)
        self.num_computed += tokens
        self._balance.add(-self._parts.cost * step_price(tokens))
        logits = self._parts.runner.run(StepWork(others=work))
        sampling = [(seq, item) for seq, item in scheduled if item.needs_sample]
        if not sampling:
            return []
        sampled = sample(self._pad_vocabulary(logits), [item.seq for _, item in sampling], self._eos_ids)
        pairs = zip(sampling, sampled, strict=True)
        return [(seq, result.token_id) for (seq, _), result in pairs if result.token_id is not None]

    def _pad_vocabulary(self, logits: Tensor) -> Tensor:
        """Pads the logits to the model's vocabulary size. Models of one family may pad their vocabulary differently."""
        missing = self._vocab_size - logits.shape[-1]
        return logits if missing == 0 else pad(logits, (0, missing), value=-torch.inf).contiguous()


class ModelDrafter:
    """Decides how many tokens the draft model drafts for one sequence, from the recent acceptance rate."""

    def __init__(self, model: DraftModel, seq: Sequence) -> None:
        self._model, self._seq = model, seq
        self._balance = Balance()
        self._accepted, self._tried = PRIOR_ACCEPTED, PRIOR_TRIED
        self._price, self._rows = 0.0, 1  # the price of a token of the last draft, and the rows of that draft's step
        self._num_checked = 0  # tokens of the sequence that are known to be in the draft model's vocabulary

    def propose(self, token_ids: Items[int], max_tokens: int, rows: int) -> list[int]:
        """Returns a placeholder draft of the right length, which `DraftModel.fill` replaces."""
        self._balance.add(ALLOWANCE)
        self._price, self._rows = self._model.price(rows), rows
        affordable = self._balance.affordable_tokens(self._price)
        length = min(self._worthwhile_length(), max_tokens, affordable, self._model.max_length - len(token_ids))
        if length < 1 or not self._model.has_tokens(token_ids[self._num_checked :]):
            return []
        self._num_checked = len(token_ids)
        return [0] * length

    def record(self, drafted: int, accepted: int) -> None:
        """Records how many tokens of the last draft were accepted."""
        self._balance.add(accepted - drafted * self._price)
        self._accepted = DECAY * self._accepted + accepted
        self._tried = DECAY * self._tried + min(accepted + 1, drafted)
        self._model.record(self._seq, self._num_checked, drafted - 1, accepted, self._rows)

    def _worthwhile_length(self) -> int:
        """Returns the largest length at which the last token of a draft is likely enough to be worth its price. The
        result is at least 1, so that the acceptance rate is still measured."""
        rate = self._accepted / self._tried
        if rate >= 1 or self._price >= 1:
            return self._model.max_tokens if self._price < 1 else 1
        return max(1, min(self._model.max_tokens, int(math.log(self._price) / math.log(rate)))) if rate > 0 else 1


def step_price(rows: int) -> float:
    """Returns the cost of a step of `rows` rows, in steps of one row."""
    return 1 + max(0, rows - 1) * ROW_COST


def _decode(seq: Sequence, draft: list[int]) -> Work:
    """Schedules the last token of a sequence that was extended by its draft."""
    extended = replace(seq, token_ids=[*seq.token_ids, *draft], adapter=None)
    return Work(extended, len(extended.token_ids) - 1, 1)
