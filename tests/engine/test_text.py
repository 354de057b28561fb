"""The streamed text: stop strings are not returned, and the text does not depend on token boundaries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.engine.text import TextStream


class Pieces:
    """A decoder whose token i is the i-th piece of text."""

    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self.pieces, self.rest = pieces, rest

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return self.rest


def test_stop_strings_are_returned_on_request() -> None:
    params = SamplingParams(stop=("de", "e"), include_stop_str_in_output=True)
    stream = TextStream(Pieces(["ab", "cd", "ef"]), params)
    assert [stream.push(i) for i in range(3)] == ["ab", "c", "de"]
    assert stream.stopped == "de"
    assert stream.flush() == ""


@pytest.mark.parametrize(("shows", "text"), [(True, "b."), (False, "")])
def test_stop_tokens_are_returned_on_request(shows: bool, text: str) -> None:
    stream = TextStream(Pieces(["a", "b"], "."), SamplingParams(include_stop_str_in_output=shows))
    stream.push(0)
    assert stream.end(1) == (text or ".")


def run(pieces: list[str], stop: tuple[str, ...], min_tokens: int = 0, rest: str = "") -> tuple[list[str], str | None]:
    stream = TextStream(Pieces(pieces, rest), SamplingParams(stop=stop, min_tokens=min_tokens))
    deltas = []
    for token in range(len(pieces)):
        deltas.append(stream.push(token))
        if stream.stopped is not None:
            break
    return [*deltas, stream.flush()], stream.stopped


@pytest.mark.parametrize(
    ("pieces", "stop", "expected", "stopped"),
    [
        (["a", "b"], (), ["a", "b", ""], None),
        (["a", "EN", "D", "c"], ("END",), ["a", "", "", ""], "END"),
        (["aE", "Nx"], ("END",), ["a", "ENx", ""], None),
        (["aEN"], ("END",), ["a", "EN"], None),
        (["abc"], ("abc", "b"), ["a", ""], "b"),
        (["xabc"], ("bc", "abc"), ["x", ""], "abc"),
        (["EEN", "D"], ("END",), ["E", "", ""], "END"),
        (["a", ""], ("z",), ["a", "", ""], None),
    ],
)
def test_stop_strings(pieces: list[str], stop: tuple[str, ...], expected: list[str], stopped: str | None) -> None:
    assert run(pieces, stop) == (expected, stopped)


def test_stop_strings_before_min_tokens_are_text() -> None:
    assert run(["x", "x", "x"], ("x",), min_tokens=2) == (["x", "x", "", ""], "x")


def test_a_stop_string_completed_by_the_flush_does_not_leak() -> None:
    assert run(["aE"], ("E!",), rest="!") == (["a", ""], "E!")


def test_without_a_tokenizer_there_is_no_text() -> None:
    stream = TextStream(None, SamplingParams())
    assert (stream.push(1), stream.flush()) == ("", "")


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_cutting_the_text_differently_changes_nothing(text: str, stops: list[str], data: st.DataObject) -> None:
    pieces, rest = [], text
    while rest:
        size = data.draw(st.integers(1, 4))
        pieces.append(rest[:size])
        rest = rest[size:]
    parts, stopped = run(pieces, tuple(stops))
    one_by_one, expected = run(list(text), tuple(stops))
    assert ("".join(parts), stopped) == ("".join(one_by_one), expected)
    assert not any(stop in "".join(parts) for stop in stops)
