"""Prompt lookup: speculative decoding without a draft model. The draft is what followed the same tokens earlier in the
text.

Prompt lookup suits completions that repeat their prompt or themselves (summaries, edits, code). In one step, the model
computes a sequence's last token together with the draft, and the sampler samples a token after each of them. While the
sampled token equals the drafted token, the draft is accepted and the step yields another token. At the first difference
the rest of the draft is rejected, and its keys and values are overwritten later. A sampled token depends on the
request's seed and on its position (sampler.py), and a row of logits depends only on its sequence. So completions have
the same bits with and without drafts.

A rejected token wastes time, so each sequence has a balance, in steps of one sequence. The balance starts at
`START_STEPS` and grows by `ALLOWANCE` a step. The sequence pays for every drafted token and earns one step for every
accepted token, and it never drafts more than its balance pays for. So a sequence without repetitions loses at most the
fraction `ALLOWANCE` of its time, and `START_STEPS` steps once. The price of another row is `ROW_COST` steps of one row.
This is about twice the measured cost for up to about ten rows (docs/performance-log.md), so a slower machine loses no
more than that. In a step of many sequences, each sequence's share is cheaper, so a drafted token costs more of it.

Requests with a grammar (grammar.py) or bad words (bad_words.py) get no draft: their allowed tokens are only known after
the preceding token was sampled. The lookup takes 20 microseconds in a text of ten thousand tokens.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from fp8serve.engine.sequence import Sequence

MIN_NGRAM, MAX_NGRAM = 1, 8  # tokens at the end of the text that are looked up
FIRST_DRAFT_TOKENS = 4
MIN_DRAFT_TOKENS = 3  # a rejection does not lower the maximum length of the next draft below this
ROW_COST = 0.16  # of another row, in steps of one row: twice the measured cost
ALLOWANCE = 0.03  # steps that a balance gains at each step
START_STEPS, MAX_STEPS = 1.0, 4.0  # of a balance
NUM_CODE_POINTS = 0x110000  # of Unicode


@dataclass(slots=True)
class Balance:
    """The number of steps that may still be spent on drafts, at most `max_steps`."""

    steps: float = START_STEPS
    max_steps: float = MAX_STEPS

    def add(self, steps: float) -> None:
        self.steps = min(self.max_steps, self.steps + steps)

    def affordable_tokens(self, price: float) -> int:
        return max(0, int(self.steps / price))


class Drafter:
    """Drafts tokens of one sequence, at most `max_tokens` at a time."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._length = min(FIRST_DRAFT_TOKENS, max_tokens)
        self._balance = Balance()
        self._price = 0.0  # of a token of the last draft
        self._text = ""  # one character for each token, because Python searches strings fast

    def propose(self, token_ids: Items[int], max_tokens: int, rows: int) -> list[int]:
        """Returns a draft of up to `max_tokens` tokens to follow `token_ids`, for a step of `rows` rows without
        drafts."""
        self._price = row_price(rows)
        self._balance.add(ALLOWANCE)
        length = min(self._length, max_tokens, self._balance.affordable_tokens(self._price))
        if length < 1:
            return []
        self._text += "".join([chr(token % NUM_CODE_POINTS) for token in token_ids[len(self._text) :]])
        start = self._match_end()
        if start is None:
            return []
        tokens = token_ids[start:]
        return [tokens[i % len(tokens)] for i in range(length)]

    def record(self, drafted: int, accepted: int) -> None:
        """Records how many tokens of the last draft were accepted. If all were, the next draft may be twice as long."""
        self._balance.add(accepted - drafted * self._price)
        next_length = 2 * drafted if accepted == drafted else max(MIN_DRAFT_TOKENS, accepted + 1)
        self._length = min(self._max_tokens, next_length)

    def _match_end(self) -> int | None:
        """Returns the end of the last earlier occurrence of the text's longest repeated suffix, or None if no suffix
        occurs earlier."""
        match_end, search_end = None, len(self._text) - 1
        for length in range(MIN_NGRAM, MAX_NGRAM + 1):
            start = self._text.rfind(self._text[-length:], 0, search_end)
            if start < 0:
                break
            match_end = search_end = start + length
        return match_end


def row_price(rows: int) -> float:
    """Returns the price of another row in a step of `rows` rows: its cost divided by one row's share of the step."""
    return rows * ROW_COST / (1 + (rows - 1) * ROW_COST)


def sequences_to_sample(seq: Sequence, draft: Items[int]) -> list[Sequence]:
    """Returns the sequences that the sampler extends: `seq`, and `seq` with one, two, ... of the drafted tokens."""
    extended = [replace(seq, token_ids=[*seq.token_ids, *draft[: i + 1]]) for i in range(len(draft))]
    return [seq, *extended]
