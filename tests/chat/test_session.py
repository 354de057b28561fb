"""A chat session: typed lines, commands and interrupts."""

import json
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8serve.chat.models import ChatOptions, Piece
from fp8serve.chat.session import DIM, PLAIN, Session
from fp8serve.errors import RequestError

HELLO = [Piece("text", "Good "), Piece("text", "day.")]


class Scripted:
    """A model with prepared answers, used one after the other; an exception in an answer is raised.

    `calls` gets the messages and options of every call.
    """

    name = "fake\033[31m"

    def __init__(self, *answers: Iterable[Any]) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[list[dict[str, Any]], ChatOptions]] = []

    def answer(self, messages: list[dict[str, Any]], options: ChatOptions) -> Iterator[Piece]:
        self.calls.append((messages, options))
        for item in self.answers.pop(0):
            if isinstance(item, BaseException):
                raise item
            yield item


def talk(model: Scripted, *lines: Any, system: str = "", seed: int | None = None) -> Session:
    """Runs a session that reads these lines and then the end of the input; an exception in `lines` is raised."""
    script = iter(lines)

    def read(prompt: str) -> str:
        line = next(script, EOFError())
        if isinstance(line, BaseException):
            raise line
        return str(line)

    session = Session(model, ChatOptions(seed=seed), system, read)
    session.run()
    return session


def roles(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in messages]


def test_the_next_question_is_sent_with_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    model = Scripted(HELLO, [Piece("text", "Fine.")])
    talk(model, "Hello", "", "  How are you?  ", system="Be kind.")
    assert roles(model.calls[1][0]) == [
        ("system", "Be kind."), ("user", "Hello"), ("assistant", "Good day."), ("user", "How are you?"),
    ]  # fmt: skip
    output = capsys.readouterr().out.replace(PLAIN, "")
    assert "Good day.\nFine.\n" in output
    assert "\033" not in output  # escape sequences in the model's name are removed


def test_reasoning_and_tool_calls_are_shown_and_not_sent_back(capsys: pytest.CaptureFixture[str]) -> None:
    first = [Piece("reasoning", "Hm. "), Piece("reasoning", "So:"), Piece("text", "Yes.")]
    calls = [
        Piece("tool", "look_up", starts_call=True),
        Piece("tool", '{"a": 1}'),
        Piece("tool", "stop", starts_call=True),
    ]
    model = Scripted(first + calls, HELLO)
    talk(model, "Hello", "And?")
    assert ("assistant", "Yes.") in roles(model.calls[1][0])
    expected = (
        f"{DIM}Hm. So:{PLAIN}\n{PLAIN}Yes.{PLAIN}\n{DIM}calls look_up " + '{"a": 1}' + f"{PLAIN}\n{DIM}calls stop "
    )
    assert expected in capsys.readouterr().out


def test_ctrl_c_stops_the_answer_and_keeps_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    model = Scripted([Piece("text", "Good "), KeyboardInterrupt()], [KeyboardInterrupt()], HELLO)
    session = talk(model, "One", "Two", KeyboardInterrupt(), "Three")
    assert session.conversation.turns == [("One", "Good "), ("Three", "Good day.")]
    assert "(type ctrl-D or /quit to quit)" in capsys.readouterr().out


def test_an_error_keeps_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    long = RequestError("The prompt has 9 tokens, but the context holds 8.")
    session = talk(Scripted(HELLO, [long], [Piece("text", "Go"), RequestError("It died.")]), "One", "Two", "Three")
    assert session.conversation.turns == [("One", "Good day.")]
    output = capsys.readouterr().out
    assert "context holds 8. Use /reset to start a new conversation" in output
    assert "It died.\n" in output


def test_reset_clears_the_conversation_and_system_sets_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    model = Scripted(HELLO, HELLO, HELLO)
    talk(model, "One", "/system Be brief.", "/reset", "Two", "/system", "Three")
    assert roles(model.calls[1][0]) == [("system", "Be brief."), ("user", "Two")]
    assert roles(model.calls[2][0]) == [("user", "Two"), ("assistant", "Good day."), ("user", "Three")]


def test_regenerate_asks_again_with_another_seed() -> None:
    model = Scripted(HELLO, [Piece("text", "Good night.")], [RequestError("It died.")], [KeyboardInterrupt()])
    session = talk(model, "Hello", "/regenerate", "/regenerate", "/regenerate", seed=5)
    assert [roles(messages) for messages, _ in model.calls] == [[("user", "Hello")]] * 4
    assert [options.seed for _, options in model.calls] == [5, 6, 7, 8]
    assert session.conversation.turns == [("Hello", "Good night.")]  # an error or interrupt keeps the last answer


def test_saved_conversations_are_training_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chat one.jsonl"
    talk(Scripted(HELLO), "/save x", "Hello", f"/save {file}", f"/save {file}", "/save", "/save /no/such/place")
    expected = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day."}]}
    assert json.loads(file.read_text()) == expected
    output = capsys.readouterr().out
    for sentence in ("nothing to save", f"saved to {file}", "File exists; use another name", "Name a file", "No such"):
        assert sentence in output


def test_help_names_every_command_and_others_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    talk(Scripted(), "/help", "/nonsense", "/", "/regenerate", "/quit", "never read")
    output = capsys.readouterr().out
    for command in ("help", "reset", "system", "regenerate", "save", "quit"):
        assert f"/{command} " in output
    assert "There is no command '/nonsense'" in output
    assert "There is no command '/'" in output
    assert "There is no message to answer again" in output


def test_a_deferred_interrupt_is_raised_at_the_second_ctrl_c() -> None:
    from fp8serve.chat.models import deferred_interrupt

    with deferred_interrupt() as interrupted:
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
