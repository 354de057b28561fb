"""Anthropic's wire: `/v1/messages`, on the same pipeline as all conversations.

A body becomes the chat request that all families share. A user's turn with results of tools becomes messages of the
role `tool`, and one of the user for its other text. `output_config.effort` and `thinking` are passed to chat templates
that know them, as `reasoning_effort` and `enable_thinking`.

An answer is a message of blocks, or the events that build one. A block of thinking has an empty signature, because it
is never checked. Arguments that are not a JSON object, because `max_tokens` cut them off, come as
`{"INVALID_JSON": text}` in an answer that is not streamed, which is the form in which Anthropic advises to send them
back.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from fp8serve.engine.output import RequestOutput
from fp8serve.engine.sampling_params import StopString
from fp8serve.server.api.answer_pipeline import Renderer, respond
from fp8serve.server.api.chat_generation import (
    Change,
    Passage,
    Passages,
    answer_reader,
    call_id,
    generate_chat,
    template_variables,
    translated,
)
from fp8serve.server.api.routing import STREAM, Answer, BoundedRoute, JsonObject, StateDep
from fp8serve.server.faults import Fault
from fp8serve.server.http.streams import event, until_disconnect
from fp8serve.server.schemas import anthropic_bodies as a
from fp8serve.server.schemas.answer_form import JsonSchema, JsonSchemaFormat
from fp8serve.server.schemas.messages import (
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

router = APIRouter(prefix="/v1/messages", tags=["Anthropic"], route_class=BoundedRoute)


# -- answers -----------------------------------------------------------------------------------------------------------


class MessageText(Answer):
    type: Literal["text"]
    text: str
    citations: None


class MessageThinking(Answer):
    type: Literal["thinking"]
    thinking: str
    signature: str


class MessageToolUse(Answer):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject


class MessageUsage(Answer):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(Answer):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[MessageText | MessageThinking | MessageToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Answer):
    input_tokens: int


# -- bodies ------------------------------------------------------------------------------------------------------------


class StoppedBody(ChatBody):
    """Anthropic allows more stop strings than OpenAI does."""

    stop: list[StopString] | None = None


def conversation_of(body: a.CountBody) -> ChatBody:
    """The conversation alone. Raises pydantic's ValidationError if parts do not fit together."""
    return ChatBody(**_conversation(body))


def chat_of(body: a.MessagesBody) -> ChatBody:
    """The conversation, and how it is to be answered."""
    return StoppedBody(
        **_conversation(body),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
    )


def _conversation(body: a.CountBody) -> dict[str, Any]:
    choice = body.tool_choice
    output = body.output_config and body.output_config.format
    schema = output and JsonSchema(schema=output.schema_)
    return {
        "model": body.model,
        "messages": [*_system(body), *(message for turn in body.messages for message in _messages(turn))],
        "tools": None if body.tools is None else [_tool(tool) for tool in body.tools],
        "tool_choice": None if choice is None else _choice(choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "response_format": schema and JsonSchemaFormat(type="json_schema", json_schema=schema),
        "chat_template_kwargs": _variables(body),
        "continue_final_message": isinstance(body.messages[-1], a.AssistantTurn),
    }


def _variables(body: a.CountBody) -> dict[str, Any]:
    effort = body.output_config and body.output_config.effort
    variables: dict[str, Any] = {"reasoning_effort": effort} if effort else {}
    if body.thinking is not None:
        variables["enable_thinking"] = body.thinking.type != "disabled"
    return variables


# -- turns -------------------------------------------------------------------------------------------------------------


def _system(body: a.CountBody) -> list[Message]:
    """Joins blocks of instructions, each on lines of its own."""
    if not body.system:
        return []
    text = body.system if isinstance(body.system, str) else "\n".join(block.text for block in body.system)
    return [Message(role="system", content=text)]


def _messages(turn: a.UserTurn | a.AssistantTurn | a.SystemTurn) -> Iterator[Message]:
    if isinstance(turn.content, str):
        yield Message(role=turn.role, content=turn.content)
    elif isinstance(turn, a.AssistantTurn):
        yield _assistant(turn.content)
    else:
        yield from _blocks(turn.role, turn.content)


def _blocks(role: str, blocks: Sequence[a.TextBlock | a.ToolResultBlock]) -> Iterator[Message]:
    """The results of tools, then the text."""
    results = [block for block in blocks if isinstance(block, a.ToolResultBlock)]
    texts = [block for block in blocks if isinstance(block, a.TextBlock)]
    for result in results:
        yield Message(role="tool", tool_call_id=result.tool_use_id, content=_result(result))
    if texts:
        yield Message(role="system" if role == "system" else "user", content=a.text_of(texts))


def _result(block: a.ToolResultBlock) -> str:
    """A result of a tool. No template knows of failures, so the text says that it failed."""
    text = a.text_of(block.content)
    return f"Error: {text}" if block.is_error else text


def _assistant(blocks: Sequence[a.TextBlock | a.ThinkingBlock | a.ToolUseBlock]) -> Message:
    thought = "".join(block.thinking for block in blocks if isinstance(block, a.ThinkingBlock))
    calls = [_call(block) for block in blocks if isinstance(block, a.ToolUseBlock)]
    text = a.text_of([block for block in blocks if isinstance(block, a.TextBlock)])
    return Message(role="assistant", content=text, reasoning_content=thought or None, tool_calls=calls or None)


def _call(block: a.ToolUseBlock) -> ToolCall:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return ToolCall(id=block.id, function=CalledFunction(name=block.name, arguments=arguments))


# -- tools -------------------------------------------------------------------------------------------------------------


def _tool(tool: a.ClientTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict)
    return Tool(type="function", function=function)


def _choice(choice: a.Choice) -> ToolChoice:
    if choice.name is not None:
        return NamedTool(type="function", function=FunctionName(name=choice.name))
    return "required" if choice.type == "any" else "none" if choice.type == "none" else "auto"


# -- the renderer ------------------------------------------------------------------------------------------------------

DELTAS = {"reasoning": ("thinking_delta", "thinking"), "content": ("text_delta", "text")}


class MessageRenderer(Renderer[list[Change], AnthropicMessage]):
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

    def whole(self) -> AnthropicMessage:
        content = [self._begun(passage) | _filled(passage) for passage in self._passages.passages]
        return AnthropicMessage.model_validate(self._message(content) | self._ending())

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

    def encoded(self, item: JsonObject) -> bytes:
        return event(item, name=item["type"])

    def _event(self, change: Change) -> JsonObject:
        if change.kind == "begins":
            block = self._begun(change.passage)
            return {"type": "content_block_start", "index": change.position, "content_block": block}
        if change.kind == "ends":
            return {"type": "content_block_stop", "index": change.position}
        kind, name = DELTAS.get(change.passage.kind, ("input_json_delta", "partial_json"))
        delta = {"type": kind, name: change.text}
        return {"type": "content_block_delta", "index": change.position, "delta": delta}

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
            reason = "tool_use" if passages.has_calls else "end_turn"
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
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"INVALID_JSON": text}


# -- routes ------------------------------------------------------------------------------------------------------------


@router.post("", summary="Answer a conversation", response_model=AnthropicMessage, responses=STREAM)
async def messages(
    body: a.MessagesBody, request: Request, response: Response, state: StateDep
) -> Response | AnthropicMessage:
    """One message of text, thinking and calls of tools."""
    chat, request_id = translated(chat_of, body), request.scope["request_id"]
    response.headers["request-id"] = request_id  # where Anthropic's client looks for it
    generation = await generate_chat(chat, request, state, ends_with_context=True)
    return await respond(MessageRenderer(chat, generation, request_id), request, state, body.stream)


@router.post("/count_tokens", summary="Count the tokens of a conversation")
async def count_tokens(body: a.CountBody, request: Request, state: StateDep) -> TokenCount:
    """The tokens of an answer's prompt, cached or not; it may be more than the context holds."""
    chat = translated(conversation_of, body)
    served = state.models.resolve(chat.model)
    state.parser.sizes(served.engine.limits.max_model_len).check(chat)
    with served.lease():
        count = state.parser.count(served, chat.messages, template_variables(chat), chat.ending)
        return TokenCount(input_tokens=await until_disconnect(request, count))
