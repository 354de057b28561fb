"""Rendering of chat templates: the sandbox, generation blocks and the date."""

from datetime import date

import pytest

from fp8serve.errors import ModelError, RequestError
from fp8serve.model.text.chat import ChatTemplate

TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "and"},
    {"role": "assistant", "content": "no"},
]
SIMPLE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_generation_blocks_are_marked_and_found() -> None:
    source = "{% for m in messages %}{%generation%}{{ m.content }}{%- endgeneration %}{% endfor %}"
    template = ChatTemplate(source, {})
    assert template.marks_generation
    assert not ChatTemplate(SIMPLE, {}).marks_generation
    assert not ChatTemplate("{# {% generation %} #}" + SIMPLE, {}).marks_generation
    assert template.render(TURNS) == "hiyesandno"
    assert template.render(TURNS, delimiter="|") == "|hi||yes||and||no|"


def test_the_date_is_todays_or_the_given_one() -> None:
    source = "{{ strftime_now('%d %b %Y') }}"
    assert ChatTemplate(source, {}, date(2024, 7, 26)).render(TURNS) == "26 Jul 2024"
    before = date.today()
    assert ChatTemplate(source, {}).render(TURNS) in {d.strftime("%d %b %Y") for d in (before, date.today())}


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ messages.append('x') }}",
        "{% for m in messages %}{% set _ = m.update({'role': 'system'}) %}{% endfor %}",
        "{{ (messages | attr('__class__')).x.y }}",
    ],
)
def test_sandbox_keeps_templates_from_pythons_internals(source: str) -> None:
    with pytest.raises(RequestError, match="refuses these messages"):
        ChatTemplate(source, {}).render(TURNS)


@pytest.mark.parametrize("source", ["{{ raise_exception.__globals__ }}", "{{ '{0.__class__}'.format(messages) }}"])
def test_sandbox_does_not_print_pythons_internals(source: str) -> None:
    assert ChatTemplate(source, {}).render(TURNS) == ""


def test_long_conversations_are_rendered_and_endless_texts_are_not() -> None:
    long = [{"role": "user", "content": "word " * 20_000}] * 50
    assert len(ChatTemplate(SIMPLE, {}).render(long)) > 5_000_000
    with pytest.raises(ModelError, match="writes too much"):
        ChatTemplate(SIMPLE, {}).render(long * 4)


@pytest.mark.parametrize("source", ["{{ 'a' | xmlattr }}", "{{ messages | sum }}", "{{ range(10 ** 9) | list }}"])
def test_any_exception_of_a_template_is_a_refusal(source: str) -> None:
    with pytest.raises(RequestError, match="refuses these messages"):
        ChatTemplate(source, {}).render(TURNS)


def test_a_refusal_by_the_template_has_its_message() -> None:
    template = ChatTemplate("{{ raise_exception('Roles must alternate') }}", {})
    with pytest.raises(RequestError, match="Roles must alternate"):
        template.render(TURNS)


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ " + "9" * 5000 + " }}",
        "{% for a in [1] %}" * 25 + "{% endfor %}" * 25,
        "{% macro f(a, a) %}{% endmacro %}",
        "{{ f(a=1, a=2) }}",
        "{{ " + "(" * 500 + ")" * 500 + " }}",
    ],
    ids=["syntax", "long literal", "deep loops", "twice a parameter", "twice an argument", "deep parentheses"],
)
def test_an_invalid_template_is_refused(source: str) -> None:
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate(source, {})


def test_only_json_reaches_a_template() -> None:
    with pytest.raises(RequestError, match="not a JSON value"):
        ChatTemplate(SIMPLE, {}).render([{"role": "user", "content": object()}])
