"""`/v1/responses`: OpenAI's newer wire, on the same pipeline as all conversations."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from fp8serve.server.api.answer_pipeline import respond
from fp8serve.server.api.bounded_route import BoundedRoute
from fp8serve.server.api.chat.chat_request import parse_chat, translated
from fp8serve.server.api.dependencies import StateDep
from fp8serve.server.api.items.response_renderer import ResponseRenderer
from fp8serve.server.api.items.response_requests import chat_of
from fp8serve.server.api.wire import STREAM_RESPONSE
from fp8serve.server.schemas.item_bodies import ResponsesBody
from fp8serve.server.schemas.openai_bodies import ChatBody
from fp8serve.server.serving.generation import Generation

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=BoundedRoute)


@router.post("/responses", summary="Answer with items", response_model=None, responses=STREAM_RESPONSE)
async def responses(body: ResponsesBody, request: Request, state: StateDep) -> Response:
    """Messages, calls of tools and reasoning. Nothing is stored: each request brings the whole conversation."""

    def render(chat: ChatBody, generation: Generation, request_id: str) -> ResponseRenderer:
        return ResponseRenderer(body, chat, generation, request_id)

    chat = translated(chat_of, body)
    return await respond(chat, parse_chat, render, request, state, stream=bool(body.stream))
