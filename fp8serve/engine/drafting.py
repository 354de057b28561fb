"""Guesses the next tokens without a model: those that followed the same words earlier in the text.

Answers that repeat their prompt or themselves (summaries, edits, code) are guessed well in this way. The model computes
a draft in the step that computes the token before it, and draws after each of these tokens as it always does. As long
as it draws the token of the draft, the step yields another token. The first different one ends it, and everything
computed after that is overwritten. A draw depends on the request's seed and the position in its answer (sampler.py),
and a row only on its sequence, so answers have the same bits as without drafts.

A drafted token costs time, so it must be paid for. A sequence has a balance, in steps of its own: it begins with a
little, grows by `ALLOWANCE` a step, pays for every token that it drafts, and earns one for each that is right. It never
drafts more than its balance pays for: a sequence that finds nothing to repeat loses `ALLOWANCE` of its time, and
`START` steps in all. The price of one more row is `ROW` steps of one row, about twice the measured cost up to about ten
rows (docs/performance-log.md), so that a machine on which a row costs that much loses no more. Where many sequences
share a step, the price is a larger fraction of each sequence's share of that step.

Answers of a given form (grammar.py) or with bad words (bad_words.py) are not drafted, because the allowed tokens would
have to be known before the preceding ones are drawn.
Cost: a search for the last `SHORTEST` to `LONGEST` tokens, 20 microseconds where the text has ten thousand.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from fp8serve.engine.sequence import Sequence

SHORTEST, LONGEST = 1, 8  # tokens that are looked for
FIRST, LEAST = 4, 3  # tokens of the first draft, and of one after a draft that was wrong
ROW = 0.16  # twice what was measured
ALLOWANCE = 0.03
START, MOST = 1.0, 4.0  # steps on the balance at first, and at most
CHARACTERS = 0x110000


@dataclass(slots=True)
class Balance:
    """The steps that may be spent on drafts."""

    steps: float = START
    most: float = MOST

    def add(self, steps: float) -> None:
        self.steps = min(self.most, self.steps + steps)

    def affords(self, price: float) -> int:
        """How many tokens of this price it pays for."""
        return max(0, int(self.steps / price))


class Drafter:
    """Makes the drafts of one sequence, at most `most` tokens at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._length = min(FIRST, most)
        self._balance = Balance()
        self._price = 0.0  # of a token of the last draft
        self._text = ""  # a character for each token, because a search for some runs at the speed of memory

    def propose(self, token_ids: Items[int], room: int, rows: int) -> list[int]:
        """At most `room` tokens that may follow `token_ids`, in a step that has `rows` rows without drafts."""
        self._price = price(rows)
        self._balance.add(ALLOWANCE)
        length = min(self._length, room, self._balance.affords(self._price))
        if length < 1:
            return []
        self._text += "".join([chr(token % CHARACTERS) for token in token_ids[len(self._text) :]])
        after = self._last_time()
        if after is None:
            return []
        tokens = token_ids[after:]
        return [tokens[i % len(tokens)] for i in range(length)]

    def learn(self, drafted: int, accepted: int) -> None:
        """Records that the first `accepted` of the last draft were right. After a draft that was all right, the next
        may be twice as long."""
        self._balance.add(accepted - drafted * self._price)
        self._length = min(self._most, 2 * drafted if accepted == drafted else max(LEAST, accepted + 1))

    def _last_time(self) -> int | None:
        """Where the longest known ending of the text ended the last time; None where there is none."""
        best, end = None, len(self._text) - 1
        for length in range(SHORTEST, LONGEST + 1):
            start = self._text.rfind(self._text[-length:], 0, end)
            if start < 0:
                break
            best = end = start + length
        return best


def price(rows: int) -> float:
    """The price of another row in a step of `rows`, in steps of one sequence."""
    return rows * ROW / (1 + (rows - 1) * ROW)


def rows_of(seq: Sequence, draft: Items[int]) -> list[Sequence]:
    """The sequences for which the sampler draws: `seq`, and `seq` with one, two, ... of the drafted tokens."""
    extended = [replace(seq, token_ids=[*seq.token_ids, *draft[: i + 1]]) for i in range(len(draft))]
    return [seq, *extended]
