"""Answers as items: a `response` object, or the events that build one, each with its number.

Reasoning is an item of its own, whose text comes as content; an answer that `max_output_tokens` cut off is
`incomplete`, and a stream that cannot go on ends with `response.failed`.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from fp8serve.engine.output import RequestOutput
from fp8serve.server.api.answer_pipeline import JsonObject, Renderer
from fp8serve.server.api.chat.passages import Change, Passage, Passages
from fp8serve.server.api.chat.tool_requests import answer_reader, call_id
from fp8serve.server.api.items.echo import asked_for
from fp8serve.server.faults import Fault
from fp8serve.server.http.streams import event
from fp8serve.server.schemas.item_bodies import ResponsesBody
from fp8serve.server.schemas.openai_bodies import ChatBody
from fp8serve.server.serving.generation import Generation

PREFIXES = {"content": "msg", "reasoning": "rs", "call": "fc"}
TEXT_EVENTS = {"content": "response.output_text", "reasoning": "response.reasoning_text"}


class ResponseRenderer(Renderer[list[Change]]):
    """`response` objects and the events of their streams."""

    def __init__(self, asked: ResponsesBody, body: ChatBody, generation: Generation, request_id: str) -> None:
        super().__init__(generation)
        self._created = int(time.time())
        self._asked = asked_for(asked, generation.requests[0].params, body.model or generation.served.source.model_id)
        self._passages = Passages(answer_reader(body, generation))
        self._new_id = partial(call_id, body, generation.served, "call")
        self._call_ids: list[str] = []
        self._sent = 0

    def add(self, index: int, output: RequestOutput) -> list[Change]:
        new = self._passages.take(output)
        self._call_ids += [self._new_id() for change in new if change.what == "begins"]
        return new

    def whole(self) -> JsonObject:
        return self._response(self._status, self._items()) | self._cost()

    def opening(self) -> Iterator[JsonObject]:
        for name in ("created", "in_progress"):
            yield self._numbered(f"response.{name}", response=self._response("in_progress", []))

    def events(self, index: int, output: RequestOutput, new: list[Change]) -> Iterator[JsonObject]:
        told = {"begins": self._begun, "grows": self._grown, "ends": self._ended}
        for change in new:
            yield from told[change.what](change)

    def closing(self) -> Iterator[JsonObject]:
        yield self._numbered(f"response.{self._status}", response=self.whole())

    def failure(self, fault: Fault) -> JsonObject:
        error = {"code": "server_error", "message": fault.told}
        response = self._response("failed", self._items()) | {"error": error}
        return self._numbered("response.failed", response=response)

    def encoded(self, item: JsonObject) -> bytes:
        return event(item, name=item["type"])

    # -- events --------------------------------------------------------------------------------------------------------

    def _numbered(self, kind: str, **fields: Any) -> JsonObject:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **fields}

    def _begun(self, change: Change) -> Iterator[JsonObject]:
        item = self._item(change.place, Passage(change.passage.kind, change.passage.name), "in_progress")
        empty = item | ({} if change.passage.kind == "call" else {"content": []})
        yield self._numbered("response.output_item.added", output_index=change.place, item=empty)
        if change.passage.kind != "call":
            yield self._numbered("response.content_part.added", **self._at(change), part=item["content"][0])

    def _grown(self, change: Change) -> Iterator[JsonObject]:
        kind = change.passage.kind
        if kind == "call":
            place = {"item_id": self._id(change.place, kind), "output_index": change.place}
            yield self._numbered("response.function_call_arguments.delta", **place, delta=change.text)
        else:
            more: JsonObject = {"logprobs": []} if kind == "content" else {}
            yield self._numbered(f"{TEXT_EVENTS[kind]}.delta", **self._at(change), delta=change.text, **more)

    def _ended(self, change: Change) -> Iterator[JsonObject]:
        kind, text = change.passage.kind, change.passage.text
        item = self._item(change.place, change.passage, self._item_status(change.place))
        if kind == "call":
            place = {"item_id": item["id"], "output_index": change.place}
            name = change.passage.name
            yield self._numbered("response.function_call_arguments.done", **place, name=name, arguments=text)
        else:
            more: JsonObject = {"logprobs": []} if kind == "content" else {}
            yield self._numbered(f"{TEXT_EVENTS[kind]}.done", **self._at(change), text=text, **more)
            yield self._numbered("response.content_part.done", **self._at(change), part=item["content"][0])
        yield self._numbered("response.output_item.done", output_index=change.place, item=item)

    def _at(self, change: Change) -> JsonObject:
        item = self._id(change.place, change.passage.kind)
        return {"item_id": item, "output_index": change.place, "content_index": 0}

    # -- items ---------------------------------------------------------------------------------------------------------

    def _items(self) -> list[JsonObject]:
        found = enumerate(self._passages.found)
        return [self._item(place, passage, self._item_status(place)) for place, passage in found]

    def _item(self, place: int, passage: Passage, status: str) -> JsonObject:
        made: dict[str, Callable[[int, Passage], JsonObject]]
        made = {"content": _message, "reasoning": _reasoning, "call": self._call}
        item = made[passage.kind](place, passage)
        return {"id": self._id(place, passage.kind), "status": status} | item

    def _call(self, place: int, passage: Passage) -> JsonObject:
        called = {"name": passage.name, "arguments": passage.text}
        return {"type": "function_call", "call_id": self._call_ids[place], **called}

    def _id(self, place: int, kind: str) -> str:
        return f"{PREFIXES[kind]}_{self.generation.id}_{place}"

    def _item_status(self, place: int) -> str:
        """The status of an item; only the last can be cut off."""
        return self._status if place == len(self._passages.found) - 1 else "completed"

    # -- the response --------------------------------------------------------------------------------------------------

    @property
    def _status(self) -> str:
        return "completed" if self._passages.finish == "stop" else "incomplete"

    def _response(self, status: str, output: list[JsonObject]) -> JsonObject:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        made = {"id": f"resp_{self.generation.id}", "object": "response", "created_at": self._created}
        ended = {"status": status, "error": None, "incomplete_details": cut, "output": output, "usage": None}
        return made | self._asked | ended

    def _cost(self) -> JsonObject:
        read, passages = self.generation.prompt_tokens, self._passages
        usage = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": passages.cached_tokens},
            "output_tokens": passages.tokens,
            "output_tokens_details": {"reasoning_tokens": passages.reasoning_tokens},
            "total_tokens": read + passages.tokens,
        }
        return {"usage": usage}


def _message(place: int, passage: Passage) -> JsonObject:
    part = {"type": "output_text", "text": passage.text, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "content": [part]}


def _reasoning(place: int, passage: Passage) -> JsonObject:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": passage.text}]}
