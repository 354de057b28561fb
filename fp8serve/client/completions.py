"""Requests completions from a server. Chat completions are streamed as pieces of text, reasoning and tool calls.

Servers have two names for reasoning, `reasoning_content` and `reasoning`. A tool call is streamed in fragments; the
first one holds the tool's name.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

from fp8serve.client.api import Api
from fp8serve.errors import ServerError, shown

Kind = Literal["text", "reasoning", "tool"]


@dataclass(frozen=True)
class Piece:
    """A fragment of a chat completion. If `starts_call` is true, `text` is a tool's name, and the next pieces hold the
    arguments of the call."""

    kind: Kind
    text: str
    starts_call: bool = False


def chat_pieces(api: Api, body: dict[str, Any]) -> Iterator[Piece]:
    """Streams a request to /v1/chat/completions. Raises ServerError if the server refuses the request or the stream
    breaks off."""
    is_finished = False
    with closing(api.objects("/v1/chat/completions", {**body, "stream": True})) as events:  # type: ignore[type-var]
        for event in events:
            try:
                for choice in event.get("choices") or ():
                    is_finished = is_finished or choice.get("finish_reason") is not None
                    yield from _delta_pieces(choice.get("delta") or {})
            except (AttributeError, TypeError):
                raise ServerError(f"The server sent an event unknown to OpenAI's API: {shown(event)}.") from None
    if not is_finished:
        raise ServerError("The server closed the stream before the end of its response.")


def _delta_pieces(delta: dict[str, Any]) -> Iterator[Piece]:
    if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
        yield Piece("reasoning", str(reasoning))
    if text := delta.get("content") or delta.get("refusal"):
        yield Piece("text", str(text))
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        if name := function.get("name"):
            yield Piece("tool", str(name), starts_call=True)
        if arguments := function.get("arguments"):
            yield Piece("tool", str(arguments))


API_NAMES = {"max_new_tokens": "max_tokens", "regex": "guided_regex"}  # fields of SamplingParams with another name


def complete(api: Api, model: str | None, prompts: Sequence[str], sampling: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Completes each prompt and returns the prompt, the text and the finish reason. `sampling` holds values of
    SamplingParams by field name. Raises ServerError if the request fails."""
    body = {"model": model or api.first_model(), "prompt": list(prompts) if len(prompts) > 1 else prompts[0]}
    response = api.post("/v1/completions", body | _sampling_fields(sampling))
    try:
        choices = {choice.get("index", 0): choice for choice in response["choices"]}
        return [
            {
                "prompt": prompt,
                "text": str(choices[index]["text"]),
                "finish_reason": choices[index].get("finish_reason"),
            }
            for index, prompt in enumerate(prompts)
        ]
    except (AttributeError, KeyError, TypeError):
        raise ServerError("/v1/completions did not return one completion per prompt.") from None


def _sampling_fields(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Renames sampling parameters to the fields of OpenAI's API, or of vLLM's if OpenAI's has none."""
    fields = {API_NAMES.get(name, name): value for name, value in sampling.items()}
    if (schema := fields.pop("json_schema", None)) is not None:
        json_schema = {"name": "answer", "schema": json.loads(schema)}
        fields["response_format"] = {"type": "json_schema", "json_schema": json_schema}
    return fields
