"""Converts requests of Dynamo's frontend to sampling parameters, and outputs of the engine to chunks of its responses.

The frontend applies the chat template, tokenizes, decodes tokens, cuts stop strings off and parses tool calls. A worker
gets token ids with three groups of options, and returns token ids. Every option is mapped or refused: an option that no
table here names would change the response, and ignoring it would give the client another response than it asked for.
This module imports nothing of Dynamo, whose requests and chunks are dictionaries.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fp8serve.engine.output import RequestOutput, TokenLogprob
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import RequestError, shown

GROUPS = ("sampling_options", "stop_conditions", "output_options", "extra_args")
SAME = {
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "logit_bias", "min_tokens", "ignore_eos", "stop", "logprobs", "prompt_logprobs",
}  # fmt: skip
"""The options that have the same name and meaning in SamplingParams."""
STOP_TOKENS = {"stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden"}
"""Tokens that end the text. The frontend knows which of them are part of it."""
GRAMMARS = {"json": "json_schema", "regex": "regex", "grammar": "grammar"}
"""The fields of SamplingParams for the constraints of guided decoding."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),  # Dynamo's frontend ends a response with the first choice that is complete
    "best_of": (0, 1),
    "use_beam_search": (False,),
    "length_penalty": (0.0, 1.0),
    "allowed_token_ids": ([],),
    "bad_words_token_ids": ([],),
    "lora_name": ("",),
    "whitespace_pattern": ("",),
}
"""The values with which an option that a worker does not have changes nothing."""
FRONTEND = {
    "include_stop_str_in_output", "detokenize", "skip_special_tokens", "formatted_prompt",
    "return_tokens_as_token_ids", "backend", "nvext",
}  # fmt: skip
"""Options that the frontend applies, or that choose another engine's library."""
NOT_SUPPORTED = {
    "prefill_result": "a prefill worker",
    "bootstrap_info": "a prefill worker",
    "prompt_embeds": "embeddings as a prompt",
    "multi_modal_data": "images, audio or video",
    "multi_modal_uuids": "images, audio or video",
    "mm_processor_kwargs": "images, audio or video",
    "encoder_result": "images, audio or video",
}
"""Parts of a request that only other kinds of workers understand, and what they are about."""
MAX_SALT = 1024


def sampling_params(request: Mapping[str, Any], max_model_len: int) -> SamplingParams:
    """Returns the sampling parameters of a request. `max_model_len` is the model's context, which a request without
    max_tokens may fill. Raises RequestError for an option that fp8serve does not have."""
    for name, subject in NOT_SUPPORTED.items():
        if request.get(name):
            raise RequestError(f"This worker does not support {subject} ({name}).")
    values: dict[str, Any] = {"max_new_tokens": max(1, max_model_len - len(request["token_ids"]))}
    stop_token_ids: list[int] = []
    for name, value in _options(request, *GROUPS):
        if name == "max_tokens":
            values["max_new_tokens"] = value
        elif name == "top_k":
            values[name] = max(value, 0)  # -1 means all tokens
        elif name == "guided_decoding":
            values |= _grammar(value)
        elif name in STOP_TOKENS:
            stop_token_ids += value
        elif name in SAME:
            values[name] = value
        else:
            _check_neutral(name, value)
    _check_neutral("lora_name", (request.get("routing") or {}).get("lora_name") or "")
    return SamplingParams(**values, stop_token_ids=tuple(dict.fromkeys(stop_token_ids)))


def cache_salt(request: Mapping[str, Any]) -> str:
    """Returns the salt of a request, which shares cached prefixes only with requests of the same salt. Raises
    RequestError if it is too long, because the report of each block has it, too."""
    salt = str((request.get("routing") or {}).get("cache_salt") or "")
    if len(salt) > MAX_SALT:
        raise RequestError(f"cache_salt must have at most {MAX_SALT} characters, not {len(salt)}.")
    return salt


def _options(request: Mapping[str, Any], *groups: str) -> Iterator[tuple[str, Any]]:
    """Yields the options of some groups that are set."""
    for group in groups:
        yield from ((name, value) for name, value in (request.get(group) or {}).items() if value is not None)


def _check_neutral(name: str, value: Any) -> None:
    """Raises RequestError if an option that fp8serve does not have would change the response."""
    if name not in FRONTEND and value not in NEUTRAL.get(name, ()):
        raise RequestError(
            f"fp8serve does not support {name}, and the request sets it to {shown(value)}; leave it out."
        )


def _grammar(options: Mapping[str, Any]) -> dict[str, str]:
    """Returns the sampling parameters for the constraints of guided decoding."""
    values: dict[str, str] = {}
    for name, value in _options({"options": options}, "options"):
        if name == "choice":
            values["regex"] = "|".join(re.escape(choice) for choice in value)
        elif name in GRAMMARS:
            values[GRAMMARS[name]] = value if isinstance(value, str) else json.dumps(value)
        else:
            _check_neutral(name, value)
    return values


def chunk(output: RequestOutput, prompt: Iterable[TokenLogprob] | None = None) -> dict[str, Any]:
    """Returns the chunk for an output. The last one also has the log-probabilities of the prompt, if they were
    requested."""
    result: dict[str, Any] = {"token_ids": list(output.token_ids), "index": 0}
    if output.logprobs:
        result["log_probs"] = [token.logprob for token in output.logprobs]
        if output.logprobs[0].top:
            result["top_logprobs"] = [_alternatives(token) for token in output.logprobs]
    if output.finish_reason is None:
        return result
    result["finish_reason"] = output.finish_reason
    result["completion_usage"] = {
        "prompt_tokens": output.num_prompt_tokens,
        "completion_tokens": output.num_generated,
        "total_tokens": output.num_prompt_tokens + output.num_generated,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
    }
    if prompt is not None:
        result["engine_data"] = {"prompt_logprobs": [None, *map(_by_token, prompt)]}
    return result


def _alternatives(token: TokenLogprob) -> list[dict[str, Any]]:
    """Returns the most likely tokens of a position. The frontend adds their text."""
    return [
        {"rank": rank, "token_id": token_id, "token": None, "logprob": logprob}
        for rank, (token_id, logprob) in enumerate(token.top, 1)
    ]


def _by_token(token: TokenLogprob) -> dict[str, dict[str, Any]]:
    """Returns the log-probabilities of a position of the prompt by token id, beginning with the prompt's own token."""
    own = {str(token.token_id): {"logprob": token.logprob}}
    return own | {str(each): {"logprob": value, "rank": rank} for rank, (each, value) in enumerate(token.top, 1)}
