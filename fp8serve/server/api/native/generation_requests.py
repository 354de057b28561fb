"""What the body of `/generate` asks for: text-generation-inference's parameters as ours."""

import secrets

from fp8serve.engine.request import SamplingParams
from fp8serve.server.api.answer_pipeline import ParsedRequest
from fp8serve.server.schemas.generation_bodies import GenerateBody, GenerateParameters

DEFAULT_NEW_TOKENS = 16


def parse(body: GenerateBody) -> ParsedRequest:
    """One prompt, one answer. Raises RequestError for parameters that contradict each other."""
    params = sampling(body.parameters)
    prompt = body.inputs or "" if body.input_ids is None else body.input_ids
    return ParsedRequest(lambda _: params, [prompt], truncate=body.parameters.truncate)


def sampling(p: GenerateParameters) -> SamplingParams:
    """Greedy unless sampling is asked for, by `do_sample` or by a parameter that only sampling uses. RequestError
    for a contradiction.
    """
    sampled = p.do_sample or any(value is not None for value in (p.temperature, p.top_p, p.top_k, p.min_p))
    temperature = (1.0 if p.temperature is None else p.temperature) if sampled else 0.0
    seed = p.seed if p.seed is not None else secrets.randbits(53)
    wanted = p.top_n_tokens or (0 if p.details else None)
    return SamplingParams(
        max_new_tokens=p.max_new_tokens or DEFAULT_NEW_TOKENS,
        temperature=temperature,
        top_p=1.0 if p.top_p is None else p.top_p,
        top_k=p.top_k or 0,
        min_p=p.min_p or 0.0,
        presence_penalty=p.presence_penalty or 0.0,
        frequency_penalty=p.frequency_penalty or 0.0,
        repetition_penalty=p.repetition_penalty or 1.0,
        seed=seed if temperature > 0 else None,
        stop=tuple(p.stop),
        stop_token_ids=tuple(p.stop_token_ids),
        ignore_eos=p.ignore_eos,
        min_tokens=p.min_tokens,
        logprobs=wanted,
        **({} if p.grammar is None else p.grammar.params()),
    )
