"""Whether weights that were loaded beside those that serve, or written over them, may take their place.

All numbers in their files are finite; they write an answer; and on rows of their job, the held-out ones where it has
some, or on texts that were given, their perplexity is at most so many times that of what served before. Both compute
the same rows, what serves between the requests of its clients. A further model has no predecessor: of its files and its
first token more is not asked.
"""

import asyncio
import contextlib
import itertools
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import Fp8ServeError, MachineError, ModelError
from fp8serve.model.storage.headers import require_finite
from fp8serve.server.serving.served import Served

T = TypeVar("T")
ANSWER = 8  # tokens that are written before weights may serve
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class MeasuredRow:
    """Token ids of a row, and which of them count."""

    ids: tuple[int, ...]
    counts: tuple[bool, ...]


Before = Callable[[Sequence[MeasuredRow]], Awaitable[float | None]]


@dataclass(frozen=True)
class Verified:
    """What was measured: of how many tokens, and the perplexity of the new weights and of those that served."""

    tokens: int
    perplexity: float
    perplexity_before: float | None


@dataclass(frozen=True)
class Verification:
    """rows: what is measured; none: only that the weights are finite and write. ratio: how many times the perplexity of
    what serves that of the new weights may be. seconds: for both to be measured. what: a name of the rows."""

    rows: Sequence[MeasuredRow]
    ratio: float
    seconds: float
    reads_files: bool = True
    what: str = "the job's rows"

    async def files(self, directory: Path) -> None:
        """ModelError: a number is not finite."""
        if self.reads_files:
            await asyncio.to_thread(require_finite, directory)

    async def engines(self, new: Served, old: Served | None) -> Verified | None:
        """What was measured, if anything was. Fp8ServeError: the new weights are not to serve."""
        comparable = old is not None and old.engine.limits.vocab_size == new.engine.limits.vocab_size
        of = old if comparable else None
        return await self._in_time(self._measured(new, lambda rows: _perplexity_of_served(of, rows)))

    async def before(self, served: Served) -> float | None:
        """The perplexity of what serves, before others are written over it; None where there is none to compare with.
        MachineError: it took too long.
        """
        rows = self._rows_of(served)
        return await self._in_time(_perplexity_of_served(served, rows)) if rows else None

    async def written(self, new: Served, before: float | None) -> Verified | None:
        """As `engines`, of weights that were written over those whose perplexity was `before`."""

        async def known(_: Sequence[MeasuredRow]) -> float | None:
            return before

        return await self._in_time(self._measured(new, known))

    async def _in_time(self, measuring: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self.seconds):
                return await measuring
        except TimeoutError:
            raise MachineError(f"The weights were not verified within {self.seconds:g} seconds.") from None

    def _rows_of(self, served: Served) -> list[MeasuredRow]:
        """Those that its engine can measure."""
        limits = served.engine.limits
        return [row for row in self.rows if len(row.ids) < limits.max_model_len] if limits.generates else []

    async def _measured(self, new: Served, old: Before) -> Verified | None:
        """old: the perplexity before, on the rows that were measured."""
        if not (rows := self._rows_of(new)):
            return None
        await _write(new, rows[0].ids[:1])
        tokens, after = await _perplexity(new, rows)
        if not math.isfinite(after):
            raise ModelError(f"Their perplexity on {tokens} tokens of {self.what} is {after}.")
        before = await old(rows)
        if before is not None and after > self.ratio * before:
            raise ModelError(
                f"Their perplexity on {tokens} tokens of {self.what} is {after:.4g}, more than {self.ratio:g} times "
                f"the {before:.4g} of what serves (max_perplexity_ratio)."
            )
        return Verified(tokens, after, before)


UNVERIFIED = Verification((), math.inf, math.inf, reads_files=False)
"""Of weights that the operator names himself: whether they load and write a token is all that is asked."""


async def _write(served: Served, prompt: tuple[int, ...]) -> None:
    await _run(served, prompt, SamplingParams(max_new_tokens=ANSWER, temperature=0.0, ignore_eos=True))


async def _perplexity_of_served(served: Served | None, rows: Sequence[MeasuredRow]) -> float | None:
    """None where there is nothing to compare with: no engine, or one that ends meanwhile."""
    if served is None or any(len(row.ids) >= served.engine.limits.max_model_len for row in rows):
        return None
    try:
        with served.lease():
            _, perplexity = await _perplexity(served, rows)
    except (Fp8ServeError, OSError, EOFError):
        return None
    return perplexity if math.isfinite(perplexity) else None


async def _perplexity(served: Served, rows: Sequence[MeasuredRow]) -> tuple[int, float]:
    """(tokens that count, perplexity); one row after the other, so that clients wait for one at most."""
    count, total = 0, 0.0
    for row in rows:
        log_probs = await _log_probs(served, row.ids)
        some = [value for value, counts in zip(log_probs, row.counts[1:], strict=True) if counts]
        count, total = count + len(some), total - math.fsum(some)
    return count, _exp(total / max(count, 1))


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


async def _log_probs(served: Served, ids: tuple[int, ...]) -> list[float]:
    """Of all tokens but the first."""
    return await _run(
        served, ids, SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    )


async def _run(served: Served, prompt: tuple[int, ...], params: SamplingParams) -> list[float]:
    """The log-probabilities of the prompt's tokens, where they were asked for. Fp8ServeError: nothing comes of it."""
    log_probs: list[float] = []
    request = Request(f"verification-{next(_NUMBERS)}", prompt, params, adapter=served.adapter)
    async with contextlib.aclosing(served.engine.generate(request)) as outputs:
        async for output in outputs:
            log_probs += [item.logprob for item in output.prompt_logprobs or ()]
            if output.finish_reason in ("error", "abort"):
                raise Fp8ServeError(output.error or "The engine cannot compute with these weights.")
    return log_probs
