"""Builds tokenizer.json and its companion files from the vocabulary in a GGUF file.

Two kinds of tokenizers are supported: byte-level BPE ("gpt2", with merges), and SentencePiece's BPE ("llama", with
scores). SentencePiece merges the pair whose result has the highest score. BPE does the same if its merges are all pairs
that form a piece, sorted by falling score of the piece.

`tokenizer.ggml.pre` names the pre-tokenizer, which splits a text into words before byte-level BPE. The patterns are
those of the families' own tokenizer.json; the pattern "default" is llama.cpp's own. An unknown name raises ModelError:
another split gives other tokens, which make the model's answers only a little worse, so nobody would notice.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from fp8serve.errors import ModelError, one_line, shown
from fp8serve.model.gguf.reader import GgufFile

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SYMBOLS_AND_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEADING_CHAR = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_LEADING_CHAR}{_UPPER}*{_LOWER}+|{_LEADING_CHAR}{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    rf"{_LEADING_CHAR}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEADING_CHAR}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_SPACE = "▁"  # SentencePiece's character for a space
_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # GGUF's word -> Hugging Face's
_END_ROLES = ("eos", "eot", "eom")  # the ends of a text, of a chat turn, and of a message with a tool call


@dataclass(frozen=True)
class Family:
    """The tokenizers with the same value of `tokenizer.ggml.pre`."""

    patterns: Sequence[str] = ()  # applied one after the other; empty: GPT-2's pattern
    single_digits: bool = False  # every digit is a word
    ignores_merges: bool = False  # a word in the vocabulary is one token, whatever the merges
    nfc: bool = False  # the text is normalized first
    adds_bos: bool = False  # default of `tokenizer.ggml.add_bos_token`

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if self.single_digits else []
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.patterns)
        return pre_tokenizers.Sequence([*digits, *splits, to_bytes])


_LLAMA = Family((_LLAMA3,), ignores_merges=True, adds_bos=True)
_LLAMA_PATTERN, _QWEN_PATTERN, _DIGITS, _NEOX = (
    Family((_LLAMA3,)), Family((_QWEN2,)), Family(single_digits=True), Family(nfc=True)
)  # fmt: skip
FAMILIES = {
    "default": Family(_DEFAULT),
    "gpt-2": Family(),
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "qwen2": Family((_QWEN2,), nfc=True),
    "smollm": _DIGITS,
    "tekken": Family((_TEKKEN,), ignores_merges=True, adds_bos=True),
    "dbrx": _LLAMA_PATTERN,  # GPT-4's pattern: Phi-4, OLMo 2
    "smaug-bpe": _LLAMA_PATTERN,  # Llama 3's pattern without BOS: SmolLM3
    "glm4": _LLAMA_PATTERN,
    "chatglm-bpe": _LLAMA_PATTERN,
    "gpt-4o": Family((_O200K,)),  # used by gpt-oss and Phi-4-mini
    "deepseek-r1-qwen": _QWEN_PATTERN,
    "stablelm2": _QWEN_PATTERN,
    "refact": _DIGITS,  # StarCoder's pattern: Granite
    "starcoder": _DIGITS,
    "command-r": Family(single_digits=True, nfc=True),
    "deepseek-v3": Family(_DEEPSEEK3),
    "olmo": _NEOX,
    "mpt": _NEOX,
}


class Kind(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a GGUF file."""

    tokens: list[str]  # by id
    kinds: list[int]  # by id
    roles: dict[str, int]  # token ids by role, such as "bos"

    def ids(self, *excluded: Kind) -> dict[str, int]:
        """Returns the ids by token, without the kinds in `excluded`."""
        return {token: i for i, token in enumerate(self.tokens) if self.kinds[i] not in excluded}


def tokenizer_files(file: GgufFile) -> dict[str, str]:
    """Returns the content of tokenizer.json, tokenizer_config.json and generation_config.json by file name.

    Raises ModelError if the tokenizer or pre-tokenizer is not supported, or if the vocabulary contradicts itself.
    """
    vocabulary = _vocabulary(file)
    try:
        tokenizer = _tokenizer(file, vocabulary)
    except Exception as e:  # the library raises plain Exception
        if isinstance(e, ModelError):
            raise
        raise ModelError(f"{file.path} holds a vocabulary that makes no tokenizer: {one_line(e)}.") from None
    roles = vocabulary.roles
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {f"{name}_token": vocabulary.tokens[roles[role]] for role, name in _ROLES.items() if role in roles}
    if template := file.get("tokenizer.chat_template", str):
        config["chat_template"] = template
    end_ids = list(dict.fromkeys(roles[role] for role in _END_ROLES if role in roles))
    generation = {
        "bos_token_id": roles.get("bos"),
        "eos_token_id": end_ids if len(end_ids) > 1 else next(iter(end_ids), None),
        "pad_token_id": roles.get("padding"),
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=False),
        "tokenizer_config.json": _json(config),
        "generation_config.json": _json({key: value for key, value in generation.items() if value is not None}),
    }


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _vocabulary(file: GgufFile) -> Vocabulary:
    tokens = file.get_list("tokenizer.ggml.tokens", str)
    kinds = file.get_list("tokenizer.ggml.token_type", int) or [int(Kind.NORMAL)] * len(tokens)
    if len(kinds) != len(tokens) or not tokens:
        raise ModelError(f"{file.path} has {len(tokens)} tokens, and the types of {len(kinds)}.")
    if len(set(tokens)) != len(tokens):
        duplicate = Counter(tokens).most_common(1)[0][0]
        raise ModelError(f"{file.path} has the token {shown(duplicate)} twice.")
    ids = {role: file.get(f"tokenizer.ggml.{role}_token_id", int) for role in (*_ROLES, *_END_ROLES)}
    roles = {role: i for role, i in ids.items() if i is not None}
    for role, i in roles.items():
        if not 0 <= i < len(tokens):
            raise ModelError(f"{file.path}: the {role} token is {i}, but there are {len(tokens)} tokens.")
    return Vocabulary(tokens, kinds, roles)


def _tokenizer(file: GgufFile, vocabulary: Vocabulary) -> Tokenizer:
    model = file.require("tokenizer.ggml.model", str)
    if model == "gpt2":
        return _byte_level(file, vocabulary)
    if model == "llama":
        return _sentencepiece(file, vocabulary)
    raise ModelError(f"{file.path}: the tokenizer {shown(model)} is not supported; supported are gpt2 and llama.")


def _byte_level(file: GgufFile, vocabulary: Vocabulary) -> Tokenizer:
    name = file.get("tokenizer.ggml.pre", str) or "default"
    if name not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise ModelError(f"{file.path}: the pre-tokenizer {shown(name)} is not supported; supported are {supported}.")
    family = FAMILIES[name]
    ids = vocabulary.ids(Kind.UNUSED)
    tokenizer = Tokenizer(BPE(ids, list(_merges(file)), ignore_merges=family.ignores_merges))
    if family.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = family.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, vocabulary)
    steps = [processors.ByteLevel(trim_offsets=False), _template(file, vocabulary, family.adds_bos)]
    tokenizer.post_processor = processors.Sequence(steps)
    return tokenizer


def _merges(file: GgufFile) -> Iterator[tuple[str, str]]:
    for merge in file.get_list("tokenizer.ggml.merges", str):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise ModelError(f"{file.path}: the merge {shown(merge)} is not two tokens with a space between.")
        yield left, right


def _sentencepiece(file: GgufFile, vocabulary: Vocabulary) -> Tokenizer:
    if file.get("tokenizer.ggml.remove_extra_whitespaces", bool) or file.value("tokenizer.ggml.precompiled_charsmap"):
        raise ModelError(
            f"{file.path}: a tokenizer that rewrites its text (remove_extra_whitespaces) is not supported."
        )
    ids = vocabulary.ids(Kind.UNUSED)
    unknown = vocabulary.tokens[vocabulary.roles["unknown"]] if "unknown" in vocabulary.roles else None
    fallback = all(token in ids for token in _BYTE_TOKENS)
    model = BPE(ids, _merges_by_score(file, vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=fallback)
    tokenizer = Tokenizer(model)
    adds_space = file.get("tokenizer.ggml.add_space_prefix", bool) is not False
    normalizer = [normalizers.Replace(" ", _SPACE)]
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), *normalizer] if adds_space else normalizer
    )
    decoder = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decoder, decoders.Strip(" ", 1, 0)] if adds_space else decoder)
    _add_tokens(tokenizer, vocabulary)
    tokenizer.post_processor = _template(file, vocabulary, adds_bos=True)
    return tokenizer


def _merges_by_score(file: GgufFile, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Returns all pairs of pieces whose concatenation is a piece, by falling score of that piece, then by their ids."""
    scores = file.get_list("tokenizer.ggml.scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise ModelError(f"{file.path} has {len(vocabulary.tokens)} tokens, and the scores of {len(scores)}.")
    pieces = vocabulary.ids(Kind.UNUSED, Kind.UNKNOWN, Kind.CONTROL, Kind.BYTE)
    merges: list[tuple[str, str]] = []
    for piece in sorted(pieces, key=lambda p: -scores[pieces[p]]):
        splits = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        pairs = [pair for pair in splits if pair[0] in pieces and pair[1] in pieces]
        merges += sorted(pairs, key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
    return merges


def _add_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Adds the tokens that match before pre-tokenization. Control tokens are special, user-defined tokens are text."""
    special = (Kind.CONTROL, Kind.UNKNOWN)
    added = [
        AddedToken(token, normalized=False, special=kind in special)
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        if kind in (*special, Kind.USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _template(file: GgufFile, vocabulary: Vocabulary, adds_bos: bool) -> processors.TemplateProcessing:
    """Returns a post-processor that adds BOS and EOS as the file says. `adds_bos` is the default for BOS."""
    flags = {role: file.get(f"tokenizer.ggml.add_{role}_token", bool) for role in ("bos", "eos")}
    adds = {"bos": adds_bos if flags["bos"] is None else flags["bos"], "eos": bool(flags["eos"])}
    ids = {role: vocabulary.roles[role] for role, is_added in adds.items() if is_added and role in vocabulary.roles}
    names = {role: vocabulary.tokens[i] for role, i in ids.items()}
    single = [*([names["bos"]] if "bos" in names else []), "$A", *([names["eos"]] if "eos" in names else [])]
    return processors.TemplateProcessing(single=single, special_tokens=[(names[role], ids[role]) for role in ids])
