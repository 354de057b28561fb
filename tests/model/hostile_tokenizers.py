"""Malicious or broken tokenizer.json files: their output explodes, they do not terminate, they crash the library, or
they contradict themselves.

`CASES` has each by name, with a text and the expected outcome:
  * "file": the file is refused with a sentence when it is read;
  * "text": the file can be read, and the text is refused;
  * "right": the text is tokenized to the ids that the library gives.
"""

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["file", "text", "right"]
Part = dict[str, Any]


@dataclass(frozen=True)
class Hostile:
    """The parts of a tokenizer.json that differ from `PLAIN`, a text, and the expected outcome."""

    outcome: Outcome
    text: str
    parts: Part

    def write(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text(json.dumps(PLAIN | self.parts))


BPE: Part = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3, "▁": 4, "<eos>": 5},
    "merges": ["a b"],
}
PLAIN: Part = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": BPE,
}
CASES: dict[str, Hostile] = {}


def case(name: str, outcome: Outcome, text: str = "aabc", **parts: Any) -> None:
    assert name not in CASES
    CASES[name] = Hostile(outcome, text, parts)


def replacing(pattern: str, content: str, kind: str = "String") -> Part:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def normalizers(*parts: Part) -> Part:
    return {"type": "Sequence", "normalizers": list(parts)}


def decoders(*parts: Part) -> Part:
    return {"type": "Sequence", "decoders": list(parts)}


def nested(part: Part, depth: int, kind: str, field: str) -> Part:
    for _ in range(depth):
        part = {"type": kind, field: [part]}
    return part


def added(content: str, number: int = 6, **more: Any) -> Part:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": content, **flags, **more}


def template(*pieces: str, special: Part | None = None) -> Part:
    items = [
        {"Sequence": {"id": p, "type_id": 0}} if p in "AB" else {"SpecialToken": {"id": p, "type_id": 0}}
        for p in pieces
    ]
    return {"type": "TemplateProcessing", "single": items, "pair": items, "special_tokens": special or {}}


def model(kind: str, **fields: Any) -> Part:
    return {"type": kind, **fields}


# normalizers
DOUBLING = replacing("a", "aa")
case("normalizer doubles 30 times", "text", normalizer=normalizers(*[DOUBLING] * 30))
case("normalizer doubles 8 times", "right", normalizer=normalizers(*[DOUBLING] * 8))
case(
    "normalizer writes a megabyte for a letter",
    "text",
    normalizer=normalizers(replacing("a", "b" * 1000), replacing("b", "a" * 1000), replacing("a", "b" * 1000)),
)
case("normalizer prepends 2000 times", "right", normalizer=normalizers(*[{"type": "Prepend", "prepend": "a"}] * 2000))
case(
    "normalizer prepends and doubles",
    "text",
    normalizer=normalizers(*[{"type": "Prepend", "prepend": "a" * 1000}, DOUBLING] * 30),
)
case("normalizer replaces nothing", "right", normalizer=replacing("", "x"))
case("normalizer removes everything", "text", normalizer=replacing(".", "", "Regex"))
case("normalizer expression backtracks", "text", "a" * 40, normalizer=replacing("(a+)+d", "x", "Regex"))
case("normalizer expression backtracks a little", "right", "aaaa", normalizer=replacing("(a+)+d", "x", "Regex"))
case("normalizer expression matches everywhere", "right", normalizer=replacing("(?=a)", "b", "Regex"))
case("normalizer expression is none", "file", normalizer=replacing("(a", "x", "Regex"))
case("normalizer expression is huge", "file", normalizer=replacing("(" * 5000 + ")" * 4999, "x", "Regex"))
case("normalizers nested 60 deep", "right", normalizer=nested({"type": "NFC"}, 60, "Sequence", "normalizers"))
case("normalizers nested 5000 deep", "file", normalizer={"type": "deep"})
case("normalizer unknown", "file", normalizer={"type": "Surprise"})
for label, content in {
    "empty": b"",
    "short": b"\0\0",
    "long": b"\xff" * 64,
    "cut": b"\x08\0\0\0" + b"\xff" * 12,
}.items():
    case(
        f"precompiled map {label}",
        "file",
        normalizer={"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()},
    )
case(
    "precompiled map of a cycle",
    "text",
    normalizer={
        "type": "Precompiled",
        "precompiled_charsmap": base64.b64encode((4).to_bytes(4, "little") + b"\0\1\0\0" + b"abc").decode(),
    },
)
case("precompiled map is no base64", "file", normalizer={"type": "Precompiled", "precompiled_charsmap": "%%%"})

# pre-tokenizers
case(
    "pre-tokenizer expression backtracks",
    "text",
    "a" * 40,
    pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a+)+d"}, "behavior": "Isolated", "invert": False},
)
case(
    "pre-tokenizer expression is empty",
    "right",
    pre_tokenizer={"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False},
)
case(
    "pre-tokenizer removes everything",
    "text",
    pre_tokenizer={"type": "Split", "pattern": {"Regex": "."}, "behavior": "Removed", "invert": False},
)
case("pre-tokenizer of length 0", "text", pre_tokenizer={"type": "FixedLength", "length": 0})
case(
    "pre-tokenizers nested 60 deep",
    "right",
    pre_tokenizer=nested({"type": "Digits", "individual_digits": True}, 60, "Sequence", "pretokenizers"),
)
case(
    "metaspace without a mark",
    "file",
    pre_tokenizer={"type": "Metaspace", "replacement": "", "prepend_scheme": "always", "split": True},
)
case("delimiter of two characters", "file", pre_tokenizer={"type": "CharDelimiterSplit", "delimiter": "ab"})

# models
case("merge of an unknown part", "file", model=BPE | {"merges": ["a z"]})
case("merge of an unknown result", "file", model=BPE | {"merges": ["b c"]})
case("merge of three parts", "file", model=BPE | {"merges": ["a b c"]})
case("merges that are numbers", "file", model=BPE | {"merges": [1, 2]})
case("vocabulary is empty", "text", model=BPE | {"vocab": {}, "merges": []})
case("vocabulary is a list", "file", model=BPE | {"vocab": ["a", "b"]})
case("id is negative", "file", model=BPE | {"vocab": {"a": -1}, "merges": []})
case("id is beyond 32 bits", "file", model=BPE | {"vocab": {"a": 1 << 33}, "merges": []})
case("id is above 2**31", "right", model=BPE | {"vocab": BPE["vocab"] | {"a": (1 << 31) + 5}})
case("ids are equal", "file", model=BPE | {"vocab": BPE["vocab"] | {"c": 0}})
case("unknown token missing in BPE", "text", "az", model=BPE | {"unk_token": "<unk>"})
case("unknown characters vanish", "text", "zzz")
case("unknown token missing in WordLevel", "text", "zz", model=model("WordLevel", vocab={"a": 0}, unk_token="<unk>"))
case(
    "unknown token missing in WordPiece",
    "text",
    "zz",
    model=model(
        "WordPiece", vocab={"a": 0}, unk_token="[UNK]", continuing_subword_prefix="##", max_input_chars_per_word=100
    ),
)
case(
    "unknown token missing in Unigram",
    "text",
    "zz",
    model=model("Unigram", vocab=[["a", 0.0]], unk_id=None, byte_fallback=False),
)
case("unknown id outside of Unigram", "file", model=model("Unigram", vocab=[["a", 0.0]], unk_id=7, byte_fallback=False))
case("Unigram is empty", "text", model=model("Unigram", vocab=[], unk_id=None, byte_fallback=False))
case(
    "Unigram scores are infinite",
    "right",
    model=model(
        "Unigram", vocab=[["<unk>", 0.0], ["a", -1e308], ["b", -1e308], ["c", 1e308]], unk_id=0, byte_fallback=False
    ),
)
case(
    "byte fallback with holes", "text", "ä", model=BPE | {"byte_fallback": True, "vocab": BPE["vocab"] | {"<0xC3>": 6}}
)
case(
    "byte fallback of one byte of two",
    "right",
    "aä",
    model=BPE | {"byte_fallback": True, "vocab": BPE["vocab"] | {"<0xC3>": 6, "<0xA4>": 7}},
    decoder={"type": "ByteFallback"},
)
case(
    "prefix and suffix inside characters",
    "file",
    model=BPE | {"end_of_word_suffix": "€", "continuing_subword_prefix": "##"},
)
case("dropout of 2", "file", model=BPE | {"dropout": 2.0})
case("model unknown", "file", model={"type": "Oracle", "vocab": {"a": 0}})
case("no model", "file", model=None)

# added tokens
case("added token of 20,000 characters", "file", added_tokens=[added("x" * 20_000)])
case("added token is empty", "right", added_tokens=[added("")])
case(
    "added token through an expression that backtracks",
    "file",
    added_tokens=[added("a" * 64, normalized=True)],
    normalizer=replacing("(a+)+d", "x", "Regex"),
)
case("added token with an id of its own mind", "right", "zza", added_tokens=[added("zz", (1 << 32) - 1)])
case("added tokens that begin alike", "right", "a" * 50, added_tokens=[added("a" * n, 5 + n) for n in range(2, 40)])
case(
    "added token that takes all spaces",
    "right",
    " " * 100 + "<x>" + " " * 100 + "a",
    added_tokens=[added("<x>", lstrip=True, rstrip=True)],
)
case(
    "added token through a normalizer that doubles",
    "file",
    added_tokens=[added("a" * 64, normalized=True)],
    normalizer=normalizers(*[DOUBLING] * 40),
)

# post-processors
case("template names an unknown token", "text", post_processor=template("[X]", "A"))
case(
    "template without the text",
    "right",
    post_processor=template("[X]", special={"[X]": {"id": "[X]", "ids": [1, 2], "tokens": ["x", "y"]}}),
)
case(
    "template writes the text 3000 times",
    "file",
    post_processor=template(*["A"] * 3000, special={}) | {"single": "A " * 3000},
)
case(
    "template of ids outside the vocabulary",
    "right",
    post_processor=template("[X]", "A", special={"[X]": {"id": "[X]", "ids": [4_000_000_000], "tokens": ["x"]}}),
)
case(
    "separator outside the vocabulary",
    "right",
    post_processor={"type": "BertProcessing", "sep": ["[SEP]", 999], "cls": ["[CLS]", 4_000_000_000]},
)
case("post-processor is a number", "file", post_processor=7)

# padding and truncation
case(
    "padding to ten million",
    "right",
    padding={
        "strategy": {"Fixed": 10_000_000},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    },
)
case(
    "padding to a multiple of 0",
    "right",
    padding={
        "strategy": "BatchLongest",
        "direction": "Right",
        "pad_to_multiple_of": 0,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    },
)
case(
    "truncation to nothing",
    "right",
    truncation={"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 0},
)
case(
    "truncation by more than there is",
    "right",
    truncation={"direction": "Left", "max_length": 1, "strategy": "OnlySecond", "stride": 5},
)

# decoders
case("decoder doubles 30 times", "file", decoder=decoders(*[DOUBLING] * 30))
case("decoder writes a megabyte for a letter", "file", decoder=replacing("a", "x" * 1_000_000))
case("decoder joins and expands a pair", "file", decoder=decoders({"type": "Fuse"}, replacing("ab", "x" * 1_000_000)))
case("decoder expression backtracks", "file", decoder=decoders({"type": "Fuse"}, replacing("(a+)+d", "x", "Regex")))
case("decoder expression without repetition", "right", decoder=replacing("[ab]", "x", "Regex"))
case("decoder strips the end", "file", decoder={"type": "Strip", "content": "a", "start": 0, "stop": 1})
case("decoder strips without end", "file", decoder={"type": "Strip", "content": "a", "start": 3, "stop": (1 << 64) - 1})
case(
    "decoder strips the beginning",
    "right",
    decoder=decoders({"type": "Fuse"}, {"type": "Strip", "content": "a", "start": 1, "stop": 0}),
)
case("decoder strips much of the beginning", "file", decoder={"type": "Strip", "content": "a", "start": 2, "stop": 0})
case("decoder writes nothing", "right", decoder=decoders(*[replacing(letter, "") for letter in "abc"]))
case(
    "decoder writes halves of characters", "right", decoder=decoders(*[replacing(letter, "\ufffd") for letter in "abc"])
)
case("decoder of words without a prefix", "right", decoder={"type": "WordPiece", "prefix": "", "cleanup": True})
case(
    "decoder of speech without a pad",
    "right",
    decoder={"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
)
case("decoders nested 60 deep", "right", decoder=nested({"type": "Fuse"}, 60, "Sequence", "decoders"))
case("decoder unknown", "file", decoder={"type": "Surprise"})
