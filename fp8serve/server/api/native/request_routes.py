"""Lists the requests that engines are computing, and lets an operator end one.

A row is an HTTP request with all its answers. It tells who asked, for how much, and how far it is, but shows no prompt
and no answer. Prompts that are still being tokenized, embeddings and classes are not listed.
"""

import logging
import time
from typing import Any

from fastapi import APIRouter

from fp8serve.server.api.bounded_route import BoundedRoute
from fp8serve.server.api.dependencies import StateDep
from fp8serve.server.faults import Code, Fault
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.generation import Generation

log = logging.getLogger("fp8serve.server")
router = APIRouter(tags=["server"], route_class=BoundedRoute)
LISTED = 200


@router.get("/requests", summary="The requests that are being answered, oldest first")
async def requests(state: StateDep) -> dict[str, Any]:
    found = _under_way(state)
    return {"requests": [request_view(generation) for generation in found[:LISTED]], "total": len(found)}


@router.post("/requests/{request_id}/cancel", summary="End a request that is being answered")
async def cancel(request_id: str, state: StateDep) -> dict[str, Any]:
    """Its client gets an error with the code request_cancelled. `request_id`: the `id` of GET /requests."""
    for generation in _under_way(state):
        if generation.id == request_id:
            view = request_view(generation)
            generation.fail(Fault(Code.REQUEST_CANCELLED, "An operator of this server cancelled the request."))
            log.info(
                "cancelled request %s of tenant %s after %d tokens",
                *(view[name] for name in ("request_id", "tenant", "generated_tokens")),
            )
            return view
    raise Fault(
        Code.REQUEST_NOT_FOUND, "No request of that id is being answered; it may have ended.", param="request_id"
    )


def _under_way(state: ServerState) -> list[Generation]:
    return sorted((one for one in state.active if one.under_way), key=lambda one: one.started)


def request_view(generation: Generation) -> dict[str, Any]:
    """A request as these routes show it."""
    usage = generation.usage
    return {
        "id": generation.id,
        "request_id": usage.request_id,
        "tenant": usage.tenant,
        "model": generation.served.source.model_id,
        "age": time.perf_counter() - generation.started,
        "state": generation.state,
        "answers": len(generation.requests),
        "prompt_tokens": generation.prompt_tokens,
        "generated_tokens": generation.generated,
        "max_new_tokens": sum(request.params.max_new_tokens for request in generation.requests),
    }
