"""Reads the body of `/generate`: text-generation-inference's parameters as SamplingParams."""

import secrets

from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.server.api.answer_pipeline import ParsedRequest
from fp8serve.server.schemas.derived import given
from fp8serve.server.schemas.generation_bodies import SPELT_OTHERWISE, GenerateBody, GenerateParameters

ONLY_SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p"})


def parse(body: GenerateBody) -> ParsedRequest:
    """One prompt, one answer. Raises RequestError for parameters that contradict each other."""
    params = sampling(body.parameters)
    prompt = body.inputs or "" if body.input_ids is None else body.input_ids
    return ParsedRequest(lambda _: params, [prompt], truncate=body.parameters.truncate)


def sampling(p: GenerateParameters) -> SamplingParams:
    """Greedy unless sampling is asked for, by `do_sample` or by a parameter that only sampling uses. RequestError
    for a contradiction.
    """
    asked = given(p, SamplingParams, SPELT_OTHERWISE)
    if not (p.do_sample or ONLY_SAMPLING & asked.keys()):
        asked["temperature"] = 0.0
    drawn = asked.get("temperature") != 0
    asked["seed"] = asked.get("seed", secrets.randbits(53)) if drawn else None
    asked["prompt_logprobs"] = 0 if p.decoder_input_details else None
    asked["logprobs"] = p.top_n_tokens or (0 if p.details else None)
    return SamplingParams(**asked | p.form())
