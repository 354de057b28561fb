"""The message of one choice as it grows: reasoning, content and tool calls, and their deltas in a stream."""

import json
from collections.abc import Callable

from fp8serve.engine.output import RequestOutput
from fp8serve.server.answers.choice import AnswerReader
from fp8serve.server.answers.feed import Arguments, Call, Content, Part, Reasoning
from fp8serve.server.api.answer_pipeline import JsonObject


class ChatAnswer:
    """Takes the parts of an answer. `new_id` makes the id of a call."""

    def __init__(self, reader: AnswerReader, new_id: Callable[[], str]) -> None:
        self._reader, self._new_id = reader, new_id
        self._reasoning = self._content = ""
        self._calls: list[JsonObject] = []
        self._unsent: list[JsonObject] = []
        self._stopped_by: str | int | None = None

    def take(self, output: RequestOutput) -> None:
        self._stopped_by = output.stop_reason
        ends = output.finish_reason is not None
        for part in self._reader.take(output.text_delta, ends, output.is_cut_off):
            self._add(part)

    def drain(self) -> list[JsonObject]:
        """The deltas since the last call."""
        deltas, self._unsent = self._unsent, []
        return deltas

    def message(self) -> JsonObject:
        """The whole message. Beside calls, the content is null if there is no text."""
        said: JsonObject = {"role": "assistant", "content": self._content, "refusal": None}
        if self._reasoning:
            said |= _reasoning(self._reasoning)
        if self._calls:
            said |= {"content": self._content or None, "tool_calls": self._calls}
        return said

    def finish(self, reason: str | None) -> str | None:
        """OpenAI's finish reason: `tool_calls` only if no stop string cut off the last call."""
        return "tool_calls" if reason == "stop" and self._calls and not self._is_cut else reason

    @property
    def _is_cut(self) -> bool:
        return isinstance(self._stopped_by, str) and not _is_json(self._calls[-1]["function"]["arguments"])

    def _add(self, part: Part) -> None:
        if isinstance(part, Content):
            self._content += part.text
            self._unsent.append({"content": part.text})
        elif isinstance(part, Reasoning):
            self._reasoning += part.text
            self._unsent.append(_reasoning(part.text))
        elif isinstance(part, Call):
            self._begin_call(part.name)
        else:
            self._add_arguments(part)

    def _begin_call(self, name: str) -> None:
        call = {"id": self._new_id(), "type": "function", "function": {"name": name, "arguments": ""}}
        self._calls.append(call)
        first = call | {"function": {"name": name, "arguments": ""}}  # the other one grows
        self._unsent.append({"tool_calls": [{"index": len(self._calls) - 1} | first]})

    def _add_arguments(self, part: Arguments) -> None:
        self._calls[-1]["function"]["arguments"] += part.text
        piece = {"index": len(self._calls) - 1, "function": {"arguments": part.text}}
        self._unsent.append({"tool_calls": [piece]})


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _reasoning(text: str) -> JsonObject:
    """Reasoning under both names that clients look for."""
    return {"reasoning_content": text, "reasoning": text}
