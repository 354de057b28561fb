"""The message of one choice as it grows: reasoning, content, tool calls, and the deltas of a stream that bring them."""

from collections.abc import Callable

from fp8serve.engine.output import RequestOutput
from fp8serve.server.answers.choice import AnswerReader
from fp8serve.server.answers.feed import Arguments, Call, Content, Part, Reasoning
from fp8serve.server.api.answer_pipeline import JsonObject


class ChatAnswer:
    """Takes in what a model writes. `new_id` names a call."""

    def __init__(self, reader: AnswerReader, new_id: Callable[[], str]) -> None:
        self._reader, self._new_id = reader, new_id
        self._reasoning = self._content = ""
        self._calls: list[JsonObject] = []
        self._unsent: list[JsonObject] = []

    def take(self, output: RequestOutput) -> None:
        for part in self._reader.take(output.text_delta, ends=output.finish_reason is not None):
            self._add(part)

    def drain(self) -> list[JsonObject]:
        """The deltas that were not asked for yet."""
        deltas, self._unsent = self._unsent, []
        return deltas

    def message(self) -> JsonObject:
        """All that came. Without text, the content is null beside calls."""
        said: JsonObject = {"role": "assistant", "content": self._content, "refusal": None}
        if self._reasoning:
            said |= _reasoning(self._reasoning)
        if self._calls:
            said |= {"content": self._content or None, "tool_calls": self._calls}
        return said

    def finish(self, reason: str | None) -> str | None:
        """Why the answer ended, as OpenAI says it."""
        return "tool_calls" if reason == "stop" and self._calls else reason

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


def _reasoning(text: str) -> JsonObject:
    """Under both names that clients look for."""
    return {"reasoning_content": text, "reasoning": text}
