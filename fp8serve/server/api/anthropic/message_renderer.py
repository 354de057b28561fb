"""Answers as Anthropic writes them: a message of blocks, or the events that build one.

A block of thinking has an empty signature, because it is never checked. Arguments that are not a JSON object, because
`max_tokens` cut them off, come as `{"INVALID_JSON": text}` in an answer that is not streamed, which is the form in
which Anthropic advises to send them back.
"""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from fp8serve.engine.output import RequestOutput
from fp8serve.server.api.answer_pipeline import JsonObject, Renderer
from fp8serve.server.api.chat.passages import Change, Passage, Passages
from fp8serve.server.api.chat.tool_requests import answer_reader, call_id
from fp8serve.server.faults import Fault
from fp8serve.server.http.streams import event
from fp8serve.server.schemas.openai_bodies import ChatBody
from fp8serve.server.serving.generation import Generation

DELTAS = {"reasoning": ("thinking_delta", "thinking"), "content": ("text_delta", "text")}


class MessageRenderer(Renderer[list[Change]]):
    """`message` objects and the events of their streams."""

    def __init__(self, body: ChatBody, generation: Generation, request_id: str) -> None:
        super().__init__(generation)
        self._model = body.model or generation.served.source.model_id
        self._request_id, self._limit = request_id, body.max_tokens
        self._passages = Passages(answer_reader(body, generation))
        self._new_id = partial(call_id, body, generation.served, "toolu")
        self._started = False

    def add(self, index: int, output: RequestOutput) -> list[Change]:
        return self._passages.take(output)

    def whole(self) -> JsonObject:
        content = [self._begun(passage) | _filled(passage) for passage in self._passages.found]
        return self._message(content) | self._ending()

    def events(self, index: int, output: RequestOutput, new: list[Change]) -> Iterator[JsonObject]:
        """`message_start` comes with the first output, which tells how much of the prompt was cached."""
        if not self._started:
            self._started = True
            yield {"type": "message_start", "message": self._message([])}
            yield {"type": "ping"}
        for change in new:
            yield self._event(change)

    def closing(self) -> Iterator[JsonObject]:
        ending = self._ending()
        usage = ending.pop("usage")
        yield {"type": "message_delta", "delta": ending, "usage": usage}
        yield {"type": "message_stop"}

    def failure(self, fault: Fault) -> JsonObject:
        return fault.anthropic(self._request_id)

    def headers(self) -> dict[str, str]:
        """The header under which Anthropic's client looks for the request's id."""
        return {"request-id": self._request_id}

    def encoded(self, item: JsonObject) -> bytes:
        return event(item, name=item["type"])

    def _event(self, change: Change) -> JsonObject:
        if change.what == "begins":
            block = self._begun(change.passage)
            return {"type": "content_block_start", "index": change.place, "content_block": block}
        if change.what == "ends":
            return {"type": "content_block_stop", "index": change.place}
        kind, name = DELTAS.get(change.passage.kind, ("input_json_delta", "partial_json"))
        delta = {"type": kind, name: change.text}
        return {"type": "content_block_delta", "index": change.place, "delta": delta}

    def _begun(self, passage: Passage) -> JsonObject:
        """A block without its text."""
        if passage.kind == "call":
            return {"type": "tool_use", "id": self._new_id(), "name": passage.name, "input": {}}
        if passage.kind == "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "text", "text": "", "citations": None}

    def _message(self, content: list[JsonObject]) -> JsonObject:
        return {
            "id": f"msg_{self.generation.id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _ending(self) -> JsonObject:
        """Why the answer ended, and its usage."""
        passages, sequence = self._passages, None
        if passages.finish == "length":
            reason = "max_tokens" if passages.tokens == self._limit else "model_context_window_exceeded"
        elif isinstance(passages.stop, str):
            reason, sequence = "stop_sequence", passages.stop
        else:
            reason = "tool_use" if passages.calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence, "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        """Anthropic's `input_tokens` leaves out what was cached. Nothing is charged for filling the cache."""
        cached = self._passages.cached_tokens
        return {
            "input_tokens": self.generation.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._passages.tokens,
        }


def _filled(passage: Passage) -> JsonObject:
    """The text of a block, as fields of it."""
    if passage.kind == "call":
        return {"input": _arguments(passage.text)}
    return {"thinking" if passage.kind == "reasoning" else "text": passage.text}


def _arguments(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": text}
