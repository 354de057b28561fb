"""One call of an encoder's engine as the routes make it: admitted, its faults told, its tokens counted."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from fp8serve.errors import Fp8ServeError, RequestError
from fp8serve.server.access.limits import Visit
from fp8serve.server.faults import Code, Fault
from fp8serve.server.serving.admission import Outcome, Places

T = TypeVar("T")
_OK: Outcome = "ok"
_FAILED: Outcome = "failed"


async def at_once(ask: Callable[[], Awaitable[T]], tokens: Sequence[int], places: Places, visit: Visit) -> T:
    """What the engine answers to texts of so many tokens. Fault: it refuses them, or stopped, or they are too many."""
    visit.set_aside(sum(tokens))
    (ticket,), outcome = places.take([sum(tokens)]), _FAILED  # one place, however many its texts: none waits for all
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


def usage(tokens: int) -> dict[str, int]:
    """As OpenAI counts what is read and not answered."""
    return {"prompt_tokens": tokens, "total_tokens": tokens}
