"""Verifies weights before they serve: weights in a new engine process, or weights copied over the served ones.

All numbers in their files must be finite, and the engine must have generated a token while it loaded. If rows are
given, it must also generate a few tokens after the first row, and the perplexity of the new weights on the rows must
not exceed a multiple of the previous weights' perplexity. The rows are those of the fine-tune job, held-out ones if it
has any, or texts of the request. The previous weights are measured between the requests of clients. A model that is
loaded in addition replaces nothing, so only its files and its first token are checked.
"""

import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import Fp8ServeError, MachineError, ModelError
from fp8serve.model.storage.headers import require_finite
from fp8serve.server.serving.served_weights import ServedWeights

MAX_TEST_TOKENS = 8  # tokens that new weights generate before they may serve
_REQUEST_NUMBERS = itertools.count()


@dataclass(frozen=True)
class MeasuredRow:
    """The token ids of a row, and for each token whether it counts in the perplexity."""

    ids: tuple[int, ...]
    counts: tuple[bool, ...]


@dataclass(frozen=True)
class Verified:
    """The result of a verification: the number of measured tokens, and the perplexities of new and previous weights."""

    tokens: int
    perplexity: float
    perplexity_before: float | None


@dataclass(frozen=True)
class Verification:
    """The checks that new weights must pass.

    Args:
        rows: The rows on which perplexity is measured. If there are none, only the files are checked here; loading the
            engine has already generated a token.
        max_ratio: The largest allowed ratio of the new weights' perplexity to that of the previous weights.
        seconds: The time limit for measuring.
        checks_files: Whether the files are checked for NaN and infinity.
        rows_name: What messages call the rows.
    """

    rows: Sequence[MeasuredRow]
    max_ratio: float
    seconds: float
    checks_files: bool = True
    rows_name: str = "the job's rows"

    async def check_files(self, directory: Path) -> None:
        """Raises ModelError if a number in the files is not finite."""
        if self.checks_files:
            await asyncio.to_thread(require_finite, directory)

    async def check_engine(self, new: ServedWeights, previous: ServedWeights | None) -> Verified | None:
        """Returns the measured perplexities, or None without rows. Raises Fp8ServeError if the check fails."""
        async with self._deadline():
            rows = self._measurable_rows(new)
            if (measured := await self._measure(new, rows)) is None:
                return None
            is_comparable = previous is not None and previous.engine.limits.vocab_size == new.engine.limits.vocab_size
            return self._compare(*measured, await _perplexity_of_served(previous if is_comparable else None, rows))

    async def measure_previous(self, served: ServedWeights) -> float | None:
        """Returns the perplexity of the served weights before others overwrite them, or None if it cannot be measured.

        Raises MachineError if measuring exceeds the time limit.
        """
        async with self._deadline():
            rows = self._measurable_rows(served)
            return await _perplexity_of_served(served, rows) if rows else None

    async def check_overwritten(self, new: ServedWeights, previous_perplexity: float | None) -> Verified | None:
        """Does the same as `check_engine` for weights that overwrote those with `previous_perplexity`."""
        async with self._deadline():
            measured = await self._measure(new, self._measurable_rows(new))
            return None if measured is None else self._compare(*measured, previous_perplexity)

    @contextlib.asynccontextmanager
    async def _deadline(self) -> AsyncGenerator[None, None]:
        try:
            async with asyncio.timeout(self.seconds):
                yield
        except TimeoutError:
            raise MachineError(f"The weights were not verified within {self.seconds:g} seconds.") from None

    def _measurable_rows(self, served: ServedWeights) -> list[MeasuredRow]:
        """Returns the rows that fit the context of a generating model; none for other models."""
        limits = served.engine.limits
        return [row for row in self.rows if len(row.ids) < limits.max_model_len] if limits.generates else []

    async def _measure(self, new: ServedWeights, rows: Sequence[MeasuredRow]) -> tuple[int, float] | None:
        """Returns the number of measured tokens and their perplexity, or None without rows."""
        if not rows:
            return None
        test_params = SamplingParams(max_new_tokens=MAX_TEST_TOKENS, temperature=0.0, ignore_eos=True)
        await _run(new, rows[0].ids[:1], test_params)
        tokens, perplexity = await _perplexity(new, rows)
        if not math.isfinite(perplexity):
            raise ModelError(f"Their perplexity on {tokens} tokens of {self.rows_name} is {perplexity}.")
        return tokens, perplexity

    def _compare(self, tokens: int, perplexity: float, previous: float | None) -> Verified:
        if previous is not None and perplexity > self.max_ratio * previous:
            raise ModelError(
                f"Their perplexity on {tokens} tokens of {self.rows_name} is {perplexity:.4g}, more than "
                f"{self.max_ratio:g} times the {previous:.4g} of the previous weights (max_perplexity_ratio)."
            )
        return Verified(tokens, perplexity, previous)


UNVERIFIED = Verification((), math.inf, math.inf, checks_files=False)
"""For weights that the operator named: they only have to load and to generate a token."""


async def _perplexity_of_served(served: ServedWeights | None, rows: Sequence[MeasuredRow]) -> float | None:
    """Returns the perplexity, or None if it cannot be measured: no weights, a row that is too long for them, an engine
    that ends meanwhile, or a perplexity that is not finite."""
    if served is None or any(len(row.ids) >= served.engine.limits.max_model_len for row in rows):
        return None
    try:
        with served.lease():
            _, perplexity = await _perplexity(served, rows)
    except (Fp8ServeError, OSError, EOFError):
        return None
    return perplexity if math.isfinite(perplexity) else None


async def _perplexity(served: ServedWeights, rows: Sequence[MeasuredRow]) -> tuple[int, float]:
    """Returns the number of tokens that count, and their perplexity.

    Rows are computed one after the other, so that a client's request waits for at most one of them.
    """
    count, total = 0, 0.0
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    for row in rows:
        log_probs = await _run(served, row.ids, params)  # of all tokens except the first one
        counted = [value for value, counts in zip(log_probs, row.counts[1:], strict=True) if counts]
        count, total = count + len(counted), total - math.fsum(counted)
    try:
        return count, math.exp(total / max(count, 1))
    except OverflowError:
        return count, math.inf


async def _run(served: ServedWeights, prompt: tuple[int, ...], params: SamplingParams) -> list[float]:
    """Runs a request and returns the prompt's log-probabilities, if `params` asks for them."""
    log_probs: list[float] = []
    request = Request(f"verification-{next(_REQUEST_NUMBERS)}", prompt, params, adapter=served.adapter)
    async with contextlib.aclosing(served.engine.generate(request)) as outputs:
        async for output in outputs:
            log_probs += [item.logprob for item in output.prompt_logprobs or ()]
            if output.finish_reason in ("error", "abort"):
                raise Fp8ServeError(output.error or "The engine cannot compute with these weights.")
    return log_probs
