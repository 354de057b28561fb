"""One call of an encoder's engine as the routes make it: admitted, its faults told, its tokens counted."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from fp8serve.errors import Fp8ServeError, RequestError
from fp8serve.server.access.limits import Visit
from fp8serve.server.faults import Code, Fault
from fp8serve.server.schemas.embedding_bodies import Truncating
from fp8serve.server.serving.admission import Outcome, Places
from fp8serve.server.serving.served import Served

T = TypeVar("T")
_OK: Outcome = "ok"
_FAILED: Outcome = "failed"


async def at_once(ask: Callable[[], Awaitable[T]], tokens: Sequence[int], places: Places, visit: Visit) -> T:
    """The engine's answer to texts of so many tokens. Fault: it refuses them, has stopped, or they are too many."""
    visit.set_aside(sum(tokens))
    (ticket,), outcome = places.take([sum(tokens)]), _FAILED  # one place, however many its texts are
    try:
        visit.usage.prompt += sum(tokens)
        found = await ask()
        outcome = _OK
        return found
    except RequestError as error:
        raise Fault(Code.INVALID_PARAMETER, str(error)) from None
    except Fp8ServeError as error:
        raise Fault(Code.ENGINE_DOWN, f"The engine stopped while it was answering: {error}", retry_after=2) from None
    finally:
        ticket.close(outcome)


def most_tokens(body: Truncating, served: Served, *, is_pair: bool) -> int | None:
    """How many tokens of a text, or a pair, are read; None: all. Fault: more than the model reads, or too few for a
    text."""
    longest, most = served.engine.limits.max_model_len, body.most(served.engine.limits.max_model_len)
    if most is None or most == longest:
        return most
    message, around = "", served.tokenizer.around[is_pair]
    if most > longest:
        message = f"truncate_prompt_tokens is {most}, but this model reads {longest} tokens of a text at most."
    elif most <= around:
        message = f"truncate_prompt_tokens is {most}, and {around} tokens stand around the text alone; read more."
    if message:
        raise Fault(Code.INVALID_PARAMETER, message, param="truncate_prompt_tokens")
    return most


def usage(tokens: int) -> dict[str, int]:
    """OpenAI's usage of a request that reads tokens and generates none."""
    return {"prompt_tokens": tokens, "total_tokens": tokens}
