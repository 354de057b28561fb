"""`/v1/messages`: Anthropic's wire, on the same pipeline as all conversations."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from fp8serve.server.api.answer_pipeline import respond
from fp8serve.server.api.anthropic.message_renderer import MessageRenderer
from fp8serve.server.api.anthropic.message_requests import chat_of, conversation_of, parse_message
from fp8serve.server.api.bounded_route import BoundedRoute
from fp8serve.server.api.chat.chat_request import template_variables, translated
from fp8serve.server.api.dependencies import StateDep
from fp8serve.server.api.wire import STREAM_RESPONSE
from fp8serve.server.http.streams import until_disconnect
from fp8serve.server.schemas.anthropic_bodies import CountBody, MessagesBody

router = APIRouter(prefix="/v1/messages", tags=["Anthropic"], route_class=BoundedRoute)


@router.post("", summary="Answer a conversation", response_model=None, responses=STREAM_RESPONSE)
async def messages(body: MessagesBody, request: Request, state: StateDep) -> Response:
    """One message of text, thinking and calls of tools."""
    chat = translated(chat_of, body)
    return await respond(chat, parse_message, MessageRenderer, request, state, stream=bool(body.stream))


@router.post("/count_tokens", summary="Count the tokens of a conversation", response_model=None)
async def count_tokens(body: CountBody, request: Request, state: StateDep) -> dict[str, int]:
    """The tokens of an answer's prompt, cached or not; it may be more than the context holds."""
    chat = translated(conversation_of, body)
    served = state.models.resolve(chat.model)
    state.parser.sizes(served.engine.limits.max_model_len).check(chat)
    with served.lease():
        asked = state.parser.count(served, chat.messages, template_variables(chat), chat.ending)
        return {"input_tokens": await until_disconnect(request, asked)}
