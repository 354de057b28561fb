"""The pieces of a chat answer, as they come: text, reasoning, tool calls.

Servers use two names for reasoning (`reasoning_content`, `reasoning`). Calls come in fragments, the name first.
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
    kind: Kind
    text: str
    opens: bool = False  # a tool call: `text` is its name, and the following pieces are its arguments


def chat_pieces(api: Api, body: dict[str, Any]) -> Iterator[Piece]:
    """The answer to a body of /v1/chat/completions. ServerError when it is refused, or breaks off."""
    ended = False
    with closing(api.objects("/v1/chat/completions", {**body, "stream": True})) as events:  # type: ignore[type-var]
        for event in events:
            try:
                for choice in event.get("choices") or ():
                    ended = ended or choice.get("finish_reason") is not None
                    yield from pieces(choice.get("delta") or {})
            except (AttributeError, TypeError):
                raise ServerError(f"The server sent an event that is not OpenAI's: {shown(event)}.") from None
    if not ended:
        raise ServerError("The server broke off before the end of its answer.")


def pieces(delta: dict[str, Any]) -> Iterator[Piece]:
    """Those of one event's `delta`."""
    if thought := delta.get("reasoning_content") or delta.get("reasoning"):
        yield Piece("reasoning", str(thought))
    if text := delta.get("content") or delta.get("refusal"):
        yield Piece("text", str(text))
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        if name := function.get("name"):
            yield Piece("tool", str(name), opens=True)
        if arguments := function.get("arguments"):
            yield Piece("tool", str(arguments))


WIRE_NAMES = {"max_new_tokens": "max_tokens", "regex": "guided_regex"}


def complete(api: Api, model: str | None, prompts: Sequence[str], sampling: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Text and reason of the end for each prompt. `sampling`: fields of SamplingParams; ServerError as `Api` has it."""
    body = {"model": model or api.first_model(), "prompt": list(prompts) if len(prompts) > 1 else prompts[0]}
    answer = api.post("/v1/completions", body | _body(sampling))
    try:
        choices = {choice.get("index", 0): choice for choice in answer["choices"]}
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


def _body(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """A schema is written in OpenAI's form, a regular expression in vLLM's."""
    body = {WIRE_NAMES.get(name, name): value for name, value in sampling.items()}
    if (schema := body.pop("json_schema", None)) is not None:
        form = {"name": "answer", "schema": json.loads(schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    return body
