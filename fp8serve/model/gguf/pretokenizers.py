"""The pre-tokenizers that `tokenizer.ggml.pre` names: how a text is split into words before byte-level BPE.

A name stands for a family of tokenizers that split alike. The patterns are those of the families' own tokenizer.json;
that of "default" is llama.cpp's, which alone defines it. An unknown name is refused: another split gives other tokens,
and the model's answers would be only a little worse, so nobody would notice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_OTHER = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_OTHER}{_UPPER}*{_LOWER}+|{_OTHER}{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    rf"{_OTHER}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_OTHER}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
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


@dataclass(frozen=True)
class Family:
    """cuts: patterns applied one after the other; none: GPT-2's own split. whole_words: a word that is a token is not
    built by merges. nfc: the text is normalized. adds_bos: the default if the file does not say."""

    cuts: Sequence[str] = ()
    single_digits: bool = False
    whole_words: bool = False
    nfc: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if self.single_digits else []
        cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in self.cuts]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.cuts)
        return pre_tokenizers.Sequence([*digits, *cuts, to_bytes])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_LLAMA = Family((_LLAMA3,), whole_words=True, adds_bos=True)
_LLAMA_CUT, _QWEN_CUT, _DIGITS, _NEOX = (
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
    "tekken": Family((_TEKKEN,), whole_words=True, adds_bos=True),
    "dbrx": _LLAMA_CUT,  # GPT-4's: Phi-4, OLMo 2
    "smaug-bpe": _LLAMA_CUT,  # Llama 3's without BOS: SmolLM3
    "glm4": _LLAMA_CUT,
    "chatglm-bpe": _LLAMA_CUT,
    "gpt-4o": Family((_O200K,)),  # gpt-oss, Phi-4-mini
    "deepseek-r1-qwen": _QWEN_CUT,
    "stablelm2": _QWEN_CUT,
    "refact": _DIGITS,  # StarCoder's: Granite
    "starcoder": _DIGITS,
    "command-r": Family(single_digits=True, nfc=True),
    "deepseek-v3": Family(_DEEPSEEK3),
    "olmo": _NEOX,
    "mpt": _NEOX,
}
