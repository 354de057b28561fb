"""The part of a `response` object that repeats the request, with the values chosen where it said nothing."""

from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.server.api.answer_pipeline import JsonObject
from fp8serve.server.schemas.bodies import Strict
from fp8serve.server.schemas.item_bodies import ResponsesBody


def asked_for(body: ResponsesBody, params: SamplingParams, model: str) -> JsonObject:
    """The fields of the request. Nothing is stored, runs in the background, or truncates a prompt."""
    return {
        "model": model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "tool_choice": _choice(body),
        "text": {"format": _form(body)},
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "metadata": body.metadata or {},
        "user": body.user,
        "previous_response_id": None,
        "store": False,
        "background": False,
        "truncation": "disabled",
    }


def _choice(body: ResponsesBody) -> str | JsonObject:
    choice = body.tool_choice
    return choice.model_dump() if isinstance(choice, Strict) else choice or "auto"


def _form(body: ResponsesBody) -> JsonObject:
    form = body.text and body.text.format
    return {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
