"""How a request's tokens are chosen: a frozen dataclass, checked when it is made. No torch.

The command line, HTTP bodies and docs/options.md are made from its fields (fp8serve/options.py).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Len

from fp8serve.errors import RequestError
from fp8serve.options import About, check

MAX_LOGPROBS = 20
GREEDY_TEMPERATURE = 1e-5
"""Below it, a difference of 1e-4 between two logits makes one 20,000 times as likely as the other, and far below it the
quotient of a logit and the temperature is not finite."""
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 128
MAX_FORM_LENGTH = 65536
MAX_BAD_WORDS = 64
MAX_BIASED = 1024

INT32 = 2**31 - 1
TokenId = Annotated[int, Ge(0), Le(INT32)]
Tokens = Annotated[int, Ge(1), Le(INT32)]
StopString = Annotated[str, Len(1, MAX_STOP_LENGTH)]
Bias = Annotated[float, Ge(-100), Le(100)]
Form = Annotated[str | None, Len(1, MAX_FORM_LENGTH)]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    Penalties follow OpenAI (presence, frequency: over generated tokens) and Hugging Face (repetition: over prompt and
    generated tokens). Filters apply after the temperature, in the order top_k, top_p, min_p; top_k 0 means all tokens.
    `logprobs` is the number of alternatives wanted beside the chosen token (0: the chosen token alone; None: nothing);
    they are the model's own log-probabilities, before penalties, biases and temperature. `prompt_logprobs` wants the
    same of the prompt's tokens but the first; such a prompt is computed whole, and no cached prefix is taken.
    `logit_bias` may be given as a mapping.
    """

    max_new_tokens: Annotated[Tokens, About("Longest answer, in tokens.")] = 16
    temperature: Annotated[float, Ge(0), Le(100), About("0 takes the likeliest token every time.")] = 1.0
    top_p: Annotated[float, Gt(0), Le(1), About("Sample from the likeliest tokens of this total probability.")] = 1.0
    top_k: Annotated[int, Ge(0), Le(INT32), About("Sample from this many likeliest tokens; 0: all.")] = 0
    min_p: Annotated[
        float, Ge(0), Le(1), About("Leave out tokens less likely than this share of the likeliest one's probability.")
    ] = 0.0
    presence_penalty: Annotated[
        float, Ge(-2), Le(2), About("Taken from the logit of a token that was generated already.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Ge(-2), Le(2), About("Taken from a token's logit for each time it was generated.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, Gt(0), Le(100), About("Divides the logit of a token of the prompt or the answer; 1: no penalty.")
    ] = 1.0
    seed: Annotated[
        int | None,
        Ge(-(2**63)),
        Le(2**64 - 1),
        About("Seed of the sampling; the same seed gives the same text.", unset="a fresh one for every request"),
    ] = None
    stop: Annotated[
        tuple[StopString, ...],
        Len(0, MAX_STOP_STRINGS),
        About("End before this text.", unset="none"),
    ] = ()
    stop_token_ids: Annotated[
        tuple[TokenId, ...],
        Len(0, MAX_STOP_TOKEN_IDS),
        About("End after this token.", unset="none"),
    ] = ()
    ignore_eos: Annotated[bool, About("Continue after the end-of-text token.")] = False
    min_tokens: Annotated[
        int,
        Ge(0),
        Le(INT32),
        About("Shortest answer, in tokens; end-of-text, stop tokens and stop strings are ignored before."),
    ] = 0
    logit_bias: Annotated[
        tuple[tuple[TokenId, Bias], ...],
        Len(0, MAX_BIASED),
        About("Added to the logits of these tokens, by token id; -100 practically forbids one.", "nothing", flag=""),
    ] = ()
    bad_words: Annotated[
        tuple[StopString, ...],
        Len(0, MAX_BAD_WORDS),
        About("Never write this text.", unset="none", flag="--bad-word"),
    ] = ()
    skip_special_tokens: Annotated[
        bool, About("Leave special tokens out of the text.", flag="--skip-special-tokens/--keep-special-tokens")
    ] = True
    include_stop_str_in_output: Annotated[bool, About("Keep the stop string or stop token at the end of the text.")] = (
        False
    )
    logprobs: Annotated[
        int | None,
        Ge(0),
        Le(MAX_LOGPROBS),
        About("Alternatives to report with each token's log-probability; 0: the token's alone.", "none", flag=""),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Ge(0),
        Le(MAX_LOGPROBS),
        About("Alternatives to report with the log-probability of each token of the prompt.", "none", flag=""),
    ] = None
    json_schema: Annotated[Form, About('The answer is JSON of this schema; "{}" is any JSON.', unset="free text")] = (
        None
    )
    regex: Annotated[Form, About("The answer matches all of this expression.", unset="free text")] = None
    grammar: Annotated[Form, About("The answer follows this grammar, in Lark or GBNF.", unset="free text")] = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))
        check(self, RequestError)
        if self.min_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must be at most max_new_tokens ({self.max_new_tokens})."
            )
        self._check_form()

    def _check_form(self) -> None:
        """The grammar itself is compiled later, by `grammar.py`."""
        if self.json_schema is not None:
            _check_json_object(self.json_schema)
        if len(self.form) > 1:
            raise RequestError(f"An answer has one form: give either {' or '.join(self.form)}.")
        if self.has_form and (self.min_tokens or self.ignore_eos):
            raise RequestError(
                "min_tokens and ignore_eos cannot be used with json_schema, regex or grammar, which say when to end."
            )
        if self.has_form and self.bad_words:
            raise RequestError("bad_words cannot be used with json_schema, regex or grammar; exclude them there.")

    @property
    def greedy(self) -> bool:
        """The most probable token is taken; nothing is drawn."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def has_form(self) -> bool:
        return bool(self.form)

    @property
    def form(self) -> dict[str, str]:
        """The form that the answer must follow, by its kind."""
        kinds = {"json_schema": self.json_schema, "regex": self.regex, "grammar": self.grammar}
        return {kind: text for kind, text in kinds.items() if text is not None}


def _pairs(pairs: Any) -> Any:
    """Pairs of a token id and a bias, from pairs or from a mapping; anything else is left to `check`."""
    if isinstance(pairs, Mapping):
        pairs = {_token_id(key): value for key, value in pairs.items()}.items()
    elif not isinstance(pairs, list | tuple):
        return pairs
    return tuple(tuple(pair) if isinstance(pair, list) else pair for pair in pairs)


def _token_id(key: Any) -> Any:
    """JSON's keys are texts."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 11 else key


def _check_json_object(text: str) -> None:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError("json_schema is not valid JSON.") from None
    if not isinstance(parsed, dict):
        raise RequestError('json_schema must be a JSON object, such as {"type": "object"}.')
