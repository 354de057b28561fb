"""What the tools of a chat request require from the engine, and from the reader of the answer."""

import json
import secrets
from dataclasses import replace

from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.server.answers.choice import AnswerFormat, AnswerReader
from fp8serve.server.answers.formats import Tools
from fp8serve.server.answers.grammars import SHAPES
from fp8serve.server.faults import Code, Fault
from fp8serve.server.schemas.openai_bodies import ChatBody
from fp8serve.server.schemas.tools import NamedTool, Tool
from fp8serve.server.serving.generation import Generation
from fp8serve.server.serving.served import Served


def fit(served: Served, body: ChatBody, end: str, params: SamplingParams) -> SamplingParams:
    """The parameters with which these weights write an answer that can be read, after a prompt that ends with `end`.
    Fault when that is not possible."""
    if body.offered and not body.must_call and served.answers.tools == "none":
        message = "How this model writes tool calls is not known."
        raise Fault(Code.INVALID_PARAMETER, message, param="tools", hint="Start the server with --tool-parser.")
    if (grammar := _grammar(served, body, end, params)) is not None:
        params = replace(params, json_schema=None, grammar=grammar)
    shown = _format(served, body).marks(with_tools=bool(body.offered))
    return replace(params, skip_special_tokens=False) if shown & served.tokenizer.special_texts else params


def answer_reader(body: ChatBody, generation: Generation) -> AnswerReader:
    """The reader of one choice."""
    form, tools, one_call = _format(generation.served, body), _declared(body.offered), body.parallel_tool_calls is False
    return form.reader(tools, generation.prompt_end, one_call, body.must_call)


def call_id(body: ChatBody, served: Served, prefix: str) -> str:
    """A new id for a call: for Mistral's templates nine letters and digits, because they refuse others."""
    short = _format(served, body).tools == "mistral"
    return secrets.token_hex(5)[:9] if short else f"{prefix}_{secrets.token_hex(12)}"


def schemas_of(body: ChatBody) -> dict[str, str]:
    """The form of the arguments of each tool, by its name."""
    return {tool.function.name: json.dumps(tool.function.schema_of_arguments) for tool in body.offered}


def _grammar(served: Served, body: ChatBody, end: str, params: SamplingParams) -> str | None:
    """The grammar of calls if they are required, or must be valid; None if the model may write anything."""
    form, tools = _format(served, body), body.offered
    if isinstance(body.tool_choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == body.tool_choice.function.name]
    strict = any(tool.function.strict for tool in tools)
    if not body.must_call and (form.tools not in SHAPES or not tools or params.regex or params.grammar):
        return None
    grammar = form.call_grammar(_declared(tools) or {}, served.tokenizer.added_ids, end)
    if body.must_call:
        several = body.parallel_tool_calls is not False and not isinstance(body.tool_choice, NamedTool)
        return grammar.of_calls(several)
    if params.json_schema is not None:
        return grammar.of_calls(body.parallel_tool_calls is not False, params.json_schema)
    return grammar.of_strict_calls() if strict and SHAPES[form.tools].mark else None


def _format(served: Served, body: ChatBody) -> AnswerFormat:
    return served.answers.forced if body.must_call else served.answers


def _declared(tools: list[Tool]) -> Tools | None:
    return {tool.function.name: tool.function.schema_of_arguments for tool in tools} or None
