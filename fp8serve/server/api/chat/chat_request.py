"""Reads what a conversation asks for; other protocols' bodies are translated into a ChatBody first."""

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.server.api.answer_pipeline import ParsedRequest
from fp8serve.server.api.chat.tool_requests import fit, schemas_of
from fp8serve.server.schemas.openai_bodies import ChatBody
from fp8serve.server.schemas.tools import plain_tools
from fp8serve.server.serving.served import Served


def parse_chat(body: ChatBody) -> ParsedRequest:
    """A conversation; without a limit its answer may fill the context."""

    def sampling(room: int) -> SamplingParams:
        return body.params(body.token_limit or max(1, room))

    def fitted(served: Served, end: str, params: SamplingParams) -> SamplingParams:
        return fit(served, body, end, params)

    return ParsedRequest(
        sampling,
        conversation=body.messages,
        variables=template_variables(body),
        ending=body.ending,
        choices=body.returned,
        fitted=fitted,
        tools=schemas_of(body),
    )


def template_variables(body: ChatBody) -> dict[str, Any]:
    """Variables for the chat template, beside the messages; those that the body names itself come first."""
    effort, variables = body.reasoning_effort, dict[str, Any]()
    if effort is not None:
        variables["enable_thinking"] = effort != "none"
    if effort not in (None, "none"):
        variables["reasoning_effort"] = effort
    if body.documents is not None:
        variables["documents"] = body.documents
    return variables | (body.chat_template_kwargs or {}) | {"tools": plain_tools(body.offered)}


Theirs = TypeVar("Theirs")


def translated(translate: Callable[[Theirs], ChatBody], body: Theirs) -> ChatBody:
    """Another protocol's body as a chat request. RequestValidationError if its parts do not fit together."""
    try:
        return translate(body)
    except ValidationError as error:
        raise RequestValidationError([{**found, "loc": ("body", *found["loc"])} for found in error.errors()]) from None
