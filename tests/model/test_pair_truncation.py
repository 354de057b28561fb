"""Truncation of texts and pairs equals that of the library tokenizers; of a reranking prompt, only the document is
truncated."""

from pathlib import Path

import pytest
import tokenizers

from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.server.parsing.texts import TextRequest, encode_text
from tests.model.encoders import letters


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("letters")
    letters(path)
    return path


@pytest.mark.parametrize("lengths", [(1, 1), (3, 20), (20, 3), (20, 20), (9, 8), (0, 30), (30, 0), (20_000, 3)])
@pytest.mark.parametrize("most", [5, 6, 12, 13, 40])
def test_pairs_are_truncated_like_the_library(folder: Path, lengths: tuple[int, int], most: int) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(most)
    pair = "a" * lengths[0], "b" * lengths[1]
    for texts in (pair, pair[:1], pair[1:]):
        expected = backend.encode(*texts)
        assert Tokenizer.from_dir(folder).encode_pair(*texts, limit=most) == (expected.ids, expected.type_ids)


def test_truncated_text_ends_at_a_token_boundary(folder: Path) -> None:
    tokenizer = Tokenizer.from_dir(folder)
    assert tokenizer.truncate_text("abcdef", 4) == "abcd"
    assert tokenizer.truncate_text("abcdef", 6) == tokenizer.truncate_text("abcdef", 9) == "abcdef"
    assert tokenizer.truncate_text("ab" * 100_000, 3) == "aba"


def test_the_instructions_of_a_reranking_prompt_are_not_truncated(folder: Path) -> None:
    tokenizer, around = Tokenizer.from_dir(folder), ("xx", "y", "zz")
    request = TextRequest("qq", "d" * 5000, 14, None, around)
    assert encode_text(tokenizer, request)[0] == tokenizer.encode("xxqqyddddd" + "zz")
    assert encode_text(tokenizer, TextRequest("qq", "d" * 50, None, 3, around))[0] == tokenizer.encode("xxqqydddzz")
    cut = encode_text(tokenizer, TextRequest("q" * 50, "d", 14, None, around))[0]
    assert cut == tokenizer.encode("xx" + "q" * 50 + "yzz")
