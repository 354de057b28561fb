"""Turns a chat request into a `Generation`. Every protocol first converts its request body to a `ChatBody`.

This module also turns the tools of a request into a grammar and an output parser, and divides an output into segments
for protocols with content blocks (Anthropic's messages) or output items (OpenAI's responses).
"""

import contextlib
import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from fp8serve.engine.output import RequestOutput
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.server.api.generation_pipeline import admit, reserve, resolve_model
from fp8serve.server.faults import Code, Fault
from fp8serve.server.http.streams import until_disconnect
from fp8serve.server.output_parsers.family_parsers import ToolSchemas
from fp8serve.server.output_parsers.incremental import Arguments, Content, Part, Reasoning, ToolCallStart
from fp8serve.server.output_parsers.output_format import OutputFormat
from fp8serve.server.schemas.messages import NamedTool, Tool, plain_tools
from fp8serve.server.schemas.openai_bodies import ChatBody
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.generation import Generation
from fp8serve.server.serving.served_weights import ServedWeights


@contextlib.contextmanager
def conversion_errors() -> Iterator[None]:
    """Encloses the conversion of another protocol's body. Raises RequestValidationError for an invalid chat request."""
    try:
        yield
    except ValidationError as error:
        details = [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors()]
        raise RequestValidationError(details) from None


async def generate_chat(
    body: ChatBody, request: Request, state: ServerState, *, clamp_max_tokens: bool = False
) -> Generation:
    """Starts the generation of a chat request. A request without a token limit may fill the context. A limit beyond
    the context is an error, or is lowered to the context if `clamp_max_tokens` is set.
    """
    served = await resolve_model(body, request, state)
    with reserve(served, state, body.num_choices) as reservation:
        prompt = state.parser.encode_conversation(served, body.messages, template_variables(body), body.ending)
        ids, prompt_end = await until_disconnect(request, prompt)
        available = max(1, served.engine.limits.max_model_len - len(ids))
        limit = body.token_limit or available
        params = body.params(min(limit, available) if clamp_max_tokens else limit)
        params = adapt_params(served, body, prompt_end, params)
        schemas = {tool.function.name: json.dumps(tool.function.schema_of_arguments) for tool in body.visible_tools}
        generation = await admit(
            served, [ids], params, body.num_choices, reservation, request, state, tool_schemas=schemas
        )
        generation.prompt_end = prompt_end
        return generation


def template_variables(body: ChatBody) -> dict[str, Any]:
    """Returns the variables of the chat template other than the messages. `chat_template_kwargs` override the values
    that follow from other fields."""
    effort, variables = body.reasoning_effort, dict[str, Any]()
    if effort is not None:
        variables["enable_thinking"] = effort != "none"
    if effort not in (None, "none"):
        variables["reasoning_effort"] = effort
    if body.documents is not None:
        variables["documents"] = body.documents
    return variables | (body.chat_template_kwargs or {}) | {"tools": plain_tools(body.visible_tools)}


def adapt_params(served: ServedWeights, body: ChatBody, prompt_end: str, params: SamplingParams) -> SamplingParams:
    """Returns the parameters with a grammar that enforces tool calls, if any, and with special tokens in the output if
    its parser needs them. Raises Fault if the model's tool calls cannot be parsed."""
    if body.visible_tools and not body.requires_call and served.output_format.tools == "none":
        message = "How this model writes tool calls is not known."
        raise Fault(Code.INVALID_PARAMETER, message, param="tools", hint="Start the server with --tool-parser.")
    if (grammar := _call_grammar(served, body, prompt_end, params)) is not None:
        params = replace(params, json_schema=None, grammar=grammar)
    tags = _output_format(served, body).tags(with_tools=bool(body.visible_tools))
    return replace(params, skip_special_tokens=False) if tags & served.tokenizer.special_texts else params


def _call_grammar(served: ServedWeights, body: ChatBody, prompt_end: str, params: SamplingParams) -> str | None:
    """Returns the grammar that enforces required or strict tool calls, or None if the output is not constrained."""
    output_format, tools = _output_format(served, body), body.visible_tools
    if isinstance(body.tool_choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == body.tool_choice.function.name]
    syntax, parallel = output_format.call_syntax, body.parallel_tool_calls is not False
    if not body.requires_call and (syntax is None or not tools or params.regex or params.grammar):
        return None
    grammar = output_format.call_grammar(_tool_schemas(tools) or {}, served.tokenizer.added_ids, prompt_end)
    if body.requires_call:
        return grammar.calls_only(parallel and not isinstance(body.tool_choice, NamedTool))
    if params.json_schema is not None:
        return grammar.calls_only(parallel, params.json_schema)
    is_strict = any(tool.function.strict for tool in tools)
    return grammar.text_with_calls() if is_strict and syntax is not None and syntax.trigger else None


def _output_format(served: ServedWeights, body: ChatBody) -> OutputFormat:
    return served.output_format.for_required_calls if body.requires_call else served.output_format


def _tool_schemas(tools: list[Tool]) -> ToolSchemas | None:
    return {tool.function.name: tool.function.schema_of_arguments for tool in tools} or None


# -- segments ----------------------------------------------------------------------------------------------------------

SegmentType = Literal["reasoning", "content", "call"]
SEGMENT_TYPES: dict[type[Part], SegmentType] = {Reasoning: "reasoning", Content: "content", Arguments: "call"}


@dataclass
class Segment:
    """A part of an output: reasoning, content or one tool call. For a tool call, `name` is the tool, `call_id` the new
    id of the call and `text` the JSON text of the arguments."""

    type: SegmentType
    name: str = ""
    call_id: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class SegmentEvent:
    """An event of a stream: a segment starts, is extended by `delta`, or stops. `index` is its index in the output."""

    event: Literal["start", "delta", "stop"]
    index: int
    segment: Segment
    delta: str = ""


class SegmentedOutput:
    """The output of one choice of the response to `body`, divided into segments.

    `reasoning_tokens` is the number of tokens up to the end of the last reasoning segment. `id_prefix` begins the ids
    of tool calls.
    """

    def __init__(self, body: ChatBody, generation: Generation, id_prefix: str = "call") -> None:
        output_format, schemas = _output_format(generation.served, body), _tool_schemas(body.visible_tools)
        single_call = body.parallel_tool_calls is False
        self._parser = output_format.parser(schemas, generation.prompt_end, single_call, body.requires_call)
        self._id_prefix = "" if output_format.tools == "mistral" else id_prefix
        self.segments: list[Segment] = []
        self.tokens = self.cached_tokens = self.reasoning_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    @property
    def is_passthrough(self) -> bool:
        """Whether all text of the output is content."""
        return self._parser.is_passthrough

    @property
    def calls(self) -> list[Segment]:
        return [segment for segment in self.segments if segment.type == "call"]

    def text(self, segment_type: SegmentType) -> str:
        """Returns the joined text of all segments of a type."""
        return "".join(segment.text for segment in self.segments if segment.type == segment_type)

    def add(self, output: RequestOutput) -> list[SegmentEvent]:
        """Adds an output of the engine and returns its events in the order of the stream."""
        self.tokens, self.cached_tokens = output.num_generated, max(self.cached_tokens, output.num_cached_tokens)
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        is_last = output.finish_reason is not None
        parts = self._parser.parse(output.text_delta, is_last, output.is_cut_off)
        events = [event for part in parts for event in self._add_part(part)]
        if self.segments and self.segments[-1].type == "reasoning":
            self.reasoning_tokens = output.num_generated
        return events + (self._stop_last() if is_last else [])

    def _add_part(self, part: Part) -> list[SegmentEvent]:
        if isinstance(part, ToolCallStart):
            # Mistral's templates accept only ids of nine letters and digits
            call_id = f"{self._id_prefix}_{secrets.token_hex(12)}" if self._id_prefix else secrets.token_hex(5)[:9]
            return self._start(Segment("call", part.name, call_id))
        type_: SegmentType = SEGMENT_TYPES[type(part)]
        started = self._start(Segment(type_)) if not self.segments or self.segments[-1].type != type_ else []
        segment = self.segments[-1]
        segment.text += part.text
        return [*started, SegmentEvent("delta", len(self.segments) - 1, segment, part.text)]

    def _start(self, segment: Segment) -> list[SegmentEvent]:
        stopped = self._stop_last()
        self.segments.append(segment)
        return [*stopped, SegmentEvent("start", len(self.segments) - 1, segment)]

    def _stop_last(self) -> list[SegmentEvent]:
        return [SegmentEvent("stop", len(self.segments) - 1, self.segments[-1])] if self.segments else []
