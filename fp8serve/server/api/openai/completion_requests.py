"""What the bodies of `/v1/completions` and `/v1/chat/completions` ask for."""

from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.server.api.answer_pipeline import ParsedRequest
from fp8serve.server.api.openai.tool_requests import fit
from fp8serve.server.parsing.request_parser import Ids
from fp8serve.server.schemas.openai_bodies import ChatBody, CompletionBody
from fp8serve.server.schemas.tools import plain_tools
from fp8serve.server.serving.served import Served


def parse_completion(body: CompletionBody) -> ParsedRequest:
    """Some prompts, `best_of` answers to each. Raises RequestError for parameters that contradict each other."""
    params = body.params(SamplingParams().max_new_tokens if body.max_tokens is None else body.max_tokens)
    return ParsedRequest(lambda _: params, body.prompts(), choices=body.generated)


def parse_chat(body: ChatBody) -> ParsedRequest:
    """A conversation; without a limit its answer may fill the context."""

    def sampling(room: int) -> SamplingParams:
        return body.params(body.token_limit or max(1, room))

    def fitted(served: Served, prompts: list[Ids], params: SamplingParams) -> SamplingParams:
        return fit(served, body, prompts[0], params)

    return ParsedRequest(
        sampling,
        conversation=body.messages,
        variables=(body.chat_template_kwargs or {}) | {"tools": plain_tools(body.offered)},
        choices=body.returned,
        fitted=fitted,
    )
