"""Chat templates that expect tool calls in different formats."""

from typing import Any

import pytest

from fp8serve.errors import RequestError
from fp8serve.model.text.chat import ChatTemplate

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
CALLED: list[dict[str, Any]] = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
EACH = "{% for m in messages %}{% for c in m.tool_calls %}"
END = "{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (EACH + "{{ c.function.arguments.a }}" + END, "1"),
        (EACH + "{{ c.function.arguments | tojson }}{{ m.content is none }}" + END, '{"a": 1}True'),
        (EACH + "{{ 'f' + c.function.arguments }}" + END, 'f{"a": 1}'),
        (EACH + "{{ '</think>' in m.content }}{{ c.function.arguments.a }}" + END, "False1"),
        (EACH + "{{ m.content.split('x') }}{{ 'f' + c.function.arguments }}" + END, "['']f{\"a\": 1}"),
    ],
)
def test_each_template_gets_calls_in_its_format(template: str, text: str) -> None:
    assert ChatTemplate(template, {}).render(CALLED) == text


def test_if_every_format_fails_the_first_error_is_reported() -> None:
    template = EACH + "{{ raise_exception('no calls: ' + (m.content is none) | string) }}" + END
    with pytest.raises(RequestError, match="no calls: True"):
        ChatTemplate(template, {}).render(CALLED)
    with pytest.raises(RequestError, match="only users"):
        ChatTemplate("{{ raise_exception('only users') }}", {}).render(ASKED)
