"""The body of `/v1/responses` as the chat request that all families share.

Reasoning, a message and calls of the assistant that follow each other are one message of a chat.
"""

from collections.abc import Iterator, Sequence

from fp8serve.server.schemas import item_bodies as b
from fp8serve.server.schemas.answer_form import JsonSchema, JsonSchemaFormat, ResponseFormat
from fp8serve.server.schemas.messages import CalledFunction, Message, ToolCall
from fp8serve.server.schemas.openai_bodies import ChatBody
from fp8serve.server.schemas.tools import Allowed, AllowedTools, Function, FunctionName, NamedTool, Tool, ToolChoice


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
        response_format=_form(body.text),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
    )


def _form(text: b.TextOptions | None) -> ResponseFormat | None:
    form = None if text is None else text.format
    if not isinstance(form, b.SchemaFormat):
        return form
    return JsonSchemaFormat(type="json_schema", json_schema=JsonSchema(name=form.name, schema=form.schema_))


# -- items -------------------------------------------------------------------------------------------------------------


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
        self._thought = self._said = ""
        self._calls: list[ToolCall] = []

    def ends_before(self, item: b.Item) -> bool:
        """Whether the turn ends before an item. A call belongs to the reasoning and text before it, and a message to
        the reasoning before it."""
        if isinstance(item, b.CallItem):
            return False
        of_assistant = isinstance(item, b.ReasoningItem) or (
            isinstance(item, b.MessageItem) and item.role == "assistant"
        )
        return not of_assistant or bool(self._said or self._calls)

    def add(self, item: b.Item) -> None:
        if isinstance(item, b.ReasoningItem):
            self._thought += "".join(part.text for part in item.content or item.summary or ())
        elif isinstance(item, b.CallItem):
            self._calls.append(_call(item))
        elif isinstance(item, b.MessageItem):
            self._said = _text(item.content)

    def message(self) -> Iterator[Message]:
        if self._thought or self._said or self._calls:
            calls, thought = self._calls or None, self._thought or None
            yield Message(role="assistant", content=self._said, reasoning_content=thought, tool_calls=calls)


def _call(item: b.CallItem) -> ToolCall:
    return ToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))


def _text(content: Sequence[b.TextPart] | str) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


# -- tools -------------------------------------------------------------------------------------------------------------


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
