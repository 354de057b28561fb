"""Answers of a given form: a JSON schema, a regular expression or a grammar decides which tokens may come next.

llguidance parses what was generated and gives, for every step, a bit per token; the sampler rules out the rest. A
grammar is in llguidance's dialect of Lark, or in llama.cpp's GBNF, which is translated. The library limits its own
effort (`LLParserLimits`), so a hostile schema is refused instead of stalling the engine. Compiling is quick for
ordinary schemas (well under 10 ms) and takes up to 0.2 s for the largest; a request of many answers compiles once. The
tokenizer's tables are made once, when the first such request arrives.

An answer is complete when its grammar can go no further or end-of-text is drawn where the grammar allows it; one that
is cut off by max_new_tokens says "length" and need not conform. No torch.

A mask depends only on what was generated before the step, so one thread computes it beside the forward pass, row by
row, and it is read when the logits are ready. The library's own pool of threads would take more time from the model.
An op reads the library's bit for each token as it is (fp8/ops/sampling.py).
"""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax
from llguidance.numpy import fill_next_token_bitmask, get_bitmask_shape
from numpy.typing import NDArray

from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import RequestError, TokenizerError
from fp8serve.model.text.tokenizer import library_failures

MAX_COMPLAINT = 200  # characters of the library's message that are shown
# Between the parts of a JSON text: room to indent, but not for ever, which small models tend to do.
WHITESPACE = r"\n? {0,24}"
_PLAIN = r'[^"\\\x00-\x1F\x7F]'  # a character that stands for itself in a string of JSON
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_PLAIN}{{1,{n}}}" for n in (2, 4, 6, 8, 10, 12, 16, 20, 30)), f"{_PLAIN}+"]
"""Sets of tokens, as regular expressions. A form that allows every token of one takes it as a whole, which changes how
long a mask takes and not what is in it. The library's own are three lengths of strings; strings that a schema bounds
("maxLength") gain by more of them."""
CACHED = 16  # grammars that are kept, checked and compiled


class Matcher:
    """One request's place in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self.parser = matcher

    def accept(self, token_id: int) -> bool:
        """Advances by a token; False when the grammar does not allow it, or is too complex."""
        return self.parser.consume_token(token_id)

    @property
    def complete(self) -> bool:
        """Nothing more can come."""
        return self.parser.is_stopped()


class Grammars:
    """Makes matchers for one model."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._file, self._vocab_size, self._eos_ids = tokenizer_file, vocab_size, eos_ids
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled = lru_cache(maxsize=CACHED)(self._compile)

    def matcher(self, params: SamplingParams) -> Matcher | None:
        """None when `params` ask for no form."""
        validate(params)
        for kind, text in params.form.items():
            matcher = self._compiled(kind, text)
            if matcher.is_error():
                raise _refusal(kind, matcher.get_error())
            return Matcher(matcher.deep_copy())
        return None

    def _compile(self, kind: str, text: str) -> llguidance.LLMatcher:
        """With the first step's tokens computed, so that a grammar too complex for that fails here."""
        matcher = llguidance.LLMatcher(self._llg(), _in_library_form(kind, text), log_level=0)
        matcher.compute_bitmask()
        return matcher

    def _llg(self) -> llguidance.LLTokenizer:
        if self._tokenizer is None:
            with library_failures(TokenizerError, "Grammars cannot be used with this model's tokenizer"):
                self._tokenizer = llguidance.LLTokenizer(
                    self._file.read_text(),
                    n_vocab=self._vocab_size,
                    eos_token=list(self._eos_ids) or None,
                    slices=SLICES,
                )
        return self._tokenizer


def validate(params: SamplingParams) -> None:
    """RequestError when the form that `params` ask for cannot be used; needs no tokenizer."""
    for kind, text in params.form.items():
        if complaint := _complaint(kind, text):
            raise _refusal(kind, complaint)


@lru_cache(maxsize=CACHED)
def _complaint(kind: str, text: str) -> str:
    """The library's complaint about it, or None."""
    try:
        return llguidance.LLMatcher.validate_grammar(_in_library_form(kind, text))
    except ValueError as error:  # a schema nested too deeply, or text that is not GBNF
        return str(error)


def _in_library_form(kind: str, text: str) -> str:
    """The form in the library's own notation. ValueError when it cannot be written in it."""
    if kind == "json_schema":
        return llguidance.LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": WHITESPACE})
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(text)
    return llguidance.LLMatcher.grammar_from_lark(_lark(text))


def _lark(grammar: str) -> str:
    """Lark as it is, GBNF translated; a grammar is GBNF if it has rules with "::=". ValueError: it is not valid
    GBNF."""
    if "::=" not in grammar or is_lark_syntax(grammar):
        return grammar
    try:
        return gbnf_to_lark(grammar)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except Exception as error:  # the library raises its own errors and bare exceptions
        raise ValueError(str(error)) from None


def _refusal(kind: str, complaint: str) -> RequestError:
    what = {"json_schema": "JSON schema"}.get(kind, kind)
    if complaint.startswith("NoExtensionBias"):  # the form refers to itself without end
        return RequestError(f"The {what} cannot be used: nothing of finite length fits it.")
    reason = " ".join(complaint.partition("<state>")[0].split())[:MAX_COMPLAINT].rstrip(".")
    return RequestError(f"The {what} cannot be used: {reason}.")


class Mask:
    """The mask of the `rows` of a step that have a form; `allowed` waits until it is ready."""

    def __init__(self, rows: list[int], allowed: Future[NDArray[np.int32]]) -> None:
        self.rows, self._allowed = rows, allowed

    def allowed(self) -> NDArray[np.int32]:
        """[rows, ceil(vocab / 32)]: a bit for each token, set where it may come; the lowest bit of a word first."""
        return self._allowed.result()


class Masks:
    """Makes the masks of one engine's steps."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def begin(self, matchers: list[Matcher | None]) -> Mask | None:
        """Starts the mask of a step with these rows; None if no row has a form. No token may be accepted before the
        mask is ready."""
        constrained = {row: matcher for row, matcher in enumerate(matchers) if matcher is not None}
        if not constrained:
            return None
        return Mask(list(constrained), self._thread.submit(self._compute, list(constrained.values())))

    def _compute(self, matchers: list[Matcher]) -> NDArray[np.int32]:
        bits = np.empty(get_bitmask_shape(len(matchers), self._vocab_size), np.int32)
        for row, matcher in enumerate(matchers):
            fill_next_token_bitmask(matcher.parser, bits, row)
        return bits
