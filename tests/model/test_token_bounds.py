"""The lower bound of a text's number of tokens never exceeds it, for every kind of tokenizer; it is None if no bound is
known."""

import unicodedata
from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from fp8serve.model.text.token_bounds import BYTE_TOKENS, token_length_bound

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(normalizer: object = None, without: str = "", use_regex: bool = True) -> tokenizers.Tokenizer:
    """Returns a byte-level BPE with a few merges, like those of GPT-2, Llama 3 and Qwen."""
    symbols = [symbol for symbol in ALPHABET if symbol not in without]
    pairs = [(a, b) for a, b in [("a", "b"), ("ab", "ab"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("e", "Ì")] if a[0] in symbols]
    vocab = {symbol: i for i, symbol in enumerate([*symbols, *("".join(pair) for pair in pairs)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens(["<eos>"])
    return backend


def sentencepiece(unknown: bool = False) -> tokenizers.Tokenizer:
    """Returns a BPE of characters with byte fallback, like those of Llama 2 and Mistral."""
    tokens = ["<unk>", *([] if unknown else BYTE_TOKENS), "▁", "a", "b", "ab", "▁▁"]
    vocab = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(
        vocab=vocab, merges=[("a", "b"), ("▁", "▁")], unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


def added(**options: bool) -> tokenizers.Tokenizer:
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<mask>", **options)])
    return backend


def split(behavior: str) -> tokenizers.Tokenizer:
    backend = byte_level()
    pieces = [pre_tokenizers.Split(Regex(r"\s+"), behavior), pre_tokenizers.ByteLevel(False, False, False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    return backend


CERTAIN: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "bytes": byte_level,
    "bytes in one word": lambda: byte_level(use_regex=False),
    "composed": lambda: byte_level(normalizers.NFC()),
    "compatible": lambda: byte_level(normalizers.NFKC()),
    "taken apart": lambda: byte_level(normalizers.NFKD()),
    "small letters": lambda: byte_level(normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])),
    "shorter words": lambda: byte_level(normalizers.Replace("ababab", "b")),
    "bytes that are missing": lambda: byte_level(without="Ā" + "z" + "ñ"),
    "sentencepiece": sentencepiece,
    "a longer added token": lambda: added(normalized=True),
    "isolated whitespace": lambda: split("isolated"),
}
UNCERTAIN: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "strips": lambda: byte_level(normalizers.Strip()),
    "replaces a pattern": lambda: byte_level(normalizers.Replace(Regex("a+"), "a")),
    "removes": lambda: byte_level(normalizers.Replace("a", "")),
    "strips accents": lambda: byte_level(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "BERT's": lambda: byte_level(normalizers.BertNormalizer()),
    "drops whitespace": lambda: split("removed"),
    "swallows spaces": lambda: added(rstrip=True),
    "swallows spaces before": lambda: added(lstrip=True),
    "fuses what it does not know": lambda: sentencepiece(unknown=True),
    "composes and loses": lambda: byte_level(normalizers.NFC(), without="z"),
    "loses whole characters": lambda: byte_level(without=ALPHABET[-1] + "¢"),
    "words": lambda: tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
    "pieces": lambda: tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False)),
}
HARD = [
    "a\u0300\u0323\u0301",
    "\u1f82",
    "\u212a",
    "\ufdfa",
    "İ",
    "ﬀ",
    "  ",
    "\x00",
    "z",
    "ñ",
    "<mask>",
    "<eos>",
    "ab",
    "\U00050000",
]
TEXTS = st.text() | st.lists(st.sampled_from(HARD), max_size=60).map("".join) | st.text("ab zé ", max_size=200)


@pytest.mark.parametrize("name", CERTAIN)
def test_a_text_never_has_fewer_tokens_than_the_bound(name: str) -> None:
    backend = CERTAIN[name]()
    bound = token_length_bound(backend)
    assert bound is not None

    @settings(max_examples=300)
    @given(TEXTS)
    def check(text: str) -> None:
        assert bound.min_token_count(text) <= len(backend.encode(text, add_special_tokens=False).ids)

    check()
    long = "".join(HARD) * 500
    assert bound.min_token_count(long) <= len(backend.encode(long).ids)
    assert bound.min_token_count("x" * 10_000) > 0


@pytest.mark.parametrize("name", UNCERTAIN)
def test_tokenizers_that_may_drop_characters_have_no_bound(name: str) -> None:
    assert token_length_bound(UNCERTAIN[name]()) is None


def test_the_factors_of_composition_hold_for_every_character() -> None:
    """NFC composes a character from at most four characters, and NFKC from at most eighteen."""
    for form, most in (("NFD", 4), ("NFKD", 18)):
        assert max(len(unicodedata.normalize(form, chr(code))) for code in range(0x110000)) <= most
