"""The route `/v1/responses`: OpenAI's responses, converted to and from chat completions.

The body is converted to a `ChatBody`. Consecutive items of the assistant (reasoning, a message, function calls) become
one assistant message. A response is a `response` object with output items, or the numbered events that build one.
Reasoning is an output item with its text in `content`. A response that `max_output_tokens` truncates has the status
`incomplete`, and a stream that fails ends with `response.failed`.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from fp8serve.engine.output import RequestOutput
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.server.api.chat_generation import Segment, SegmentedOutput, SegmentEvent, conversion_errors, generate_chat
from fp8serve.server.api.generation_pipeline import Renderer, respond
from fp8serve.server.api.routing import STREAM, BoundedRoute, CachedTokens, JsonObject, ResponseModel, StateDep
from fp8serve.server.faults import Fault
from fp8serve.server.http.streams import event
from fp8serve.server.schemas import messages as openai
from fp8serve.server.schemas import responses_bodies as bodies
from fp8serve.server.schemas.bodies import Strict
from fp8serve.server.schemas.openai_bodies import ChatBody
from fp8serve.server.schemas.response_format import JsonSchema, JsonSchemaFormat, ResponseFormat
from fp8serve.server.serving.generation import Generation

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=BoundedRoute)


# -- response models ---------------------------------------------------------------------------------------------------

Status = Literal["completed", "incomplete"]


class OutputText(ResponseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[None]


class OutputMessage(ResponseModel):
    id: str
    status: Status
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(ResponseModel):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(ResponseModel):
    id: str
    status: Status
    type: Literal["reasoning"]
    summary: list[None]
    content: list[ReasoningText]


class OutputFunctionCall(ResponseModel):
    id: str
    status: Status
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ReasoningTokens(ResponseModel):
    reasoning_tokens: int


class ResponseUsage(ResponseModel):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class IncompleteDetails(ResponseModel):
    reason: Literal["max_output_tokens"]


class ResponseReasoning(ResponseModel):
    effort: str | None
    summary: None


class ResponseText(ResponseModel):
    format: JsonObject


class ResponseObject(ResponseModel):
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
    incomplete_details: IncompleteDetails | None
    output: list[OutputMessage | OutputReasoning | OutputFunctionCall]
    usage: ResponseUsage


# -- bodies ------------------------------------------------------------------------------------------------------------


def to_chat_body(body: bodies.ResponsesBody) -> ChatBody:
    """Converts the body. Raises pydantic's ValidationError if the chat request is invalid."""
    instructions = [openai.Message(role="system", content=body.instructions)] if body.instructions else []
    schema = None if body.text is None else body.text.format
    if isinstance(schema, bodies.SchemaFormat):
        json_schema = JsonSchema(name=schema.name, schema=schema.schema_)
        response_format: ResponseFormat | None = JsonSchemaFormat(type="json_schema", json_schema=json_schema)
    else:
        response_format = schema
    return ChatBody(
        model=body.model,
        messages=[*instructions, *_messages(body.input)],
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=response_format,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
    )


def _messages(items: Sequence[bodies.Item] | str) -> Iterator[openai.Message]:
    """Yields the messages. Consecutive items of the assistant become one message, which consists of reasoning, text and
    calls, in this order."""
    if isinstance(items, str):
        yield openai.Message(role="user", content=items)
        return
    reasoning, text, calls = "", "", list[openai.ToolCall]()
    for item in (*items, None):
        is_text = isinstance(item, bodies.MessageItem) and item.role == "assistant"
        precedes_calls = (is_text or isinstance(item, bodies.ReasoningItem)) and not (text or calls)
        if not precedes_calls and not isinstance(item, bodies.FunctionCallItem):  # the assistant's message has ended
            if reasoning or text or calls:
                yield openai.Message(
                    role="assistant", content=text, reasoning_content=reasoning or None, tool_calls=calls or None
                )
            reasoning, text, calls = "", "", []
        if isinstance(item, bodies.FunctionCallOutputItem):
            yield openai.Message(role="tool", tool_call_id=item.call_id, content=openai.text_of(item.output))
        elif isinstance(item, bodies.ReasoningItem):
            reasoning += "".join(part.text for part in item.content or item.summary or ())
        elif isinstance(item, bodies.FunctionCallItem):
            function = openai.ToolCallFunction(name=item.name, arguments=item.arguments)
            calls.append(openai.ToolCall(id=item.call_id, function=function))
        elif item is not None and is_text:
            text = openai.text_of(item.content)
        elif item is not None:
            yield openai.Message(role=item.role, content=openai.text_of(item.content))


def _tool(tool: bodies.FunctionTool) -> openai.Tool:
    function = openai.Function(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return openai.Tool(type="function", function=function)


def _tool_choice(choice: bodies.FunctionChoice | None) -> openai.ToolChoice | None:
    if isinstance(choice, bodies.NamedFunction):
        return _named_tool(choice)
    if isinstance(choice, bodies.AllowedFunctions):
        allowed = openai.AllowedToolList(mode=choice.mode, tools=[_named_tool(tool) for tool in choice.tools])
        return openai.AllowedTools(type="allowed_tools", allowed_tools=allowed)
    return choice


def _named_tool(tool: bodies.NamedFunction) -> openai.NamedTool:
    return openai.NamedTool(type="function", function=openai.FunctionName(name=tool.name))


# -- the renderer ------------------------------------------------------------------------------------------------------

ITEM_ID_PREFIXES = {"content": "msg", "reasoning": "rs", "call": "fc"}
DELTA_EVENTS = {
    "content": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


class ResponseRenderer(Renderer[list[SegmentEvent], ResponseObject]):
    """Writes `response` objects and the events of their streams."""

    def __init__(self, body: bodies.ResponsesBody, chat: ChatBody, generation: Generation) -> None:
        super().__init__(generation)
        self._created = int(time.time())
        model = chat.model or generation.served.source.model_id
        self._request = _request_fields(body, generation.requests[0].params, model)
        self._output = SegmentedOutput(chat, generation)
        self._events_sent = 0

    def add(self, index: int, output: RequestOutput) -> list[SegmentEvent]:
        return self._output.add(output)

    def response(self) -> ResponseObject:
        return ResponseObject.model_validate(self._complete_response())

    def opening(self) -> Iterator[JsonObject]:
        for name in ("created", "in_progress"):
            yield self._numbered(f"response.{name}", response=self._response("in_progress", []))

    def events(self, index: int, output: RequestOutput, delta: list[SegmentEvent]) -> Iterator[JsonObject]:
        writers = {"start": self._start_events, "delta": self._delta_events, "stop": self._stop_events}
        for segment_event in delta:
            yield from writers[segment_event.event](segment_event)

    def closing(self) -> Iterator[JsonObject]:
        yield self._numbered(f"response.{self._status}", response=self._complete_response())

    def failure(self, fault: Fault) -> JsonObject:
        error = {"code": "server_error", "message": fault.full_message}
        response = self._response("failed", self._items()) | {"error": error}
        return self._numbered("response.failed", response=response)

    def encode(self, item: JsonObject) -> bytes:
        return event(item, name=item["type"])

    # -- events --------------------------------------------------------------------------------------------------------

    def _numbered(self, event_type: str, **fields: Any) -> JsonObject:
        self._events_sent += 1
        return {"type": event_type, "sequence_number": self._events_sent - 1, **fields}

    def _start_events(self, start: SegmentEvent) -> Iterator[JsonObject]:
        is_call = start.segment.type == "call"
        item = self._item(start.index, replace(start.segment, text=""), "in_progress")
        empty_item = item | ({} if is_call else {"content": []})
        yield self._numbered("response.output_item.added", output_index=start.index, item=empty_item)
        if not is_call:
            yield self._numbered("response.content_part.added", **self._position(start), part=item["content"][0])

    def _delta_events(self, delta: SegmentEvent) -> Iterator[JsonObject]:
        segment_type = delta.segment.type
        logprobs: JsonObject = {"logprobs": []} if segment_type == "content" else {}
        yield self._numbered(
            f"{DELTA_EVENTS[segment_type]}.delta", **self._position(delta), delta=delta.delta, **logprobs
        )

    def _stop_events(self, stop: SegmentEvent) -> Iterator[JsonObject]:
        segment_type, text = stop.segment.type, stop.segment.text
        item, position = self._item(stop.index, stop.segment, self._item_status(stop.index)), self._position(stop)
        done = f"{DELTA_EVENTS[segment_type]}.done"
        if segment_type == "call":
            yield self._numbered(done, **position, name=stop.segment.name, arguments=text)
        else:
            logprobs: JsonObject = {"logprobs": []} if segment_type == "content" else {}
            yield self._numbered(done, **position, text=text, **logprobs)
            yield self._numbered("response.content_part.done", **position, part=item["content"][0])
        yield self._numbered("response.output_item.done", output_index=stop.index, item=item)

    def _position(self, segment_event: SegmentEvent) -> JsonObject:
        """Returns the position of a segment in the response. A function call has no content parts."""
        index, segment_type = segment_event.index, segment_event.segment.type
        position = {"item_id": self._item_id(index, segment_type), "output_index": index}
        return position if segment_type == "call" else position | {"content_index": 0}

    # -- items ---------------------------------------------------------------------------------------------------------

    def _items(self) -> list[JsonObject]:
        segments = enumerate(self._output.segments)
        return [self._item(index, segment, self._item_status(index)) for index, segment in segments]

    def _item(self, index: int, segment: Segment, status: str) -> JsonObject:
        item: JsonObject = {"id": self._item_id(index, segment.type), "status": status}
        if segment.type == "content":
            part = {"type": "output_text", "text": segment.text, "annotations": [], "logprobs": []}
            return item | {"type": "message", "role": "assistant", "content": [part]}
        if segment.type == "reasoning":
            text = {"type": "reasoning_text", "text": segment.text}
            return item | {"type": "reasoning", "summary": [], "content": [text]}
        call = {"call_id": segment.call_id, "name": segment.name, "arguments": segment.text}
        return item | {"type": "function_call"} | call

    def _item_id(self, index: int, segment_type: str) -> str:
        return f"{ITEM_ID_PREFIXES[segment_type]}_{self.generation.id}_{index}"

    def _item_status(self, index: int) -> str:
        """Returns the status of an item. Only the last item can be incomplete."""
        return self._status if index == len(self._output.segments) - 1 else "completed"

    # -- the response --------------------------------------------------------------------------------------------------

    @property
    def _status(self) -> str:
        return "completed" if self._output.finish_reason == "stop" else "incomplete"

    def _response(self, status: str, output: list[JsonObject]) -> JsonObject:
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        identity = {"id": f"resp_{self.generation.id}", "object": "response", "created_at": self._created}
        result = {"status": status, "error": None, "incomplete_details": details, "output": output, "usage": None}
        return identity | self._request | result

    def _complete_response(self) -> JsonObject:
        prompt_tokens, output = self.generation.prompt_tokens, self._output
        usage = {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {"cached_tokens": output.cached_tokens},
            "output_tokens": output.tokens,
            "output_tokens_details": {"reasoning_tokens": output.reasoning_tokens},
            "total_tokens": prompt_tokens + output.tokens,
        }
        return self._response(self._status, self._items()) | {"usage": usage}


def _request_fields(body: bodies.ResponsesBody, params: SamplingParams, model: str) -> JsonObject:
    """Returns the fields of the request that the response repeats, with the defaults that were used. This server stores
    no responses, runs none in the background and truncates no prompts."""
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


@router.post("/responses", summary="Generate a response", response_model=ResponseObject, responses=STREAM)
async def responses(body: bodies.ResponsesBody, request: Request, state: StateDep) -> Response | ResponseObject:
    """Generates a message, function calls and reasoning. Responses are not stored, so each request must contain the
    whole conversation."""
    with conversion_errors():
        chat = to_chat_body(body)
    generation = await generate_chat(chat, request, state)
    return await respond(ResponseRenderer(body, chat, generation), request, state, body.stream)
