"""Completions of prompts by a server's /v1/completions."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fp8serve.client.api import Api
from fp8serve.errors import ServerError

WIRE_NAMES = {"max_new_tokens": "max_tokens", "regex": "guided_regex"}


def complete(api: Api, model: str | None, prompts: Sequence[str], sampling: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Text and reason of the end for each prompt. `sampling`: fields of SamplingParams; ServerError as `Api` has it."""
    body = {"model": model or api.first_model(), "prompt": list(prompts) if len(prompts) > 1 else prompts[0]}
    answer = api.post("/v1/completions", body | _body(sampling))
    try:
        found = {choice.get("index", 0): choice for choice in answer["choices"]}
        return [
            {"prompt": prompt, "text": str(found[index]["text"]), "finish_reason": found[index].get("finish_reason")}
            for index, prompt in enumerate(prompts)
        ]
    except (AttributeError, KeyError, TypeError):
        raise ServerError("/v1/completions did not answer a completion of each prompt.") from None


def _body(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """A schema is written in OpenAI's form, a regular expression in vLLM's."""
    found = {WIRE_NAMES.get(name, name): value for name, value in sampling.items()}
    if (schema := found.pop("json_schema", None)) is not None:
        form = {"name": "answer", "schema": json.loads(schema)}
        found["response_format"] = {"type": "json_schema", "json_schema": form}
    return found
