"""The route `/v1/messages`: Anthropic's messages, converted to and from chat completions.

The body is converted to a `ChatBody`. The tool results of a user turn become messages of the role `tool`; the other
text of the turn becomes a user message after them. `output_config.effort` and `thinking` are passed to the chat
template as `reasoning_effort` and `enable_thinking`.

A response is a message with content blocks, or the events that build one. A thinking block has an empty signature,
because this server checks no signatures. If `max_tokens` truncates the arguments of a tool call, `input` is
`{"INVALID_JSON": text}` in a response that is not streamed. Anthropic recommends this form for sending truncated
arguments back.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from fp8serve.engine.output import RequestOutput
from fp8serve.engine.sampling_params import StopString
from fp8serve.server.api.chat_generation import (
    Segment,
    SegmentedOutput,
    SegmentEvent,
    conversion_errors,
    generate_chat,
    template_variables,
)
from fp8serve.server.api.generation_pipeline import Renderer, respond
from fp8serve.server.api.routing import STREAM, BoundedRoute, JsonObject, ResponseModel, StateDep
from fp8serve.server.faults import Fault
from fp8serve.server.http.streams import event, until_disconnect
from fp8serve.server.schemas import anthropic_bodies as bodies
from fp8serve.server.schemas import messages as openai
from fp8serve.server.schemas.openai_bodies import ChatBody
from fp8serve.server.schemas.response_format import JsonSchema, JsonSchemaFormat
from fp8serve.server.serving.generation import Generation

router = APIRouter(prefix="/v1/messages", tags=["Anthropic"], route_class=BoundedRoute)


# -- responses ---------------------------------------------------------------------------------------------------------


class MessageText(ResponseModel):
    type: Literal["text"]
    text: str
    citations: None


class MessageThinking(ResponseModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class MessageToolUse(ResponseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject


class MessageUsage(ResponseModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(ResponseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[MessageText | MessageThinking | MessageToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(ResponseModel):
    input_tokens: int


# -- bodies ------------------------------------------------------------------------------------------------------------


class AnthropicChatBody(ChatBody):
    """A chat request that may have more stop strings than OpenAI allows, as in Anthropic's API."""

    stop: list[StopString] | None = None


def to_chat_body(body: bodies.MessagesBody) -> ChatBody:
    """Converts the messages, the tools and the parameters. Raises pydantic's ValidationError if the chat request is
    invalid."""
    return AnthropicChatBody(
        **_conversation_fields(body),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
    )


def _conversation_fields(body: bodies.CountBody) -> dict[str, Any]:
    choice, output = body.tool_choice, body.output_config or bodies.OutputConfig()
    schema = output.format and JsonSchema(schema=output.format.schema_)
    kwargs: dict[str, Any] = {"reasoning_effort": output.effort} if output.effort else {}
    if body.thinking is not None:
        kwargs["enable_thinking"] = body.thinking.type != "disabled"
    return {
        "model": body.model,
        "messages": list(_messages(body)),
        "tools": None if body.tools is None else [_tool(tool) for tool in body.tools],
        "tool_choice": None if choice is None else _tool_choice(choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "response_format": schema and JsonSchemaFormat(type="json_schema", json_schema=schema),
        "chat_template_kwargs": kwargs,
        "continue_final_message": isinstance(body.messages[-1], bodies.AssistantTurn),
    }


def _messages(body: bodies.CountBody) -> Iterator[openai.Message]:
    """Yields the system prompt as one message, its blocks joined by line breaks, and the messages of each turn: a
    message for each tool result, then a message with the text."""
    if body.system:
        text = body.system if isinstance(body.system, str) else "\n".join(block.text for block in body.system)
        yield openai.Message(role="system", content=text)
    for turn in body.messages:
        if isinstance(turn.content, str):
            yield openai.Message(role=turn.role, content=turn.content)
            continue
        if isinstance(turn, bodies.AssistantTurn):
            yield _assistant_message(turn.content)
            continue
        for block in turn.content:
            if isinstance(block, bodies.ToolResultBlock):  # templates have no flag for errors
                text = f"Error: {openai.text_of(block.content)}" if block.is_error else openai.text_of(block.content)
                yield openai.Message(role="tool", tool_call_id=block.tool_use_id, content=text)
        if texts := [block for block in turn.content if isinstance(block, bodies.TextBlock)]:
            yield openai.Message(role=turn.role, content=openai.text_of(texts))


def _assistant_message(
    blocks: Sequence[bodies.TextBlock | bodies.ThinkingBlock | bodies.ToolUseBlock],
) -> openai.Message:
    reasoning, calls = "", []
    for block in blocks:
        if isinstance(block, bodies.ThinkingBlock):
            reasoning += block.thinking
        elif isinstance(block, bodies.ToolUseBlock):
            function = openai.ToolCallFunction(name=block.name, arguments=json.dumps(block.input, ensure_ascii=False))
            calls.append(openai.ToolCall(id=block.id, function=function))
    text = openai.text_of([block for block in blocks if isinstance(block, bodies.TextBlock)])
    return openai.Message(role="assistant", content=text, reasoning_content=reasoning or None, tool_calls=calls or None)


def _tool(tool: bodies.ClientTool) -> openai.Tool:
    function = openai.Function(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return openai.Tool(type="function", function=function)


def _tool_choice(choice: bodies.ToolChoice) -> openai.ToolChoice:
    if choice.name is not None:
        return openai.NamedTool(type="function", function=openai.FunctionName(name=choice.name))
    return "required" if choice.type == "any" else "none" if choice.type == "none" else "auto"


# -- the renderer ------------------------------------------------------------------------------------------------------

DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "content": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
"""The type of a delta and its field, by the type of the segment."""


class MessageRenderer(Renderer[list[SegmentEvent], AnthropicMessage]):
    """Writes `message` objects and the events of their streams."""

    def __init__(self, body: ChatBody, generation: Generation, request_id: str) -> None:
        super().__init__(generation)
        self._model = body.model or generation.served.source.model_id
        self._request_id, self._max_tokens = request_id, body.max_tokens
        self._output = SegmentedOutput(body, generation, "toolu")
        self._has_started = False

    def add(self, index: int, output: RequestOutput) -> list[SegmentEvent]:
        return self._output.add(output)

    def response(self) -> AnthropicMessage:
        content = [_block(segment, segment.text) for segment in self._output.segments]
        message = self._message(content) | self._stop_fields() | {"usage": self._usage()}
        return AnthropicMessage.model_validate(message)

    def events(self, index: int, output: RequestOutput, delta: list[SegmentEvent]) -> Iterator[JsonObject]:
        """Yields the events of an output. `message_start` is sent with the first output, because it contains the number
        of cached tokens."""
        if not self._has_started:
            self._has_started = True
            yield {"type": "message_start", "message": self._message([])}
            yield {"type": "ping"}
        for segment_event in delta:
            yield self._event(segment_event)

    def closing(self) -> Iterator[JsonObject]:
        yield {"type": "message_delta", "delta": self._stop_fields(), "usage": self._usage()}
        yield {"type": "message_stop"}

    def failure(self, fault: Fault) -> JsonObject:
        return fault.anthropic(self._request_id)

    def encode(self, item: JsonObject) -> bytes:
        return event(item, name=item["type"])

    def _event(self, item: SegmentEvent) -> JsonObject:
        if item.event == "start":
            return {"type": "content_block_start", "index": item.index, "content_block": _block(item.segment, "")}
        if item.event == "stop":
            return {"type": "content_block_stop", "index": item.index}
        delta_type, field = DELTAS[item.segment.type]
        return {"type": "content_block_delta", "index": item.index, "delta": {"type": delta_type, field: item.delta}}

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

    def _stop_fields(self) -> JsonObject:
        output, sequence = self._output, None
        if output.finish_reason == "length":
            reason = "max_tokens" if output.tokens == self._max_tokens else "model_context_window_exceeded"
        elif isinstance(output.stop_reason, str):
            reason, sequence = "stop_sequence", output.stop_reason
        else:
            reason = "tool_use" if output.calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> dict[str, int]:
        """Returns the usage. As in Anthropic's API, `input_tokens` does not include cached tokens. This server does not
        count tokens that are written to the cache."""
        cached = self._output.cached_tokens
        return {
            "input_tokens": self.generation.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._output.tokens,
        }


def _block(segment: Segment, text: str) -> JsonObject:
    """Returns a content block with the segment's `text`, which is empty at the start of the block in a stream."""
    if segment.type == "call":
        return {"type": "tool_use", "id": segment.call_id, "name": segment.name, "input": _tool_input(text)}
    if segment.type == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text, "citations": None}


def _tool_input(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"INVALID_JSON": text}


# -- routes ------------------------------------------------------------------------------------------------------------


@router.post("", summary="Generate a message", response_model=AnthropicMessage, responses=STREAM)
async def messages(
    body: bodies.MessagesBody, request: Request, response: Response, state: StateDep
) -> Response | AnthropicMessage:
    """The message contains text, thinking and tool calls."""
    with conversion_errors():
        chat = to_chat_body(body)
    request_id = request.scope["request_id"]
    response.headers["request-id"] = request_id  # the header that Anthropic's client reads
    generation = await generate_chat(chat, request, state, clamp_max_tokens=True)
    return await respond(MessageRenderer(chat, generation, request_id), request, state, body.stream)


@router.post("/count_tokens", summary="Count the tokens of a conversation")
async def count_tokens(body: bodies.CountBody, request: Request, state: StateDep) -> TokenCount:
    """Counts the tokens of the prompt, including cached ones. The prompt may be longer than the model's context."""
    with conversion_errors():
        chat = ChatBody(**_conversation_fields(body))
    served = state.models.resolve(chat.model)
    state.parser.size_limits(served.engine.limits.max_model_len).check(chat)
    with served.lease():
        count = state.parser.count_tokens(served, chat.messages, template_variables(chat), chat.ending)
        return TokenCount(input_tokens=await until_disconnect(request, count))
