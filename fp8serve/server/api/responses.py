"""OpenAI's newer wire: `/v1/responses`, on the same pipeline as all conversations.

A body becomes the chat request that all families share: reasoning, a message and calls of the assistant that follow
each other are one message of a chat. An answer is a `response` object of items, or the events that build one, each with
its number. Reasoning is an item of its own, whose text comes as content; an answer that `max_output_tokens` cut off is
`incomplete`, and a stream that cannot go on ends with `response.failed`.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from fp8serve.engine.output import RequestOutput
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.server.api.answer_pipeline import Renderer, respond
from fp8serve.server.api.chat_generation import (
    Change,
    Passage,
    Passages,
    answer_reader,
    call_id,
    generate_chat,
    translated,
)
from fp8serve.server.api.routing import STREAM, Answer, BoundedRoute, CachedTokens, JsonObject, StateDep
from fp8serve.server.faults import Fault
from fp8serve.server.http.streams import event
from fp8serve.server.schemas import item_bodies as b
from fp8serve.server.schemas.answer_form import JsonSchema, JsonSchemaFormat, ResponseFormat
from fp8serve.server.schemas.bodies import Strict
from fp8serve.server.schemas.messages import (
    Allowed,
    AllowedTools,
    CalledFunction,
    Function,
    FunctionName,
    Message,
    NamedTool,
    Tool,
    ToolCall,
    ToolChoice,
)
from fp8serve.server.schemas.openai_bodies import ChatBody
from fp8serve.server.serving.generation import Generation

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=BoundedRoute)


# -- answers -----------------------------------------------------------------------------------------------------------

Status = Literal["completed", "incomplete"]


class OutputText(Answer):
    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[None]


class OutputMessage(Answer):
    id: str
    status: Status
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(Answer):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Answer):
    id: str
    status: Status
    type: Literal["reasoning"]
    summary: list[None]
    content: list[ReasoningText]


class OutputCall(Answer):
    id: str
    status: Status
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ReasoningTokens(Answer):
    reasoning_tokens: int


class ItemUsage(Answer):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class Incomplete(Answer):
    reason: Literal["max_output_tokens"]


class ResponseReasoning(Answer):
    effort: str | None
    summary: None


class ResponseText(Answer):
    format: JsonObject


class ItemResponse(Answer):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    parallel_tool_calls: bool
    tools: list[JsonObject]
    tool_choice: str | JsonObject
    text: ResponseText
    reasoning: ResponseReasoning
    metadata: dict[str, str]
    user: str | None
    previous_response_id: None
    store: Literal[False]
    background: Literal[False]
    truncation: Literal["disabled"]
    status: Status
    error: None
    incomplete_details: Incomplete | None
    output: list[OutputMessage | OutputReasoning | OutputCall]
    usage: ItemUsage


# -- bodies ------------------------------------------------------------------------------------------------------------


def chat_of(body: b.ResponsesBody) -> ChatBody:
    """The chat request. Raises pydantic's ValidationError if parts do not fit together."""
    return ChatBody(
        model=body.model,
        messages=[*_instructions(body), *_messages(body.input)],
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body.text),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
    )


def _response_format(text: b.TextOptions | None) -> ResponseFormat | None:
    schema = None if text is None else text.format
    if not isinstance(schema, b.SchemaFormat):
        return schema
    return JsonSchemaFormat(type="json_schema", json_schema=JsonSchema(name=schema.name, schema=schema.schema_))


def _instructions(body: b.ResponsesBody) -> list[Message]:
    return [Message(role="system", content=body.instructions)] if body.instructions else []


def _messages(items: Sequence[b.Item] | str) -> Iterator[Message]:
    if isinstance(items, str):
        yield Message(role="user", content=items)
        return
    turn = _Turn()
    for item in items:
        if turn.ends_before(item):
            yield from turn.message()
            turn = _Turn()
        if isinstance(item, b.OutputItem):
            yield Message(role="tool", tool_call_id=item.call_id, content=_text(item.output))
        elif isinstance(item, b.MessageItem) and item.role != "assistant":
            yield Message(role=item.role, content=_text(item.content))
        else:
            turn.add(item)
    yield from turn.message()


class _Turn:
    """The assistant's items up to the next turn of another role."""

    def __init__(self) -> None:
        self._reasoning = self._text = ""
        self._calls: list[ToolCall] = []

    def ends_before(self, item: b.Item) -> bool:
        """Whether the turn ends before an item. A call belongs to the reasoning and text before it, and a message to
        the reasoning before it."""
        if isinstance(item, b.CallItem):
            return False
        of_assistant = isinstance(item, b.ReasoningItem) or (
            isinstance(item, b.MessageItem) and item.role == "assistant"
        )
        return not of_assistant or bool(self._text or self._calls)

    def add(self, item: b.Item) -> None:
        if isinstance(item, b.ReasoningItem):
            self._reasoning += "".join(part.text for part in item.content or item.summary or ())
        elif isinstance(item, b.CallItem):
            self._calls.append(_call(item))
        elif isinstance(item, b.MessageItem):
            self._text = _text(item.content)

    def message(self) -> Iterator[Message]:
        if self._reasoning or self._text or self._calls:
            calls, reasoning = self._calls or None, self._reasoning or None
            yield Message(role="assistant", content=self._text, reasoning_content=reasoning, tool_calls=calls)


def _call(item: b.CallItem) -> ToolCall:
    return ToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))


def _text(content: Sequence[b.TextPart] | str) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _tool(tool: b.FunctionTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
    return Tool(type="function", function=function)


def _choice(choice: b.FunctionChoice | None) -> ToolChoice | None:
    if isinstance(choice, b.NamedFunction):
        return _named(choice)
    if isinstance(choice, b.AllowedFunctions):
        allowed = Allowed(mode=choice.mode, tools=[_named(tool) for tool in choice.tools])
        return AllowedTools(type="allowed_tools", allowed_tools=allowed)
    return choice


def _named(tool: b.NamedFunction) -> NamedTool:
    return NamedTool(type="function", function=FunctionName(name=tool.name))


# -- the renderer ------------------------------------------------------------------------------------------------------

PREFIXES = {"content": "msg", "reasoning": "rs", "call": "fc"}
TEXT_EVENTS = {"content": "response.output_text", "reasoning": "response.reasoning_text"}


class ResponseRenderer(Renderer[list[Change], ItemResponse]):
    """`response` objects and the events of their streams."""

    def __init__(self, body: b.ResponsesBody, chat: ChatBody, generation: Generation) -> None:
        super().__init__(generation)
        self._created = int(time.time())
        model = chat.model or generation.served.source.model_id
        self._request = _request_fields(body, generation.requests[0].params, model)
        self._passages = Passages(answer_reader(chat, generation))
        self._new_id = partial(call_id, chat, generation.served, "call")
        self._call_ids: list[str] = []
        self._sent = 0

    def add(self, index: int, output: RequestOutput) -> list[Change]:
        new = self._passages.take(output)
        self._call_ids += [self._new_id() for change in new if change.kind == "begins"]
        return new

    def whole(self) -> ItemResponse:
        return ItemResponse.model_validate(self._ended_response())

    def opening(self) -> Iterator[JsonObject]:
        for name in ("created", "in_progress"):
            yield self._numbered(f"response.{name}", response=self._response("in_progress", []))

    def events(self, index: int, output: RequestOutput, new: list[Change]) -> Iterator[JsonObject]:
        writers = {"begins": self._begun, "grows": self._grown, "ends": self._ended}
        for change in new:
            yield from writers[change.kind](change)

    def closing(self) -> Iterator[JsonObject]:
        yield self._numbered(f"response.{self._status}", response=self._ended_response())

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
        item = self._item(change.position, Passage(change.passage.kind, change.passage.name), "in_progress")
        empty = item | ({} if change.passage.kind == "call" else {"content": []})
        yield self._numbered("response.output_item.added", output_index=change.position, item=empty)
        if change.passage.kind != "call":
            yield self._numbered("response.content_part.added", **self._at(change), part=item["content"][0])

    def _grown(self, change: Change) -> Iterator[JsonObject]:
        kind = change.passage.kind
        if kind == "call":
            position = {"item_id": self._id(change.position, kind), "output_index": change.position}
            yield self._numbered("response.function_call_arguments.delta", **position, delta=change.text)
        else:
            more: JsonObject = {"logprobs": []} if kind == "content" else {}
            yield self._numbered(f"{TEXT_EVENTS[kind]}.delta", **self._at(change), delta=change.text, **more)

    def _ended(self, change: Change) -> Iterator[JsonObject]:
        kind, text = change.passage.kind, change.passage.text
        item = self._item(change.position, change.passage, self._item_status(change.position))
        if kind == "call":
            position = {"item_id": item["id"], "output_index": change.position}
            name = change.passage.name
            yield self._numbered("response.function_call_arguments.done", **position, name=name, arguments=text)
        else:
            more: JsonObject = {"logprobs": []} if kind == "content" else {}
            yield self._numbered(f"{TEXT_EVENTS[kind]}.done", **self._at(change), text=text, **more)
            yield self._numbered("response.content_part.done", **self._at(change), part=item["content"][0])
        yield self._numbered("response.output_item.done", output_index=change.position, item=item)

    def _at(self, change: Change) -> JsonObject:
        item = self._id(change.position, change.passage.kind)
        return {"item_id": item, "output_index": change.position, "content_index": 0}

    # -- items ---------------------------------------------------------------------------------------------------------

    def _items(self) -> list[JsonObject]:
        passages = enumerate(self._passages.passages)
        return [self._item(index, passage, self._item_status(index)) for index, passage in passages]

    def _item(self, index: int, passage: Passage, status: str) -> JsonObject:
        item: JsonObject = {"id": self._id(index, passage.kind), "status": status}
        if passage.kind == "content":
            part = {"type": "output_text", "text": passage.text, "annotations": [], "logprobs": []}
            return item | {"type": "message", "role": "assistant", "content": [part]}
        if passage.kind == "reasoning":
            text = {"type": "reasoning_text", "text": passage.text}
            return item | {"type": "reasoning", "summary": [], "content": [text]}
        call = {"call_id": self._call_ids[index], "name": passage.name, "arguments": passage.text}
        return item | {"type": "function_call"} | call

    def _id(self, index: int, kind: str) -> str:
        return f"{PREFIXES[kind]}_{self.generation.id}_{index}"

    def _item_status(self, index: int) -> str:
        """The status of an item; only the last can be cut off."""
        return self._status if index == len(self._passages.passages) - 1 else "completed"

    # -- the response --------------------------------------------------------------------------------------------------

    @property
    def _status(self) -> str:
        return "completed" if self._passages.finish == "stop" else "incomplete"

    def _response(self, status: str, output: list[JsonObject]) -> JsonObject:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        created = {"id": f"resp_{self.generation.id}", "object": "response", "created_at": self._created}
        ended = {"status": status, "error": None, "incomplete_details": cut, "output": output, "usage": None}
        return created | self._request | ended

    def _ended_response(self) -> JsonObject:
        prompt, passages = self.generation.prompt_tokens, self._passages
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": passages.cached_tokens},
            "output_tokens": passages.tokens,
            "output_tokens_details": {"reasoning_tokens": passages.reasoning_tokens},
            "total_tokens": prompt + passages.tokens,
        }
        return self._response(self._status, self._items()) | {"usage": usage}


def _request_fields(body: b.ResponsesBody, params: SamplingParams, model: str) -> JsonObject:
    """The request as its answer repeats it, with the values chosen for what it left out. Nothing is stored, runs in the
    background, or truncates a prompt."""
    choice, schema = body.tool_choice, body.text and body.text.format
    text_format = {"type": "text"} if schema is None else schema.model_dump(by_alias=True, exclude_none=True)
    return {
        "model": model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "tool_choice": choice.model_dump() if isinstance(choice, Strict) else choice or "auto",
        "text": {"format": text_format},
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "metadata": body.metadata or {},
        "user": body.user,
        "previous_response_id": None,
        "store": False,
        "background": False,
        "truncation": "disabled",
    }


# -- the route ---------------------------------------------------------------------------------------------------------


@router.post("/responses", summary="Answer with items", response_model=ItemResponse, responses=STREAM)
async def responses(body: b.ResponsesBody, request: Request, state: StateDep) -> Response | ItemResponse:
    """Messages, calls of tools and reasoning. Nothing is stored: each request brings the whole conversation."""
    chat = translated(chat_of, body)
    generation = await generate_chat(chat, request, state)
    return await respond(ResponseRenderer(body, chat, generation), request, state, body.stream)
