"""A conversation, from the chat request that all families of routes translate their bodies into, to a Generation.

Here is also what the tools of a request require from the engine and from the reader of its answer, and an answer as a
series of passages, for protocols with blocks or items.
"""

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from fp8serve.engine.output import RequestOutput
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.server.answers.choice import AnswerFormat, AnswerReader
from fp8serve.server.answers.feed import Arguments, Call, Content, Part, Reasoning
from fp8serve.server.answers.formats import Tools
from fp8serve.server.api.answer_pipeline import admit, model_for, reserve
from fp8serve.server.faults import Code, Fault
from fp8serve.server.http.streams import until_disconnect
from fp8serve.server.schemas.messages import NamedTool, Tool, plain_tools
from fp8serve.server.schemas.openai_bodies import ChatBody
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.generation import Generation
from fp8serve.server.serving.served import Served

Theirs = TypeVar("Theirs")


def translated(translate: Callable[[Theirs], ChatBody], body: Theirs) -> ChatBody:
    """Another protocol's body as a chat request. RequestValidationError if its parts do not fit together."""
    try:
        return translate(body)
    except ValidationError as error:
        details = [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors()]
        raise RequestValidationError(details) from None


async def generate_chat(
    body: ChatBody, request: Request, state: ServerState, *, ends_with_context: bool = False
) -> Generation:
    """The answers to a conversation, which may fill the context if the body has no limit. `ends_with_context`: a limit
    above the end of the context is lowered to it instead of being refused.
    """
    served = model_for(body, state)
    with reserve(served, state, body.returned) as reservation:
        prompt = state.parser.conversation(served, body.messages, template_variables(body), body.ending)
        ids, end = await until_disconnect(request, prompt)
        room = max(1, served.engine.limits.max_model_len - len(ids))
        limit = body.token_limit or room
        params = adapt_params(served, body, end, body.params(min(limit, room) if ends_with_context else limit))
        schemas = {tool.function.name: json.dumps(tool.function.schema_of_arguments) for tool in body.offered}
        generation = await admit(
            served, [ids], params, body.returned, reservation, request, state, tool_schemas=schemas
        )
        generation.prompt_end = end
        return generation


def template_variables(body: ChatBody) -> dict[str, Any]:
    """Variables for the chat template, beside the messages; those that the body names itself come first."""
    effort, variables = body.reasoning_effort, dict[str, Any]()
    if effort is not None:
        variables["enable_thinking"] = effort != "none"
    if effort not in (None, "none"):
        variables["reasoning_effort"] = effort
    if body.documents is not None:
        variables["documents"] = body.documents
    return variables | (body.chat_template_kwargs or {}) | {"tools": plain_tools(body.offered)}


def adapt_params(served: Served, body: ChatBody, end: str, params: SamplingParams) -> SamplingParams:
    """The parameters with which these weights write an answer that can be read, after a prompt that ends with `end`.
    Fault when that is not possible."""
    if body.offered and not body.must_call and served.answers.tools == "none":
        message = "How this model writes tool calls is not known."
        raise Fault(Code.INVALID_PARAMETER, message, param="tools", hint="Start the server with --tool-parser.")
    if (grammar := _grammar(served, body, end, params)) is not None:
        params = replace(params, json_schema=None, grammar=grammar)
    marks = _format(served, body).marks(with_tools=bool(body.offered))
    return replace(params, skip_special_tokens=False) if marks & served.tokenizer.special_texts else params


def answer_reader(body: ChatBody, generation: Generation) -> AnswerReader:
    """The reader of one choice."""
    form, tools, one_call = _format(generation.served, body), _declared(body.offered), body.parallel_tool_calls is False
    return form.reader(tools, generation.prompt_end, one_call, body.must_call)


def call_id(body: ChatBody, served: Served, prefix: str) -> str:
    """A new id for a call: for Mistral's templates nine letters and digits, because they refuse others."""
    short = _format(served, body).tools == "mistral"
    return secrets.token_hex(5)[:9] if short else f"{prefix}_{secrets.token_hex(12)}"


def _grammar(served: Served, body: ChatBody, end: str, params: SamplingParams) -> str | None:
    """The grammar of calls if they are required, or must be valid; None if the model may write anything."""
    form, tools = _format(served, body), body.offered
    if isinstance(body.tool_choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == body.tool_choice.function.name]
    strict = any(tool.function.strict for tool in tools)
    if not body.must_call and (form.shape is None or not tools or params.regex or params.grammar):
        return None
    grammar = form.call_grammar(_declared(tools) or {}, served.tokenizer.added_ids, end)
    if body.must_call:
        several = body.parallel_tool_calls is not False and not isinstance(body.tool_choice, NamedTool)
        return grammar.of_calls(several)
    if params.json_schema is not None:
        return grammar.of_calls(body.parallel_tool_calls is not False, params.json_schema)
    return grammar.of_strict_calls() if strict and form.shape is not None and form.shape.mark else None


def _format(served: Served, body: ChatBody) -> AnswerFormat:
    return served.answers.forced if body.must_call else served.answers


def _declared(tools: list[Tool]) -> Tools | None:
    return {tool.function.name: tool.function.schema_of_arguments for tool in tools} or None


# -- passages ----------------------------------------------------------------------------------------------------------

Kind = Literal["reasoning", "content", "call"]


@dataclass
class Passage:
    """`text`: for a call, the JSON text of its arguments. `name`: of the tool that is called."""

    kind: Kind
    name: str = ""
    text: str = ""


class Change(NamedTuple):
    """One step of a stream: a passage begins, grows by `text`, or is complete. `position`: its number in the answer."""

    kind: Literal["begins", "grows", "ends"]
    position: int
    passage: Passage
    text: str = ""


class Passages:
    """The passages of one choice so far, each of them reasoning, content or one call.

    `reasoning_tokens`: those that came while the model was still thinking.
    """

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self.passages: list[Passage] = []
        self.tokens = self.cached_tokens = self.reasoning_tokens = 0
        self.finish: str | None = None
        self.stop: str | int | None = None

    @property
    def has_calls(self) -> bool:
        return any(passage.kind == "call" for passage in self.passages)

    def take(self, output: RequestOutput) -> list[Change]:
        """The changes by an output, in the order of a stream."""
        self.tokens, self.cached_tokens = output.num_generated, max(self.cached_tokens, output.num_cached_tokens)
        self.finish, self.stop = output.finish_reason, output.stop_reason
        ends = output.finish_reason is not None
        parts = self._reader.take(output.text_delta, ends, output.is_cut_off)
        changes = [change for part in parts for change in self._add(part)]
        if self.passages and self.passages[-1].kind == "reasoning":
            self.reasoning_tokens = output.num_generated
        return changes + (self._end() if ends else [])

    def _add(self, part: Part) -> list[Change]:
        if isinstance(part, Call):
            return self._begin(Passage("call", part.name))
        begun = self._begin(Passage(_kind(part))) if not self.passages or self.passages[-1].kind != _kind(part) else []
        passage = self.passages[-1]
        passage.text += part.text
        return [*begun, Change("grows", len(self.passages) - 1, passage, part.text)]

    def _begin(self, passage: Passage) -> list[Change]:
        ended = self._end()
        self.passages.append(passage)
        return [*ended, Change("begins", len(self.passages) - 1, passage)]

    def _end(self) -> list[Change]:
        return [Change("ends", len(self.passages) - 1, self.passages[-1])] if self.passages else []


def _kind(part: Content | Reasoning | Arguments) -> Kind:
    if isinstance(part, Arguments):
        return "call"
    return "reasoning" if isinstance(part, Reasoning) else "content"
