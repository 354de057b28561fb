"""The sandbox and its budget, generation blocks and the date."""

from datetime import date

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fp8serve.errors import ModelError, RequestError
from fp8serve.model.text import chat
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
GROW = "{{% set ns = namespace(s='xxxxxxxxxx') %}}{{% for i in range(99) %}}{}{{% endfor %}}{{{{ ns.s | length }}}}"


def test_generation_blocks_are_marked_and_found() -> None:
    source = "{% for m in messages %}{%generation%}{{ m.content }}{%- endgeneration %}{% endfor %}"
    template = ChatTemplate(source, {})
    assert template.marks_generation
    assert not ChatTemplate(SIMPLE, {}).marks_generation
    assert not ChatTemplate("{# {% generation %} #}" + SIMPLE, {}).marks_generation
    assert template.render(TURNS) == "hiyesandno"
    assert template.render(TURNS, mark="|") == "|hi||yes||and||no|"


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
        "{{ range(90000) | join('x' * 900000) }}",
        "{{ (['x' * 900000] * 90000) | join }}",
        "{{ (['x' * 900000] * 90000) | map('upper') | join }}",
        "{{ ''.join(['x' * 900000] * 90000) }}",
        "{{ ('x' * 900000).join('y' * 900000) }}",
        "{{ ('x' * 900000) | replace('x', 'y' * 900000) }}",
        "{{ ['x' * 900000] | map('replace', 'x', 'y' * 900000) | list }}",
        "{{ ('x' * 900000).replace('x', 'y' * 900000) }}",
        "{{ ('\n' * 900000) | indent('x' * 900000) }}",
        "{{ ('\n' * 900000) | indent(width=900, blank=true) }}",
        "{{ ('\t' * 900000).expandtabs(900) }}",
        "{{ ('a ' * 900000) | wordwrap(1, true, 'x' * 900000) }}",
        "{{ lipsum(900, false, 900, 1000) }}",
        GROW.format("{% set ns.n = (ns.n or 3) * (ns.n or 3) %}"),
        "{{ 3 ** 40000000 > 1 }}",
    ],
)
def test_budget_stops_templates_that_run_or_grow(source: str) -> None:
    """Without a budget these take hours or all memory: pytest's limit on a test would end them."""
    with pytest.raises((ModelError, RequestError)):
        ChatTemplate(source, {}).render(TURNS)


@pytest.mark.parametrize(
    "source",
    [
        "{{ [1, 'a', none, [2]] | join(', ') }}",
        "{{ messages | join('|', attribute='role') }}",
        "{{ ['a', 'b'] | map('upper') | join }}",
        "{{ '-'.join(['a', 'b']) }}{{ '-'.join(['a', 'b'] | map('upper')) }}",
        "{{ 'aaa' | replace('a', 'bc', 2) }}{{ 'aaa'.replace('a', 'bc', 1) }}{{ 'a' | replace('', '-') }}",
        "{{ 'a\nb\n\nc' | indent(2, true, blank=true) }}{{ 'a\nb' | indent(width='> ') }}",
        "{{ 'one two three' | wordwrap(4, wrapstring='/') }}{{ 'a\tb'.expandtabs(4) }}",
        "{{ 123456789 * 987654321 * -3 }}{{ 7 ** 77 }}{{ true * 3 }}",
    ],
)
def test_what_is_priced_gives_what_jinja_gives(source: str) -> None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    assert ChatTemplate(source, {}).render(TURNS) == plain.render(messages=TURNS)


def test_budget_does_not_touch_long_conversations() -> None:
    long = [{"role": "user", "content": "word " * 20_000}] * 50
    assert len(ChatTemplate(SIMPLE, {}).render(long)) > 5_000_000
    assert chat._steps.get(None) is None


def test_refusal_by_the_template_carries_its_words() -> None:
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
    ],
    ids=["syntax", "long literal", "deep loops", "twice a parameter", "twice an argument"],
)
def test_template_that_is_no_template(source: str) -> None:
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate(source, {})


def test_only_json_reaches_a_template() -> None:
    with pytest.raises(RequestError, match="not a JSON value"):
        ChatTemplate(SIMPLE, {}).render([{"role": "user", "content": object()}])
