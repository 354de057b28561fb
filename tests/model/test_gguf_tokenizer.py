"""Tokenizers of GGUF files: byte-level BPE with the pre-tokenizer of its family, and SentencePiece with its merge
rule."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import transformers
from gguf import GGUFWriter
from tokenizers import Tokenizer

from fp8serve.errors import ModelError
from fp8serve.model.gguf.reader import GgufFile
from fp8serve.model.gguf.tokenizer import FAMILIES, tokenizer_files
from tests.model.gguf_files import add, finish
from tests.model.oracle import byte_level

TEXT = "I'LL pay  12345 yen,\n\n ok"
CUTS = {
    "gpt-2": ["I", "'", "LL", " pay", " ", " 12345", " yen", ",", "\n\n", " ok"],
    "smollm": ["I", "'", "LL", " pay", "  ", "1", "2", "3", "4", "5", " yen", ",", "\n\n", " ok"],
    "llama-bpe": ["I", "'LL", " pay", " ", " ", "123", "45", " yen", ",\n\n", " ok"],
    "qwen2": ["I", "'LL", " pay", " ", " ", "1", "2", "3", "4", "5", " yen", ",\n\n", " ok"],
    "tekken": ["I", "'LL", " pay", " ", " ", "1", "2", "3", "4", "5", " yen", ",\n\n", " ok"],
    "gpt-4o": ["I'LL", " pay", " ", " ", "123", "45", " yen", ",\n\n", " ok"],
    "deepseek-v3": ["I", "'LL", " pay", "  ", "123", "45", " yen", ",\n\n", " ok"],
    "default": ["I", "'", "LL", " pay", " ", " ", "123", "45", " yen", ",", "\n\n", " ok"],
}
CUT_AS = {
    **dict.fromkeys(("llama3", "llama-v3", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), "llama-bpe"),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2"), "qwen2"),
    **dict.fromkeys(("refact", "starcoder", "command-r"), "smollm"),
    **dict.fromkeys(("olmo", "mpt"), "gpt-2"),
}
PIECES = {"▁": -9.0, "a": -5.0, "b": -6.0, "c": -7.0, "▁a": -1.0, "ab": -2.0, "bc": -1.5, "abc": -3.0, "▁ab": -2.5}


def build(out: Path, metadata: dict[str, Any]) -> Tokenizer:
    writer = GGUFWriter(out / "vocabulary.gguf", "llama")
    for key, value in metadata.items():
        add(writer, f"tokenizer.ggml.{key}", value)
    file = GgufFile(finish(writer, out / "vocabulary.gguf"))
    return Tokenizer.from_str(tokenizer_files(file)["tokenizer.json"])


def byte_level_metadata(**other: Any) -> dict[str, Any]:
    vocabulary = byte_level().get_vocab()
    tokens = [*sorted(vocabulary, key=lambda t: vocabulary[t]), "<mine>", "[PAD]"]
    kinds = [3, 3, *[1] * (len(tokens) - 4), 4, 5]
    merges = ["t h", "th e", "Ġ the", "i n", "in g"]
    return {"model": "gpt2", "tokens": tokens, "token_type": kinds, "merges": merges, "bos_token_id": 0,
            "eos_token_id": 1, **other}  # fmt: skip


@pytest.mark.parametrize("name", CUTS)
def test_each_family_splits_a_text_by_its_pre_tokenizer(name: str) -> None:
    pieces = [TEXT[start:end] for _, (start, end) in FAMILIES[name].pre_tokenizer().pre_tokenize_str(TEXT)]
    assert pieces == CUTS[name]


def test_every_family_is_covered() -> None:
    """Pre-tokenizers without a case of their own split like those of another family."""
    assert set(FAMILIES) - set(CUTS) == set(CUT_AS)
    for name, equivalent in CUT_AS.items():
        assert FAMILIES[name].pre_tokenizer().__getstate__() == FAMILIES[equivalent].pre_tokenizer().__getstate__()
    assert FAMILIES["llama3"] == FAMILIES["llama-v3"] == FAMILIES["llama-bpe"]


def test_deepseeks_pre_tokenizer_splits_scripts() -> None:
    """Chinese and kana characters are split off, letters keep their combining marks, and a sign stays with the letters
    after it."""
    text = "x日本語かなカナy e\u0301t(word 1234"
    pieces = [text[start:end] for _, (start, end) in FAMILIES["deepseek-v3"].pre_tokenizer().pre_tokenize_str(text)]
    assert pieces == ["x", "日本語かなカナ", "y", " e\u0301t", "(word", " ", "123", "4"]


def test_qwen2_tokenizer_equals_transformers(tmp_path: Path) -> None:
    metadata = byte_level_metadata(pre="qwen2")
    ours = build(tmp_path, metadata)
    vocabulary = {token: i for i, token in enumerate(metadata["tokens"])}
    make: Any = transformers.Qwen2Tokenizer
    theirs = make(vocab=vocabulary, merges=[tuple(m.split(" ")) for m in metadata["merges"]])
    for text in texts("the ingI'LL12 \n\t,.é e\u0301日😀"):
        assert ours.encode(text).ids == theirs.backend_tokenizer.encode(text).ids, text


def texts(alphabet: str, count: int = 300) -> list[str]:
    numbers = random.Random(0)
    return ["".join(numbers.choices(alphabet, k=numbers.randint(0, 24))) for _ in range(count)]


def test_special_tokens_are_recognized_and_unused_ones_are_not(tmp_path: Path) -> None:
    ours = build(tmp_path, byte_level_metadata(pre="smollm"))
    mine = ours.token_to_id("<mine>")
    assert ours.encode("<s>the<mine></s>").ids == [0, ours.token_to_id("the"), mine, 1]
    assert ours.token_to_id("[PAD]") is None
    added = ours.get_added_tokens_decoder()
    assert {i: token.special for i, token in added.items()} == {0: True, 1: True, mine: False}


@pytest.mark.parametrize(
    ("metadata", "ends"),
    [
        ({"pre": "gpt-2"}, ([], [])),
        ({"pre": "llama-bpe"}, ([0], [])),
        ({"pre": "llama-bpe", "add_bos_token": False}, ([], [])),
        ({"pre": "gpt-2", "add_bos_token": True, "add_eos_token": True}, ([0], [1])),
    ],
)
def test_bos_and_eos_are_added_as_the_file_or_the_family_requires(
    metadata: dict[str, Any], ends: tuple[list[int], list[int]], tmp_path: Path
) -> None:
    ours = build(tmp_path, byte_level_metadata(**metadata))
    assert ours.encode("the").ids == [*ends[0], ours.token_to_id("the"), *ends[1]]


def sentencepiece_metadata(**other: Any) -> dict[str, Any]:
    fallback = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *fallback, *PIECES]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
    scores = [0.0] * 259 + list(PIECES.values())
    return {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores, "bos_token_id": 1,
            "eos_token_id": 2, "unknown_token_id": 0, **other}  # fmt: skip


def pieces_by_rule(text: str) -> list[str]:
    """Applies SentencePiece's rule: merge the adjacent pair whose piece has the highest score, the leftmost of
    equals."""
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while joined := [(-PIECES[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in PIECES]:
        at = min(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def test_pieces_are_merged_by_score(tmp_path: Path) -> None:
    ours = build(tmp_path, sentencepiece_metadata())
    for text in texts("aaabbbc "):
        assert ours.encode(text).tokens == ["<s>", *pieces_by_rule(text)], text
        assert ours.decode(ours.encode(text).ids) == text


def test_unknown_characters_become_bytes_and_come_back(tmp_path: Path) -> None:
    ours = build(tmp_path, sentencepiece_metadata())
    assert ours.encode("é").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert ours.decode(ours.encode("aé 日\nb").ids) == "aé 日\nb"


def test_a_space_is_put_before_a_text_unless_the_file_says_no(tmp_path: Path) -> None:
    ours = build(tmp_path, sentencepiece_metadata(add_space_prefix=False, add_bos_token=False))
    assert ours.encode("a").tokens == ["a"]
    assert ours.decode(ours.encode(" a").ids) == " a"


@pytest.mark.parametrize(
    ("metadata", "says"),
    [({"scores": [1.0]}, "the scores of 1"), ({"remove_extra_whitespaces": True}, "rewrites its text")],
)
def test_an_inconsistent_vocabulary_is_refused(metadata: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=says):
        build(tmp_path, sentencepiece_metadata(**metadata))
