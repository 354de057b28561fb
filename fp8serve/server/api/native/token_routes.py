"""Texts to token ids and back, by the tokenizer of the model that is served."""

import json
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from fp8serve.server.api.bounded_route import BoundedRoute
from fp8serve.server.api.dependencies import StateDep
from fp8serve.server.http.streams import until_disconnect
from fp8serve.server.parsing.request_parser import plain
from fp8serve.server.schemas.generation_bodies import DetokenizeBody, TokenizeBody
from fp8serve.server.schemas.messages import ending_of
from fp8serve.server.schemas.tools import plain_tools
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.served import Served

router = APIRouter(tags=["generation"], route_class=BoundedRoute)


@router.post("/tokenize", summary="Text or messages to token ids", response_model=None)
async def tokenize(body: TokenizeBody, request: Request, state: StateDep) -> Response:
    """The ids that generation would see for the same text."""
    served = state.models.resolve(body.model)
    text = plain(body.messages) if body.messages is not None else (body.prompt or "").encode()
    asked = {
        "special": body.add_special_tokens,
        "ending": ending_of(body.messages or [], body.add_generation_prompt, body.continue_final_message),
        "variables": (body.chat_template_kwargs or {}) | {"tools": plain_tools(body.tools)},
    }
    head = {"op": "tokenize", "messages": body.messages is not None, "strings": body.return_token_strs, **asked}
    return await _rendered(state, request, served, head, text)


@router.post("/detokenize", summary="Token ids to text", response_model=None)
async def detokenize(body: DetokenizeBody, request: Request, state: StateDep) -> Response:
    served = state.models.resolve(body.model)
    state.parser.sizes(served.engine.limits.max_model_len).check(body)
    head = {"op": "detokenize", "skip": body.skip_special_tokens}
    return await _rendered(state, request, served, head, json.dumps(body.tokens).encode())


async def _rendered(
    state: ServerState, request: Request, served: Served, head: dict[str, Any], text: bytes
) -> Response:
    with served.lease():
        content = await until_disconnect(request, state.parser.render(served, head, text))
    return Response(content, media_type="application/json")
