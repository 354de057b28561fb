"""Templates that want calls in a form of their own."""

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
def test_a_template_gets_calls_as_it_wants_them(template: str, text: str) -> None:
    assert ChatTemplate(template, {}).render(CALLED) == text


def test_what_no_spelling_helps_is_refused_for_its_first_reason() -> None:
    template = EACH + "{{ raise_exception('no calls: ' + (m.content is none) | string) }}" + END
    with pytest.raises(RequestError, match="no calls: True"):
        ChatTemplate(template, {}).render(CALLED)
    with pytest.raises(RequestError, match="only users"):
        ChatTemplate("{{ raise_exception('only users') }}", {}).render(ASKED)
