"""Bad words never occur in an answer, whatever tokens it consists of."""

from hypothesis import given
from hypothesis import strategies as st

from fp8serve.engine.bad_words import Bans

TOKENS = ["a", "b", "c", "ab", "bc", "cab", "abc", " a", "é", "<end>", "<special>"]


class Texts:
    """A vocabulary of pieces. The second to last token ends an answer, the last one is special."""

    special_ids = frozenset({10})

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()

    def token_text(self, token_id: int) -> str:
        return TOKENS[token_id] if token_id < len(TOKENS) else ""  # ids beyond the pieces are padding of the vocabulary


def make_bans() -> Bans:
    return Bans(Texts(), 16, (9,))


@given(st.lists(st.sampled_from(["a", "ab", "bca", "cc", "abcabc", "é", "c a"]), min_size=1, max_size=3), st.data())
def test_exactly_the_tokens_that_would_complete_a_word_are_banned(words: list[str], data: st.DataObject) -> None:
    ban = make_bans().ban(tuple(words))
    assert ban is not None
    text = ""
    for _ in range(12):
        wrong = {i for i in range(9) if any(word in text + TOKENS[i] for word in words)}
        assert set(ban.tokens().tolist()) == wrong
        token = data.draw(st.sampled_from([i for i in range(11) if i not in wrong]))
        text += TOKENS[token] if token < 9 else ""
        ban.accept(token)


def test_a_special_token_is_banned_only_by_its_whole_name() -> None:
    for words, expected in ((("<special>",), {10}), (("<end>",), {9}), (("special", "e", "<"), set[int]())):
        ban = make_bans().ban(words)
        assert ban is not None
        assert set(ban.tokens().tolist()) == expected


def test_a_word_may_be_completed_by_a_part_of_a_character() -> None:
    """Tokens of a byte-level vocabulary may end within a character."""

    class Halves(Texts):
        def token_bytes(self, token_id: int) -> bytes:
            return [b"\xc3", b"\xa9", b"\xff", b"x"][token_id]

    ban = Bans(Halves(), 4).ban(("é",))
    assert ban is not None
    assert ban.tokens().tolist() == []
    ban.accept(0)
    assert ban.tokens().tolist() == [1]


def test_without_words_nothing_is_banned() -> None:
    assert Bans(None, 16).ban(()) is None
