"""Reads the body of `/v1/completions`; api/chat reads conversations."""

from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.server.api.answer_pipeline import ParsedRequest
from fp8serve.server.schemas.openai_bodies import CompletionBody


def parse_completion(body: CompletionBody) -> ParsedRequest:
    """Some prompts, `best_of` answers to each. Raises RequestError for parameters that contradict each other."""
    params = body.params(SamplingParams().max_new_tokens if body.max_tokens is None else body.max_tokens)
    return ParsedRequest(lambda _: params, body.prompts(), choices=body.generated, echo=bool(body.echo))
