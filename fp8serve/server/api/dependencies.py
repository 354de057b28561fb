"""Arguments of handlers other than bodies: the state of their server, and parameters that several routes share."""

from typing import Annotated

from fastapi import Depends, Header, Query, Request

from fp8serve.server.server_state import ServerState


def state_of(request: Request) -> ServerState:
    """The state that `create_app` made."""
    state: ServerState = request.app.state.server
    return state


StateDep = Annotated[ServerState, Depends(state_of)]
PageSize = Annotated[int, Query(ge=1, le=1000)]
IdempotencyKey = Annotated[str | None, Header(max_length=255)]
