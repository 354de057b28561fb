"""Guesses at what comes next, made without a model: what followed when the text last read as its end does now.

Answers that repeat their prompt or themselves (summaries, edits, code) are guessed well that way. The model computes a
draft in the step that computes the token before it, and draws after each of these tokens as it always does. As long as
it draws what the draft has, the step is worth another token; the first other one ends it, and what was computed behind
that is overwritten. A draw depends on the request's seed and the place in its answer (sampler.py), and a row on nothing
but its sequence (invariant.py), so answers have every bit that they have without drafts.

A drafted token costs time, so it is bought. A sequence has a balance, in steps of its own: it begins with a little,
grows by `ALLOWANCE` a step, pays for every token that it drafts, and earns one for each that is right. Nothing is
drafted that it cannot pay: what finds nothing to repeat loses `ALLOWANCE` of its time, and `START` steps in all. The
price of one more row is `ROW` steps of one row, about twice what it costs up to some ten rows
(docs/performance-log.md), so that a machine on which it costs that much loses no more; where many sequences share a
step, it is a larger share of what each pays for that step.

Not drafted: answers of a given form (grammar.py) or without bad words (bad_words.py), because what may come would have
to be found ahead of what was drawn.
Cost: a search for the last `SHORTEST` to `LONGEST` tokens, 20 microseconds where the text has ten thousand.
"""

from collections.abc import Sequence as Items
from dataclasses import replace

from fp8serve.engine.sequence import Sequence

SHORTEST, LONGEST = 1, 8  # tokens that are looked for
FIRST, LEAST = 4, 3  # tokens of the first draft, and of one after a draft that was wrong
ROW = 0.16  # twice what was measured
ALLOWANCE = 0.03
START, MOST = 1.0, 4.0  # steps on the balance at first, and at most
CHARACTERS = 0x110000


class Drafter:
    """What drafts for one sequence, at most `most` tokens at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._length = min(FIRST, most)
        self._balance = START
        self._price = 0.0  # of a token of the last draft
        self._text = ""  # a character for each token, because a search for some runs at the speed of memory

    def propose(self, token_ids: Items[int], room: int, rows: int) -> list[int]:
        """At most `room` tokens that may follow `token_ids`, in a step that has `rows` rows without drafts."""
        self._balance, self._price = min(MOST, self._balance + ALLOWANCE), price(rows)
        length = min(self._length, room, int(self._balance / self._price))
        if length < 1:
            return []
        self._text += "".join([chr(token % CHARACTERS) for token in token_ids[len(self._text) :]])
        after = self._last_time()
        return [] if after is None else _repeated(token_ids[after:], length)

    def learn(self, drafted: int, accepted: int) -> None:
        """Of the tokens drafted last the first `accepted` were right. All of them: the next may be twice as many."""
        self._balance = min(MOST, self._balance + accepted - drafted * self._price)
        self._length = min(self._most, 2 * drafted if accepted == drafted else max(LEAST, accepted + 1))

    def _last_time(self) -> int | None:
        """Where the longest known ending of the text ended the last time; None where there is none."""
        found, end = None, len(self._text) - 1
        for length in range(SHORTEST, LONGEST + 1):
            start = self._text.rfind(self._text[-length:], 0, end)
            if start < 0:
                break
            found = end = start + length
        return found


def price(rows: int) -> float:
    """Of another row in a step of `rows`, in steps of one sequence."""
    return rows * ROW / (1 + (rows - 1) * ROW)


def _repeated(tokens: Items[int], length: int) -> list[int]:
    """The first `length` tokens of `tokens` said over and over."""
    return [tokens[i % len(tokens)] for i in range(length)]


def rows_of(seq: Sequence, draft: Items[int]) -> list[Sequence]:
    """`seq`, and as it will be with each of the drafted tokens: what the sampler is to draw for."""
    ahead = [replace(seq, token_ids=[*seq.token_ids, *draft[: i + 1]]) for i in range(len(draft))]
    return [seq, *ahead]
