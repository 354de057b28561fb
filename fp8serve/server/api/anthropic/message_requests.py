"""Anthropic's bodies as the chat requests that all families share.

A user's turn with results of tools becomes messages of the role `tool`, and one of the user for its other text.
`output_config.effort` and `thinking` are passed to chat templates that know them, as `reasoning_effort` and
`enable_thinking`.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from fp8serve.engine.sampling_params import StopString
from fp8serve.server.api.answer_pipeline import ParsedRequest
from fp8serve.server.api.chat.chat_request import parse_chat
from fp8serve.server.schemas import anthropic_bodies as a
from fp8serve.server.schemas.answer_form import JsonSchema, JsonSchemaFormat
from fp8serve.server.schemas.messages import CalledFunction, Message, ToolCall
from fp8serve.server.schemas.openai_bodies import ChatBody
from fp8serve.server.schemas.tools import Function, FunctionName, NamedTool, Tool, ToolChoice


class StoppedBody(ChatBody):
    """Anthropic allows more stop strings than OpenAI does."""

    stop: list[StopString] | None = None


def conversation_of(body: a.CountBody) -> ChatBody:
    """The conversation alone. Raises pydantic's ValidationError if parts do not fit together."""
    return ChatBody(**_asked(body))


def chat_of(body: a.MessagesBody) -> ChatBody:
    """The conversation, and how it is to be answered."""
    return StoppedBody(
        **_asked(body),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
    )


def parse_message(chat: ChatBody) -> ParsedRequest:
    """An answer ends at the end of the context, however high `max_tokens` is; the stop reason tells which ended it."""
    limit = chat.max_tokens or 1
    return replace(parse_chat(chat), sampling=lambda room: chat.params(max(1, min(limit, room))))


def _asked(body: a.CountBody) -> dict[str, Any]:
    choice = body.tool_choice
    form = body.output_config and body.output_config.format
    return {
        "model": body.model,
        "messages": [*_system(body), *(message for turn in body.messages for message in _messages(turn))],
        "tools": None if body.tools is None else [_tool(tool) for tool in body.tools],
        "tool_choice": None if choice is None else _choice(choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "response_format": form and JsonSchemaFormat(type="json_schema", json_schema=JsonSchema(schema=form.schema_)),
        "chat_template_kwargs": _variables(body),
        "continue_final_message": isinstance(body.messages[-1], a.AssistantTurn),
    }


def _variables(body: a.CountBody) -> dict[str, Any]:
    effort = body.output_config and body.output_config.effort
    found: dict[str, Any] = {"reasoning_effort": effort} if effort else {}
    if body.thinking is not None:
        found["enable_thinking"] = body.thinking.type != "disabled"
    return found


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
        yield from _said(turn.role, turn.content)


def _said(role: str, blocks: Sequence[a.TextBlock | a.ToolResultBlock]) -> Iterator[Message]:
    """Results, then the text beside them."""
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
    said = a.text_of([block for block in blocks if isinstance(block, a.TextBlock)])
    return Message(role="assistant", content=said, reasoning_content=thought or None, tool_calls=calls or None)


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
