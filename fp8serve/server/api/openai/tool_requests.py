"""What the tools of a chat request ask of the engine, and of whoever reads the answer."""

from dataclasses import replace

from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.server.api.openai.chat_answer import ChatAnswer
from fp8serve.server.faults import Code, Fault
from fp8serve.server.schemas.openai_bodies import ChatBody
from fp8serve.server.schemas.tools import NO_ARGUMENTS
from fp8serve.server.serving.generation import Generation
from fp8serve.server.serving.served import Served

LOOKED_AT = 16
"""Tokens at the end of a prompt that may hold the mark with which reasoning begins."""


def fit(served: Served, body: ChatBody, params: SamplingParams) -> SamplingParams:
    """The parameters with which these weights write an answer that can be read. Fault when none can."""
    if body.offered and served.answers.tools == "none":
        message = "How this model writes tool calls is not known."
        raise Fault(Code.INVALID_PARAMETER, message, param="tools", hint="Start the server with --tool-parser.")
    shown = served.answers.marks(with_tools=bool(body.offered))
    return replace(params, skip_special_tokens=False) if shown & served.tokenizer.special_texts else params


def chat_answer(body: ChatBody, generation: Generation, request: Request) -> ChatAnswer:
    """The reader of one choice."""
    served = generation.served
    end = served.tokenizer.decode(list(request.prompt_token_ids[-LOOKED_AT:]), skip_special_tokens=False)
    tools = {tool.function.name: tool.function.parameters or NO_ARGUMENTS for tool in body.offered}
    reader = served.answers.reader(tools if body.offered else None, end)
    return ChatAnswer(reader, body.parallel_tool_calls is False, served.answers.tools == "mistral")
