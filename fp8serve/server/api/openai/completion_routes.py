"""`/v1/completions` and `/v1/chat/completions`: OpenAI's wire, on the same pipeline as the native routes."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from fp8serve.server.api.answer_pipeline import respond
from fp8serve.server.api.bounded_route import BoundedRoute
from fp8serve.server.api.chat.chat_request import parse_chat
from fp8serve.server.api.dependencies import StateDep
from fp8serve.server.api.openai.completion_renderers import ChatRenderer, TextRenderer
from fp8serve.server.api.openai.completion_requests import parse_completion
from fp8serve.server.api.wire import STREAM_RESPONSE
from fp8serve.server.schemas.openai_bodies import ChatBody, CompletionBody

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=BoundedRoute)


@router.post("/completions", summary="Continue a text", response_model=None, responses=STREAM_RESPONSE)
async def completions(body: CompletionBody, request: Request, state: StateDep) -> Response:
    """One choice for each of `n` and each prompt."""
    return await respond(body, parse_completion, TextRenderer, request, state, stream=bool(body.stream))


@router.post("/chat/completions", summary="Continue a conversation", response_model=None, responses=STREAM_RESPONSE)
async def chat(body: ChatBody, request: Request, state: StateDep) -> Response:
    """Renders the conversation by the model's own template."""
    return await respond(body, parse_chat, ChatRenderer, request, state, stream=bool(body.stream))
