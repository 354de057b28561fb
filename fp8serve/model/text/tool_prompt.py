"""Tools for a chat template that does not support them, in the form that Hermes and Qwen models are trained on.

The system message describes the tools. Earlier calls are written in the form that the model is asked to use,
`<tool_call>{...}</tool_call>`. Their results come in a user turn, in plain words, because a model that was not trained
on `<tool_response>` repeats it instead of using it.
"""

import json
from itertools import groupby
from typing import Any

Message = dict[str, Any]

DESCRIPTION = """# Tools

These functions may help you to answer. Each line between the tags is the JSON description of one:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and its arguments between these tags, and wait for its result:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


def with_tools(messages: list[Message], tools: list[dict[str, Any]] | None, knows_calls: bool = False) -> list[Message]:
    """The conversation in messages of only system, user and assistant. `tools`: as OpenAI's API describes them.

    `knows_calls`: calls and results can be written as they are.
    """
    if knows_calls:
        return _described(messages, tools) if tools else messages
    rewritten: list[Message] = []
    for is_result, group in groupby(messages, key=lambda message: message.get("role") == "tool"):
        if is_result:
            rewritten.append({"role": "user", "content": "\n".join(_result(message) for message in group)})
        else:
            rewritten += [_called(message) if message.get("tool_calls") else message for message in group]
    return _described(rewritten, tools) if tools else rewritten


def _described(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """The messages with the tools after the text of the system message."""
    text = DESCRIPTION.format(tools="\n".join(_json(tool) for tool in tools))
    if messages and messages[0].get("role") == "system":
        first = messages[0] | {"content": f"{messages[0].get('content') or ''}\n\n{text}".lstrip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _called(message: Message) -> Message:
    """An assistant's turn, with its calls as text."""
    calls = (call["function"] for call in message["tool_calls"])
    written = [f"<tool_call>\n{_json({k: call[k] for k in ('name', 'arguments')})}\n</tool_call>" for call in calls]
    return {"role": "assistant", "content": "\n".join([*filter(None, [message.get("content")]), *written])}


def _result(message: Message) -> str:
    return f"{message.get('name') or 'The function'} returned:\n{message.get('content') or ''}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
