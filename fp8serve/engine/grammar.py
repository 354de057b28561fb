"""Structured outputs: a JSON schema, a regular expression or a grammar constrains which tokens may come next. In this
module, all three are called grammars.

In every step, llguidance computes a bitmask of allowed tokens from the tokens generated so far, and the sampler bans
the other tokens. A grammar is written in llguidance's dialect of Lark or in llama.cpp's GBNF, which is translated to
Lark. llguidance limits its own work (`LLParserLimits`), so a hostile schema is refused and cannot stall the engine.
Compiling takes well under 10 ms for ordinary schemas and up to 0.2 s for the largest. Compiled grammars are cached, and
the tokenizer is prepared once, at the first request with a grammar.

An output is complete when its grammar allows no further token, or when end-of-text is sampled where the grammar allows
it. If max_new_tokens ends the output earlier, its finish_reason is "length" and the output may violate the grammar.

A bitmask depends only on earlier steps, so one thread computes it while the forward pass runs. llguidance's own thread
pool is not used, because it would slow down the model. The op that applies the bitmask reads llguidance's format
(fp8/ops/sampling.py). This module does not import torch.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import llguidance
import numpy as np
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax
from llguidance.numpy import fill_next_token_bitmask, get_bitmask_shape
from numpy.typing import NDArray

from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import RequestError, TokenizerError
from fp8serve.model.text.tokenizer import translate_library_errors

MAX_MESSAGE_LENGTH = 200  # characters of a message of llguidance that are shown
# Whitespace between the tokens of JSON. It is limited, because small models tend to generate endless whitespace.
WHITESPACE = r"\n? {0,24}"
_UNESCAPED = r'[^"\\\x00-\x1F\x7F]'  # a character that needs no escape in a JSON string
SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_UNESCAPED}{{1,{n}}}" for n in (2, 4, 6, 8, 10, 12, 16, 20, 30)),
    f"{_UNESCAPED}+",
]
"""Sets of tokens, as regular expressions. If a grammar allows all tokens of a set, llguidance adds the set to a mask as
a whole. The sets affect the speed of masks but not their contents. llguidance's default has strings of three lengths.
More lengths speed up strings that a schema limits ("maxLength")."""
MAX_CACHED_GRAMMARS = 16  # compiled grammars


class Grammars:
    """Compiles the grammars of requests to one model."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._file, self._vocab_size, self._eos_ids = tokenizer_file, vocab_size, eos_ids
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled = lru_cache(maxsize=MAX_CACHED_GRAMMARS)(self._compile)

    def matcher(self, params: SamplingParams) -> LLMatcher | None:
        """Returns the state of a new output in the grammar of a request, or None if the request has no grammar. Raises
        RequestError if the grammar cannot be compiled."""
        validate(params)
        for kind, text in params.grammar_by_kind.items():
            matcher = self._compiled(kind, text)
            if matcher.is_error():
                raise _grammar_error(kind, matcher.get_error())
            return matcher.deep_copy()
        return None

    def _compile(self, kind: str, text: str) -> LLMatcher:
        matcher = LLMatcher(self._llg_tokenizer(), _to_llguidance(kind, text), log_level=0)
        matcher.compute_bitmask()  # so that a grammar which is too complex for the first step fails here
        return matcher

    def _llg_tokenizer(self) -> llguidance.LLTokenizer:
        if self._tokenizer is None:
            with translate_library_errors(TokenizerError, "Grammars cannot be used with this model's tokenizer"):
                self._tokenizer = llguidance.LLTokenizer(
                    self._file.read_text(),
                    n_vocab=self._vocab_size,
                    eos_token=list(self._eos_ids) or None,
                    slices=SLICES,
                )
        return self._tokenizer


def validate(params: SamplingParams) -> None:
    """Raises RequestError if the grammar of `params` is invalid. This needs no tokenizer."""
    for kind, text in params.grammar_by_kind.items():
        if message := _validation_error(kind, text):
            raise _grammar_error(kind, message)


@lru_cache(maxsize=MAX_CACHED_GRAMMARS)
def _validation_error(kind: str, text: str) -> str:
    """Returns llguidance's message about an invalid grammar, or an empty string if the grammar is valid."""
    try:
        return LLMatcher.validate_grammar(_to_llguidance(kind, text))
    except ValueError as error:  # a schema that is nested too deeply, or invalid GBNF
        return str(error)


def _to_llguidance(kind: str, text: str) -> str:
    """Translates a grammar to llguidance's notation. Raises ValueError if that is not possible."""
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": WHITESPACE})
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    return LLMatcher.grammar_from_lark(_to_lark(text))


def _to_lark(grammar: str) -> str:
    """Translates GBNF, which is recognized by rules with "::=", to Lark. Returns Lark unchanged. Raises ValueError if
    the GBNF is invalid."""
    if "::=" not in grammar or is_lark_syntax(grammar):
        return grammar
    try:
        return gbnf_to_lark(grammar)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except Exception as error:  # gbnf_to_lark raises its own errors and plain exceptions
        raise ValueError(str(error)) from None


def _grammar_error(kind: str, message: str) -> RequestError:
    name = {"json_schema": "JSON schema"}.get(kind, kind)
    if message.startswith("NoExtensionBias"):  # the grammar's recursion never ends
        return RequestError(f"The {name} cannot be used: no text of finite length matches it.")
    reason = " ".join(message.partition("<state>")[0].split())[:MAX_MESSAGE_LENGTH].rstrip(".")
    return RequestError(f"The {name} cannot be used: {reason}.")


class Mask:
    """The bitmask of a step. It covers `rows`, the rows that have a grammar."""

    def __init__(self, rows: list[int], allowed: Future[NDArray[np.int32]]) -> None:
        self.rows, self._allowed = rows, allowed

    def allowed(self) -> NDArray[np.int32]:
        """Waits for the bitmask and returns it, [rows, ceil(vocab / 32)]. The bit of an allowed token is 1.
        Token t has bit t % 32, from the lowest, of element t // 32."""
        return self._allowed.result()


class Masks:
    """Computes the bitmasks of the steps of one engine, in a thread."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def start(self, matchers: list[LLMatcher | None]) -> Mask | None:
        """Starts to compute the bitmask of a step with these rows. Returns None if no row has a grammar. Matchers must
        not accept a token before the bitmask is ready."""
        constrained = {row: matcher for row, matcher in enumerate(matchers) if matcher is not None}
        if not constrained:
            return None
        return Mask(list(constrained), self._thread.submit(self._compute, list(constrained.values())))

    def _compute(self, matchers: list[LLMatcher]) -> NDArray[np.int32]:
        bits = np.empty(get_bitmask_shape(len(matchers), self._vocab_size), np.int32)
        for row, matcher in enumerate(matchers):
            fill_next_token_bitmask(matcher, bits, row)
        return bits
