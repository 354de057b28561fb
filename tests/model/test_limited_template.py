"""`LimitedTemplate` renders chat templates in a child process with memory and time limits. Texts and errors are those
of `ChatTemplate`, and hostile templates are ended."""

import gc
import os
import threading
from pathlib import Path

import pytest

from fp8serve.errors import DataError, Fp8ServeError, ModelError, RequestError
from fp8serve.model.text import limited_process
from fp8serve.model.text.assistant_spans import Conversation, SpecialTokens, assistant_spans
from fp8serve.model.text.chat import ChatTemplate, Message
from fp8serve.model.text.examples import ChatExample, tokenize_all
from fp8serve.model.text.limited_process import LimitedProcess
from fp8serve.model.text.limited_template import LimitedTemplate, result_or_error
from fp8serve.model.text.tokenizer import Tokenizer
from tests.model.families import FAMILIES, unmarked
from tests.model.oracle import write_tokenizer

CHAT: list[Message] = [
    {"role": "user", "content": "hi \u00e9\U0001f389 \ud800", "note": (1, 2.5, None, {3: True})},
    {"role": "assistant", "content": " yes\n"},
    {"role": "user", "content": "and"},
    {"role": "assistant", "content": "no"},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SIMPLE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
# `{}` is run 99 times
GROW = (
    "{{% set ns = namespace(s='xxxxxxxxxx', n=3) %}}{{% for i in range(99) %}}{}{{% endfor %}}{{{{ ns.s | length }}}}"
)
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = [
    ENDLESS,
    "{{ 9 ** 999999999999 }}",
    "{{ 'x' * 10**12 }}",
    "{{ '%0999999999d' % 1 }}",
    "{{ 'x' | center(9999999999) }}",
    "{{ range(90000) | join('x' * 900000) }}",
    "{{ ('x' * 900000) | replace('x', 'y' * 900000) }}",
    GROW.format("{% set ns.s = ns.s ~ ns.s %}"),
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for a in range(99999) %}{{ lipsum(900, false, 900, 1000) }}{% endfor %}",
]
EXCEEDS_MEMORY_FOR_BAD_MESSAGES = "{% if 'bad' in messages[0].content %}{{ 'x' * 10**12 }}{% endif %}" + SIMPLE


def child_processes() -> set[str]:
    """Returns the ids of this thread's child processes."""
    return set(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split())


def comparable(result: object) -> object:
    return (type(result), str(result)) if isinstance(result, Fp8ServeError) else result


@pytest.mark.parametrize("source", HOSTILE)
def test_hostile_templates_are_ended_with_an_error(source: str) -> None:
    """Without limits, these templates would take hours or all memory."""
    with pytest.raises((ModelError, RequestError), match=r"^The model's chat template .*\.$"):
        LimitedTemplate(source, {}).render(CHAT)


def test_texts_spans_and_errors_equal_those_of_an_unlimited_template() -> None:
    markers, skipped = SpecialTokens(frozenset({"</s>"}), frozenset({"<s>", "</s>"})), {"tools": None, "x": 1}
    for source in FAMILIES.values():
        plain, limited = ChatTemplate(unmarked(source), TOKENS), LimitedTemplate(unmarked(source), TOKENS)
        batch = [Conversation(CHAT), Conversation(CHAT, (1,), skipped), Conversation(CHAT[:1]), Conversation(CHAT[1:])]
        results = limited.assistant_spans(batch, markers)
        expected = [result_or_error(assistant_spans, plain, conversation, markers) for conversation in batch]
        assert list(map(comparable, results)) == list(map(comparable, expected))
        assert limited.takes_tools == plain.takes_tools


def test_messages_that_are_not_json_are_refused() -> None:
    limited = LimitedTemplate(SIMPLE, {})
    with pytest.raises(RequestError, match="holds a object, which is not a JSON value"):
        limited.render([{"role": "user", "content": object()}])
    with pytest.raises(RequestError, match="cannot be written as JSON"):
        limited.render([{"role": "user", "content": 10**5000}])
    assert limited.render(CHAT[2:3]) == "<user>and</s>\n"


def test_the_error_names_the_row_whose_conversation_exceeds_a_limit(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=EXCEEDS_MEMORY_FOR_BAD_MESSAGES)
    rows = [ChatExample(tuple(CHAT[2:]), f"d:{i}") for i in range(9)]
    rows[5] = ChatExample(({"role": "user", "content": "bad"}, CHAT[3]), "d:5")
    tokenized = tokenize_all(rows, Tokenizer.from_dir(tmp_path))
    assert len([next(tokenized) for _ in range(5)]) == 5
    with pytest.raises(
        DataError, match=r"^d:5 cannot be tokenized: The model's chat template exceeds its memory limit"
    ):
        next(tokenized)


def test_a_template_that_exceeded_a_limit_is_not_run_again() -> None:
    limited = LimitedTemplate(EXCEEDS_MEMORY_FOR_BAD_MESSAGES, {})
    assert limited.render(CHAT[2:3]) == "<user>and</s>\n"
    for messages in ([{"role": "user", "content": "bad"}], CHAT[2:3]):
        with pytest.raises(ModelError, match="exceeds its memory limit"):
            limited.render(messages)


def test_the_child_process_ends_with_its_template() -> None:
    before = child_processes()
    limited = LimitedTemplate(SIMPLE, {})
    assert child_processes() == before
    limited.render(CHAT[2:3])
    assert len(child_processes() - before) == 1
    del limited
    gc.collect()
    assert child_processes() <= before


@pytest.mark.parametrize("kills", [1, 2])
def test_a_template_whose_process_is_killed_is_rendered_once_more(kills: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limited, start, victims = LimitedTemplate(SIMPLE, {}), LimitedProcess._start, iter(range(kills))

    def start_and_kill(process: LimitedProcess) -> None:
        start(process)
        if next(victims, None) is not None:
            assert process._process is not None
            process._process.kill()

    monkeypatch.setattr(LimitedProcess, "_start", start_and_kill)
    if kills == 1:
        assert limited.render(CHAT[2:3]) == "<user>and</s>\n"
    else:
        with pytest.raises(ModelError, match="exceeds its memory limit"):
            limited.render(CHAT[2:3])


def test_a_limited_process_starts_no_child_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path, template=SIMPLE)
    monkeypatch.setattr(limited_process._is_child, "is_set", lambda: True)
    before, tokenizer = child_processes(), Tokenizer.from_dir(tmp_path)
    assert tokenizer.chat(CHAT[2:3]) == "<user>and</s>\n"
    assert child_processes() == before


def test_threads_and_forks_get_their_own_results() -> None:
    limited, results = LimitedTemplate("{{ messages[0].content }}", {}), dict[int, list[str]]()

    def work(number: int) -> None:
        results[number] = [limited.render([{"role": "user", "content": f"{number}-{i}"}]) for i in range(50)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    forks = []
    for number in range(10, 14):
        if not (pid := os.fork()):
            work(number)
            os._exit(results[number] != [f"{number}-{i}" for i in range(50)])
        forks.append(pid)
    for thread in threads:
        thread.join()
    assert results == {number: [f"{number}-{i}" for i in range(50)] for number in range(4)}
    assert [os.waitpid(pid, 0)[1] for pid in forks] == [0] * 4
