"""Answers of a given form: a JSON schema or a regular expression decides which tokens may come next.

llguidance parses what was generated and gives, for every step, a bit per token; the sampler rules out the rest. It
limits its own effort (`LLParserLimits`), so a hostile schema is refused instead of stalling the engine. Compiling is
quick for ordinary schemas (well under 10 ms) and takes up to 0.2 s for the largest; a request of many answers compiles
once. The tokenizer's tables are made once, when the first such request comes.

An answer is complete when its grammar can go no further or end-of-text is drawn where the grammar allows it; one that
is cut off by max_new_tokens says "length" and need not conform. No torch.
"""

from functools import lru_cache
from pathlib import Path

import llguidance

from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import RequestError

MAX_COMPLAINT = 200  # characters of the library's message that are shown
# Between the parts of a JSON text: room to indent, but not for ever, which small models tend to do.
WHITESPACE = r"\n? {0,24}"
KEPT = 16  # grammars that are kept, checked and compiled


class Matcher:
    """One request's place in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self) -> bytes:
        """One bit per token of the vocabulary, least significant first: 1 may come next."""
        return self._matcher.compute_bitmask()

    def accept(self, token_id: int) -> bool:
        """Goes on by a token; False when the grammar does not allow it, or is too complex."""
        return self._matcher.consume_token(token_id)

    @property
    def complete(self) -> bool:
        """Nothing more can come."""
        return self._matcher.is_stopped()


class Grammars:
    """Makes matchers for one model."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._file, self._vocab_size, self._eos_ids = tokenizer_file, vocab_size, eos_ids
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled = lru_cache(maxsize=KEPT)(self._compile)

    def matcher(self, params: SamplingParams) -> Matcher | None:
        """None when `params` ask for no form."""
        if not params.has_form:
            return None
        validate(params)
        matcher = self._compiled(params.json_schema, params.regex)
        if matcher.is_error():
            raise _refusal(params, matcher.get_error())
        return Matcher(matcher.deep_copy())

    def _compile(self, json_schema: str | None, regex: str | None) -> llguidance.LLMatcher:
        """With the first step's tokens computed, so that a grammar too complex for that fails here."""
        matcher = llguidance.LLMatcher(self._llg(), _grammar(json_schema, regex), log_level=0)
        matcher.compute_bitmask()
        return matcher

    def _llg(self) -> llguidance.LLTokenizer:
        if self._tokenizer is None:
            self._tokenizer = llguidance.LLTokenizer(
                self._file.read_text(), n_vocab=self._vocab_size, eos_token=list(self._eos_ids) or None
            )
        return self._tokenizer


def validate(params: SamplingParams) -> None:
    """RequestError when the form that `params` ask for cannot be used; needs no tokenizer."""
    if params.has_form and (complaint := _complaint(params.json_schema, params.regex)):
        raise _refusal(params, complaint)


@lru_cache(maxsize=KEPT)
def _complaint(json_schema: str | None, regex: str | None) -> str:
    """What the library has against it, or nothing."""
    try:
        return llguidance.LLMatcher.validate_grammar(_grammar(json_schema, regex))
    except ValueError as error:  # a schema nested too deeply
        return str(error)


def _grammar(json_schema: str | None, regex: str | None) -> str:
    """In the library's own notation, of one of the two."""
    if json_schema is not None:
        return llguidance.LLMatcher.grammar_from_json_schema(json_schema, defaults={"whitespace_pattern": WHITESPACE})
    assert regex is not None
    return llguidance.LLMatcher.grammar_from_regex(regex)


def _refusal(params: SamplingParams, complaint: str) -> RequestError:
    what = "regex" if params.json_schema is None else "JSON schema"
    reason = " ".join(complaint.partition("<state>")[0].split())[:MAX_COMPLAINT].rstrip(".")
    return RequestError(f"The {what} cannot be used: {reason}.")
