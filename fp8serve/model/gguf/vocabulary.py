"""A directory's tokenizer as the keys of a GGUF file: byte-level BPE that splits like one of `pretokenizers.FAMILIES`.

The family is found by trying all of them on a text that is hard to split, as llama.cpp's own converter does. A
tokenizer that splits like none of them is refused, never guessed.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from fp8serve.errors import ModelError
from fp8serve.model.gguf.pretokenizers import FAMILIES, Family
from fp8serve.model.gguf.reader import GgufFile
from fp8serve.model.gguf.tokenizer import Kind, tokenizer_files
from fp8serve.model.storage.files import MAX_CARRIED_BYTES, read_json, read_optional_json, read_text
from fp8serve.model.stored import Checkpoint
from fp8serve.model.text.tokenizer import Tokenizer, template_source

HARD = (
    "Hello, World!  I'll say it's 3 o'clock; WE'VE 12345 (or 1,234.5e-6) things\n\n\n \t\ttab  and   spaces    end \n"
    "ÄÖÜ naïve café Ångström ﬁne e\u0301 κόσμε Привет 你好世界 こんにちは 안녕 مرحبا 🚀👩‍👩‍👧 ½²³ ...!!!??? $^~|<=>+ "
    "camelCase HTTPServer x=1;\r\nfor(i=0;i<10;++i){}//done /path/to\n  __init__ 'single' \"double\" 1 22 333 4444"
)
_ENDS = ("eos", "eot", "eom")


def vocabulary_keys(checkpoint: Checkpoint) -> dict[str, Any]:
    """The keys `tokenizer.*`. ModelError: there is no tokenizer, or GGUF cannot express it."""
    path, tokenizer = checkpoint.path, Tokenizer.from_dir(checkpoint.path)
    raw = read_json(path / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_str(read_text(path / "tokenizer.json", MAX_CARRIED_BYTES))
    tokens, kinds = _tokens(checkpoint, tokenizer, backend)
    ends = [i for i in dict.fromkeys((tokenizer.eos_id, *tokenizer.eos_ids)) if i is not None]
    roles = {"bos": tokenizer.bos_id, **dict(zip(_ENDS, ends, strict=False))}
    around = tokenizer.encode("a")
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _family(path, raw, backend),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": list(_merges(raw)),
        "tokenizer.ggml.add_bos_token": bool(around) and around[0] == tokenizer.bos_id,
        "tokenizer.ggml.add_eos_token": bool(around) and around[-1] in tokenizer.eos_ids,
        "tokenizer.chat_template": template_source(path, read_optional_json(path / "tokenizer_config.json")),
    }
    keys |= {f"tokenizer.ggml.{role}_token_id": i for role, i in roles.items()}
    return {key: value for key, value in keys.items() if value is not None}


def check_same_tokens(file: GgufFile, model_dir: Path) -> None:
    """ModelError unless the tokenizer in `file` gives the same tokens as the directory's."""
    written, own = tokenizers.Tokenizer.from_str(tokenizer_files(file)["tokenizer.json"]), Tokenizer.from_dir(model_dir)
    for text in (HARD, *HARD.split(" ")):
        if written.encode(text).ids != own.encode(text):
            raise ModelError(f"{model_dir}: the tokenizer makes other tokens than GGUF's; it is not written as GGUF.")


def _tokens(checkpoint: Checkpoint, tokenizer: Tokenizer, backend: tokenizers.Tokenizer) -> tuple[list[str], list[int]]:
    """Tokens and kinds by id, padded to the size of the model's vocabulary."""
    size, by_id = checkpoint.config.vocab_size, {i: t for t, i in backend.get_vocab(with_added_tokens=True).items()}
    if max(by_id, default=0) >= size:
        raise ModelError(
            f"{checkpoint.path}: the tokenizer has more tokens than the model, {max(by_id) + 1} and {size}."
        )
    added = backend.get_added_tokens_decoder()
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(size)]
    return tokens, [int(_kind(i, i in by_id, i in added, i in tokenizer.special_ids)) for i in range(size)]


def _kind(i: int, known: bool, added: bool, special: bool) -> Kind:
    if not known:
        return Kind.UNUSED
    return Kind.CONTROL if special else Kind.USER_DEFINED if added else Kind.NORMAL


def _merges(raw: dict[str, Any]) -> Iterator[str]:
    """transformers 5 writes a merge as two texts, 4 as one with a space between."""
    for merge in raw["model"].get("merges") or ():
        yield merge if isinstance(merge, str) else " ".join(merge)


def _family(path: Path, raw: dict[str, Any], backend: tokenizers.Tokenizer) -> str:
    model = raw.get("model") or {}
    is_byte_level = '"ByteLevel"' in json.dumps(raw.get("pre_tokenizer"))
    if model.get("type") == "BPE" and is_byte_level and backend.pre_tokenizer is not None:
        cut = backend.pre_tokenizer.pre_tokenize_str(HARD)
        for name, family in FAMILIES.items():
            if family.pre_tokenizer().pre_tokenize_str(HARD) == cut and _is_alike(family, raw):
                return name
    raise ModelError(f"{path}: the tokenizer cuts texts as none that GGUF is written with ({', '.join(FAMILIES)}).")


def _is_alike(family: Family, raw: dict[str, Any]) -> bool:
    nfc = '"NFC"' in json.dumps(raw.get("normalizer"))
    return family.nfc == nfc and family.whole_words == bool(raw["model"].get("ignore_merges"))
