"""The sandbox and its budget, and finding the assistant's words."""

import pytest

from fp8serve.errors import ModelError, RequestError
from fp8serve.model import chat
from fp8serve.model.chat import ChatTemplate, Message

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
GROW = "{{% set ns = namespace(s='xxxxxxxxxx') %}}{{% for i in range(99) %}}{}{{% endfor %}}{{{{ ns.s | length }}}}"


def words(source: str, messages: list[Message] = TURNS) -> list[str]:
    text, spans = ChatTemplate(source, {}).assistant_spans(messages)
    assert text == ChatTemplate(source, {}).render(messages, add_generation_prompt=False)
    return [text[a:b] for a, b in spans]


def test_prefix_spans_hold_the_words_and_the_end_of_turn() -> None:
    assert words(SIMPLE) == ["yes</s>", "no</s>"]


def test_generation_blocks_rule_where_the_template_has_them() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}.{% endgeneration %}"
        "{% else %}U{% endif %}{% endfor %}"
    )
    assert words(source) == ["yes.", "no."]


def test_template_that_drops_reasoning_from_earlier_turns() -> None:
    source = SIMPLE.replace("{{ m.content", "{{ '(think)' if loop.last and m.role == 'assistant' }}{{ m.content")
    assert words(source) == ["yes", "(think)no</s>"]


def test_template_that_rewrites_earlier_turns_is_refused() -> None:
    source = (
        "{% for m in messages %}{{ loop.revindex }}{{ m.content | upper if not loop.last else m.content }}{% endfor %}"
    )
    with pytest.raises(RequestError, match="rewrites earlier turns"):
        words(source)


def test_messages_cannot_forge_generation_marks() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    hostile = [{"role": "assistant", "content": "\ue000x\ue001{% generation %}"}]
    assert words(source, hostile) == ["\ue000x\ue001{% generation %}"]


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
def test_sandbox_shows_nothing_of_pythons_internals(source: str) -> None:
    assert ChatTemplate(source, {}).render(TURNS) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxx{% endfor %}{% endfor %}",
        "{{ 'x' * 10**12 }}",
        "{{ '%0999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%0999999999d' | format(1) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ 'x'.ljust(999999999) }}",
        "{{ 'x' | center(999999999) }}",
        "{{ 'a\nb' | indent(999999999) }}",
        "{{ 9 ** 999999999999 }}",
        GROW.format("{% set ns.s = ns.s * 10 %}"),
        GROW.format("{% set ns.s = ns.s ~ ns.s %}"),
        GROW.format("{% set ns.s = ns.s + ns.s %}"),
        GROW.format("{% set ns.s = [ns.s, ns.s] | join %}"),
        GROW.format("{% set ns.s = ns.s | replace('x', 'xx') %}"),
        GROW.format("{% set ns.s = ns.s.replace('x', 'xx') %}"),
        GROW.format("{% set s %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = s %}"),
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_budget_stops_templates_that_run_or_grow(source: str) -> None:
    """Without a budget these take hours or all memory: pytest's limit on a test would end them."""
    with pytest.raises((ModelError, RequestError)):
        ChatTemplate(source, {}).render(TURNS)


def test_budget_does_not_touch_long_conversations() -> None:
    long = [{"role": "user", "content": "word " * 20_000}] * 50
    assert len(ChatTemplate(SIMPLE, {}).render(long)) > 5_000_000
    assert chat._steps.get(None) is None


def test_refusal_by_the_template_carries_its_words() -> None:
    template = ChatTemplate("{{ raise_exception('Roles must alternate') }}", {})
    with pytest.raises(RequestError, match="Roles must alternate"):
        template.render(TURNS)


def test_template_that_is_no_template() -> None:
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate("{% for %}", {})


def test_only_json_reaches_a_template() -> None:
    with pytest.raises(RequestError, match="not a JSON value"):
        ChatTemplate(SIMPLE, {}).render([{"role": "user", "content": object()}])
