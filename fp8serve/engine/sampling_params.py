"""The sampling parameters of a request: a frozen dataclass that is validated when it is created.

The options of the command line, the HTTP bodies and docs/options.md are generated from its fields
(fp8serve/options.py). This module does not import torch.
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
"""Below this temperature, sampling is greedy. At 1e-5, a token whose logit is larger by 1e-4 is already 20,000 times as
likely as another, and at much lower temperatures a logit divided by the temperature is not finite."""
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256  # characters, also of a bad word
MAX_STOP_TOKEN_IDS = 128
MAX_GRAMMAR_LENGTH = 65536  # characters
MAX_BAD_WORDS = 64
MAX_BIASED_TOKENS = 1024

INT32 = 2**31 - 1
TokenId = Annotated[int, Ge(0), Le(INT32)]
Tokens = Annotated[int, Ge(1), Le(INT32)]
StopString = Annotated[str, Len(1, MAX_STOP_LENGTH)]
Bias = Annotated[float, Ge(-100), Le(100)]
GrammarText = Annotated[str | None, Len(1, MAX_GRAMMAR_LENGTH)]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters that decide how tokens are sampled and when generation stops.

    The presence and frequency penalties count generated tokens, as in OpenAI's API. The repetition penalty counts the
    tokens of the prompt, too, as in Hugging Face transformers. The filters top_k, top_p and min_p are applied in this
    order, after the temperature. If top_k is 0, it is off.

    `logprobs` is the number of alternatives that are returned with the log-probability of each sampled token. If it is
    0, only the sampled token's is returned, and if it is None, none. Log-probabilities are computed from the model's
    logits, before penalties, biases and temperature. `prompt_logprobs` does the same for the tokens of the prompt,
    except the first. A prompt with `prompt_logprobs` is computed without the prefix cache.

    `logit_bias` may also be a mapping. If it names a token more than once, the last value counts.
    """

    max_new_tokens: Annotated[Tokens, About("Maximum number of tokens to generate.")] = 16
    temperature: Annotated[float, Ge(0), Le(100), About("0 always takes the most likely token.")] = 1.0
    top_p: Annotated[float, Gt(0), Le(1), About("Sample from the most likely tokens of this total probability.")] = 1.0
    top_k: Annotated[int, Ge(0), Le(INT32), About("Sample from this many most likely tokens; 0 means all.")] = 0
    min_p: Annotated[
        float, Ge(0), Le(1), About("Exclude tokens below this fraction of the most likely token's probability.")
    ] = 0.0
    presence_penalty: Annotated[
        float, Ge(-2), Le(2), About("Subtracted from the logits of tokens that were generated already.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Ge(-2), Le(2), About("Subtracted from a token's logit for each time it was generated.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, Gt(0), Le(100), About("Divides the logits of tokens of the prompt or the output; 1 is no penalty.")
    ] = 1.0
    seed: Annotated[
        int | None,
        Ge(-(2**63)),
        Le(2**64 - 1),
        About("Seed of the sampling; the same seed gives the same text.", unset="a fresh one for every request"),
    ] = None
    stop: Annotated[
        tuple[StopString, ...], Len(0, MAX_STOP_STRINGS), About("Stop before this text.", unset="none")
    ] = ()
    stop_token_ids: Annotated[
        tuple[TokenId, ...], Len(0, MAX_STOP_TOKEN_IDS), About("Stop after this token.", unset="none")
    ] = ()
    ignore_eos: Annotated[bool, About("Continue after the end-of-text token.")] = False
    min_tokens: Annotated[
        int,
        Ge(0),
        Le(INT32),
        About("Minimum number of tokens; until then, end-of-text, stop tokens and stop strings are ignored."),
    ] = 0
    logit_bias: Annotated[
        tuple[tuple[TokenId, Bias], ...],
        Len(0, MAX_BIASED_TOKENS),
        About("Values to add to the logits of tokens, by token id; -100 practically bans a token.", "nothing", flag=""),
    ] = ()
    bad_words: Annotated[
        tuple[StopString, ...],
        Len(0, MAX_BAD_WORDS),
        About("Text that the output must not contain.", unset="none", flag="--bad-word"),
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
        About("Alternatives to return with each token's log-probability; 0 returns the token's only.", "none", flag=""),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Ge(0),
        Le(MAX_LOGPROBS),
        About("Alternatives to return with the log-probability of each token of the prompt.", "none", flag=""),
    ] = None
    json_schema: Annotated[
        GrammarText, About('JSON schema of the output; "{}" allows any JSON.', unset="free text")
    ] = None
    regex: Annotated[GrammarText, About("Regular expression that the output must match.", unset="free text")] = None
    grammar: Annotated[GrammarText, About("Grammar of the output, in Lark or GBNF.", unset="free text")] = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "logit_bias", _to_pairs(self.logit_bias))
        check(self, RequestError)
        object.__setattr__(self, "logit_bias", tuple(dict(self.logit_bias).items()))
        if self.min_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must be at most max_new_tokens ({self.max_new_tokens})."
            )
        self._check_grammar()

    def _check_grammar(self) -> None:
        """Raises RequestError if the options of the grammar contradict others. `grammar.py` compiles the grammar."""
        if self.json_schema is not None:
            _check_json_object(self.json_schema)
        if len(self.grammar_by_kind) > 1:
            raise RequestError(f"{' and '.join(self.grammar_by_kind)} cannot be used together; use one of them.")
        if self.has_grammar and (self.min_tokens or self.ignore_eos):
            raise RequestError(
                "min_tokens and ignore_eos cannot be used with json_schema, regex or grammar, which end the output."
            )
        if self.has_grammar and self.bad_words:
            raise RequestError(
                "bad_words cannot be used with json_schema, regex or grammar; exclude the words in the grammar."
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always chosen."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def has_penalty(self) -> bool:
        """Whether logits depend on the tokens of the sequence."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def has_grammar(self) -> bool:
        """Whether one of json_schema, regex and grammar constrains the output."""
        return bool(self.grammar_by_kind)

    @property
    def grammar_by_kind(self) -> dict[str, str]:
        """The text of the grammar under its kind ("json_schema", "regex" or "grammar"). Empty if there is none."""
        kinds = {"json_schema": self.json_schema, "regex": self.regex, "grammar": self.grammar}
        return {kind: text for kind, text in kinds.items() if text is not None}


def _to_pairs(biases: Any) -> Any:
    """Converts a mapping or a list of lists to tuples of a token id and a bias. Returns other values unchanged, so that
    `check` refuses them."""
    if isinstance(biases, Mapping):
        biases = [(_token_id(key), value) for key, value in biases.items()]
    elif not isinstance(biases, list | tuple):
        return biases
    return tuple(tuple(pair) if isinstance(pair, list) else pair for pair in biases)


def _token_id(key: Any) -> Any:
    """Converts a token id that is a string, as all keys of JSON objects are. Returns other keys unchanged."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 11 else key


def _check_json_object(text: str) -> None:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError("json_schema is not valid JSON.") from None
    if not isinstance(parsed, dict):
        raise RequestError('json_schema must be a JSON object, such as {"type": "object"}.')
