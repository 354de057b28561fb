"""Guesses the next tokens with a second, smaller model: a draft, checked like those of drafting.py.

The scheduler gives a sequence room for a draft; then this module lets the small model write it, for all sequences of
the step together, one token a pass. It draws with the sequence's own parameters and random numbers (sampler.py), so it
guesses what the model itself would draw with a temperature, too. The guesses change no bit of an answer.

Its keys and values. Its cache has as many blocks as the model's, and a block number means the same tokens in both, so
they are freed, shared, lost and rolled back together (kv_cache.py). It computes only what a guess needs: the prompt,
chunk by chunk, when its sequence is to be drafted for the first time, and later the tokens added since. Positions after
the confirmed tokens are overwritten. It has no adapters, and its cache is BF16.

Its cost. A guess is paid for like one of drafting.py; its price is that of a pass and of a row of the model's step. One
balance for the whole engine bounds the total cost of prompts and sequences: it begins with `START`, grows by
`ALLOWANCE` of every step's time, earns what right guesses save, and pays for every pass and every guessed row. While it
is empty nothing is drafted, so a draft model that is never right costs `ALLOWANCE` of the time, and `START` steps
once. All amounts are in steps of the model for one sequence and come from fixed prices, not from a clock: the same
requests get the same drafts on a busy machine.

A draft is extended as long as its last token is worth its price, given the share of recent guesses that were right. It
ends early at the end of a text. A model that fails, or whose logits are not finite, drafts nothing.
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

from fp8serve.engine.drafting import ALLOWANCE, Balance, price
from fp8serve.engine.kv_cache import BlockPool
from fp8serve.engine.memory import weight_bytes
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.runner import Runner
from fp8serve.engine.sampler import sample
from fp8serve.engine.scheduler import Work
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
ROW = 0.08  # the measured cost of another row, in steps for one sequence (docs/performance-log.md)
START, MOST = 8.0, 64.0  # steps on the engine's balance at first, and at most
RIGHT, TRIED = 1.4, 2.0  # the right guesses, and all guesses, that a new sequence starts with
MEMORY = 0.9  # the factor by which a guess counts less with each later one
LEAST_WORTH = 0.5  # steps that each token still to come must save before the draft model reads the unread ones


def draft_config(directory: Path, model_dir: Path, config: ModelConfig) -> ModelConfig:
    """The draft model's configuration; `config` is that of `model_dir`. ModelError: it writes no text, or has another
    vocabulary."""
    try:
        draft = read_config(directory)
        check_generates(directory, None)
    except ModelError as problem:
        raise ModelError(f"The draft model cannot be used: {problem}") from None
    _check_vocabulary(directory, draft, model_dir, config)
    return draft


@dataclass(frozen=True)
class LoadedDraft:
    """A draft model without its cache; cost: see `_cost`."""

    name: str
    model: Model
    cost: float


def load_draft(directory: Path, model: Model, options: EngineOptions) -> LoadedDraft:
    """The draft model of `model`, which has just been loaded."""
    has_scales = open_checkpoint(directory).has_scales
    draft = load_servable(directory, "stored" if has_scales else "bf16", None, options.device, head=options.head_dtype)
    loaded = LoadedDraft(directory.resolve().name, draft, _cost(draft, model))
    if loaded.cost + price(1) >= 1:
        log.warning(
            "A pass of the draft model %s costs %.2f of a step of the model, so that no guess can pay for itself and "
            "nothing is drafted; take a smaller one.",
            loaded.name,
            loaded.cost,
        )
    return loaded


def _cost(draft: Model, model: Model) -> float:
    """The cost of a pass of the draft model, in steps of the model, both for one sequence.

    Such a step reads all weights and runs all layers, so its cost is a sum of terms for bytes and for layers. The ratio
    of the two costs lies between the ratio of the bytes and that of the layers; this is the larger of these.
    """
    return max(_read_bytes(draft) / _read_bytes(model), draft.config.num_layers / model.config.num_layers)


def _check_vocabulary(directory: Path, own: ModelConfig, model_dir: Path, config: ModelConfig) -> None:
    draft, model = _vocabulary(directory), _vocabulary(model_dir)
    if draft is None or model is None:
        if own.vocab_size != config.vocab_size:
            raise ModelError(
                f"The draft model {directory} has {own.vocab_size} tokens and {model_dir} has {config.vocab_size}; "
                "a draft model must have the same vocabulary."
            )
        return
    if draft != model:
        token, number = min(model.items() ^ draft.items(), key=lambda pair: pair[1])
        raise ModelError(
            f"The draft model {directory} has another vocabulary than {model_dir}: token {number}, {shown(token)}, is "
            "in one of them only; take a draft model of the same family."
        )


def _vocabulary(directory: Path) -> dict[str, int] | None:
    return Tokenizer.from_dir(directory).vocabulary if (directory / "tokenizer.json").is_file() else None


def _read_bytes(model: Model) -> float:
    """Bytes of the weights that a step of one token reads."""
    read = weight_bytes(model)
    if model.embedding.weight.data_ptr() != cast(Tensor, model.head.weight).data_ptr():
        read -= model.embedding.weight.nbytes
    experts = model.config.experts
    if experts is None:
        return read
    return read - (1 - experts.per_token / experts.count) * weight_bytes(*mixtures(model).values())


@dataclass(frozen=True, slots=True)
class DraftParts:
    """A draft model that is ready to run. longest: tokens of a sequence. cost: of a pass for one sequence, in steps of
    the model for one."""

    name: str
    runner: Runner
    longest: int
    cost: float
    nbytes: int

    def info(self) -> dict[str, object]:
        """JSON."""
        layers = self.runner.model.config.num_layers
        return {"name": self.name, "layers": layers, "weight_bytes": self.nbytes, "step_cost": round(self.cost, 3)}


class DraftModel:
    """Writes the drafts of an engine whose blocks are `pool`'s. most: tokens of a draft; chunk: tokens that it reads in
    a pass; vocab_size, eos_ids: the model's."""

    def __init__(
        self, parts: DraftParts, pool: BlockPool, most: int, chunk: int, vocab_size: int, eos_ids: tuple[int, ...]
    ) -> None:
        self.most, self.longest = most, parts.longest
        self._parts, self._pool, self._chunk = parts, pool, chunk
        self._vocab_size, self._eos_ids = vocab_size, eos_ids
        self._balance = Balance(START, MOST)
        self.num_computed = 0  # tokens, since the start
        self._failed = False

    def drafter(self, seq: Sequence) -> "ModelDrafter":
        """The drafter of a new sequence."""
        return ModelDrafter(self, seq)

    def price(self, rows: int) -> float:
        """The price of a guessed token in a step of `rows`, in steps of one sequence."""
        return self._parts.cost + price(rows)

    def knows(self, token_ids: Items[int]) -> bool:
        """Whether its vocabulary has all these tokens: the end of a padded vocabulary may be missing."""
        size = self._parts.runner.model.config.vocab_size
        return size >= self._vocab_size or max(token_ids, default=0) < size

    def fill(self, work: list[Work]) -> list[Work]:
        """`work` with drafts, or with none, in the room that was left for them."""
        self._balance.add(ALLOWANCE * step_price(sum(item.count - len(item.draft) for item in work)))
        requests = [item for item in work if item.draft]
        if not requests:
            return work
        drafts = self._drafts(requests) if self._balance.steps > 0 else {}
        self._balance.add(-ROW * sum(map(len, drafts.values())))
        return [_with_draft(item, drafts.get(item.seq, ())) if item.draft else item for item in work]

    def learn(self, seq: Sequence, start: int, fed: int, accepted: int, rows: int) -> None:
        """Records that `accepted` of the guesses for `seq`, which begin at `start`, were right in a step of `rows`.
        Each saves a sequence's share of such a step. The draft model has read the first `fed` of them."""
        self._balance.add(accepted * step_price(rows) / rows)
        if seq.block_table:
            self._pool.mark_drafted(seq, start, start + min(fed, accepted))

    def _drafts(self, requests: list[Work]) -> dict[Sequence, tuple[int, ...]]:
        try:
            return self._write(requests)
        except (RuntimeError, MemoryError) as problem:  # an error of the device: the model itself may still run
            if not self._failed:
                log.warning("The draft model %s failed, so nothing is drafted: %s", self._parts.name, problem)
            self._failed = True
            return {}

    def _write(self, requests: list[Work]) -> dict[Sequence, tuple[int, ...]]:
        drafts: dict[Sequence, list[int]] = {item.seq: [] for item in requests}
        room = {item.seq: len(item.draft) for item in requests}
        passing = self._unread(requests)
        drawn = self._pass(passing)
        for seq, work in passing:
            self._pool.mark_drafted(seq, work.start, work.start + work.count)
        while drawn:
            for seq, token in drawn:
                drafts[seq].append(token)
            going = [seq for seq, token in drawn if len(drafts[seq]) < room[seq] and token not in self._eos_ids]
            drawn = self._pass([(seq, _next(seq, drafts[seq])) for seq in going])
        return {seq: tuple(draft) for seq, draft in drafts.items()}

    def _unread(self, requests: list[Work]) -> list[tuple[Sequence, Work]]:
        """The tokens that the draft model reads before it writes, at most a chunk in all. Other sequences wait for a
        later step, as do those whose tokens are not all read yet."""
        result, left = [], self._chunk
        for seq in (item.seq for item in requests):
            start, end = min(self._pool.drafted(seq), len(seq.token_ids) - 1), len(seq.token_ids)
            if (count := min(end - start, left)) > 0 and self._is_worth(seq, end - start):
                result.append((seq, Work(replace(seq, adapter=None), start, count)))
                left -= count
        return result

    def _is_worth(self, seq: Sequence, unread: int) -> bool:
        """Whether the tokens still to come can pay for reading so many tokens."""
        to_come = seq.params.max_new_tokens - seq.num_generated
        return self._parts.cost * ROW * (unread - 1) <= LEAST_WORTH * to_come

    def _pass(self, passing: list[tuple[Sequence, Work]]) -> list[tuple[Sequence, int]]:
        """The tokens that follow the work that samples; None where logits are not finite."""
        work = [item for _, item in passing]
        if not work:
            return []
        tokens = sum(item.count for item in work)
        self.num_computed += tokens
        self._balance.add(-self._parts.cost * step_price(tokens))
        logits, sampling = self._parts.runner.run(work), [(seq, item) for seq, item in passing if item.samples]
        if not sampling:
            return []
        drawn = sample(self._fitted(logits), [item.seq for _, item in sampling], self._eos_ids)
        pairs = zip(sampling, drawn, strict=True)
        return [(seq, sampled.token_id) for (seq, _), sampled in pairs if sampled.token_id is not None]

    def _fitted(self, logits: Tensor) -> Tensor:
        """The logits, padded to the width of the model's: padded vocabularies of one family differ at their ends."""
        more = self._vocab_size - logits.shape[-1]
        return logits if more == 0 else pad(logits, (0, more), value=-torch.inf).contiguous()


class ModelDrafter:
    """Asks a draft model for drafts of one sequence, and learns which were right."""

    def __init__(self, model: DraftModel, seq: Sequence) -> None:
        self._model, self._seq = model, seq
        self._balance = Balance()
        self._right, self._tried = RIGHT, TRIED
        self._price, self._rows = 0.0, 1  # of a token of the last draft, and of the step that it was in
        self._read = 0  # tokens that the draft model is known to have in its vocabulary

    def propose(self, token_ids: Items[int], room: int, rows: int) -> list[int]:
        """Room for a draft, which `DraftModel.fill` fills."""
        self._balance.add(ALLOWANCE)
        self._price, self._rows = self._model.price(rows), rows
        length = min(self._worth(), room, self._balance.affords(self._price), self._model.longest - len(token_ids))
        if length < 1 or not self._model.knows(token_ids[self._read :]):
            return []
        self._read = len(token_ids)
        return [0] * length

    def learn(self, drafted: int, accepted: int) -> None:
        """The first `accepted` of the tokens drafted last were right."""
        self._balance.add(accepted - drafted * self._price)
        self._right = MEMORY * self._right + accepted
        self._tried = MEMORY * self._tried + min(accepted + 1, drafted)
        self._model.learn(self._seq, self._read, drafted - 1, accepted, self._rows)

    def _worth(self) -> int:
        """The length of a draft whose last token is right often enough for its price; 1, as a trial, if none is."""
        share = self._right / self._tried
        if share >= 1 or self._price >= 1:
            return self._model.most if self._price < 1 else 1
        return max(1, min(self._model.most, int(math.log(self._price) / math.log(share)))) if share > 0 else 1


def step_price(rows: int) -> float:
    """The cost of a step of `rows` rows, in steps of one row."""
    return 1 + max(0, rows - 1) * ROW


def _next(seq: Sequence, draft: list[int]) -> Work:
    """The work that feeds the last token of its draft."""
    extended = replace(seq, token_ids=[*seq.token_ids, *draft], adapter=None)
    return Work(extended, len(extended.token_ids) - 1, 1)


def _with_draft(item: Work, draft: tuple[int, ...]) -> Work:
    return replace(item, count=1 + len(draft), draft=draft)
