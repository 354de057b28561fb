"""The route `/v1/chat/completions`: OpenAI's chat completions."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from fp8serve.engine.output import RequestOutput
from fp8serve.server.api.chat_generation import generate_chat, new_call_id, output_parser
from fp8serve.server.api.generation_pipeline import respond
from fp8serve.server.api.openai.completion_routes import ChoiceState, CompletionRenderer, Usage
from fp8serve.server.api.openai.logprobs import ChatLogprobs, PositionedToken, PromptLogprobs, chat_logprobs
from fp8serve.server.api.routing import STREAM, BoundedRoute, JsonObject, ResponseModel, StateDep, omit_if_none
from fp8serve.server.output_parsers.incremental import Arguments, Content, Part, Reasoning, ToolCallStart
from fp8serve.server.output_parsers.output_format import OutputParser
from fp8serve.server.schemas.openai_bodies import ChatBody
from fp8serve.server.serving.generation import Generation

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=BoundedRoute)


class ChatFunction(ResponseModel):
    name: str
    arguments: str


class ChatToolCall(ResponseModel):
    id: str
    type: Literal["function"]
    function: ChatFunction


class ChatMessage(ResponseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = omit_if_none()
    reasoning: str | None = omit_if_none()
    tool_calls: list[ChatToolCall] | None = omit_if_none()


class ChatChoice(ResponseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(ResponseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


class MessageBuilder:
    """Builds the message of one choice, and its deltas, from the outputs of the engine. `new_call_id` returns a new
    tool call id."""

    def __init__(self, parser: OutputParser, new_call_id: Callable[[], str]) -> None:
        self._parser, self._new_call_id = parser, new_call_id
        self._reasoning = self._content = ""
        self._calls: list[JsonObject] = []
        self._unsent: list[JsonObject] = []
        self._stop_reason: str | int | None = None

    @property
    def is_passthrough(self) -> bool:
        """Whether all text of the outputs is content."""
        return self._parser.is_passthrough

    def add(self, output: RequestOutput) -> None:
        self._stop_reason = output.stop_reason
        is_last = output.finish_reason is not None
        for part in self._parser.parse(output.text_delta, is_last, output.is_cut_off):
            self._add_part(part)

    def take_deltas(self) -> list[JsonObject]:
        """Returns the deltas since the last call of this method."""
        deltas, self._unsent = self._unsent, []
        return deltas

    def message(self) -> JsonObject:
        """Returns the complete message. Its content is null if it has tool calls but no text."""
        message: JsonObject = {"role": "assistant", "content": self._content, "refusal": None}
        if self._reasoning:
            message |= _reasoning_fields(self._reasoning)
        if self._calls:
            message |= {"content": self._content or None, "tool_calls": self._calls}
        return message

    def finish_reason(self, reason: str | None) -> str | None:
        """Returns OpenAI's finish reason for the engine's. If the message has tool calls, `stop` becomes `tool_calls`,
        unless a stop string truncated the last call."""
        return "tool_calls" if reason == "stop" and self._calls and not self._has_truncated_call else reason

    @property
    def _has_truncated_call(self) -> bool:
        return isinstance(self._stop_reason, str) and not _is_json(self._calls[-1]["function"]["arguments"])

    def _add_part(self, part: Part) -> None:
        if isinstance(part, Content):
            self._content += part.text
            self._unsent.append({"content": part.text})
        elif isinstance(part, Reasoning):
            self._reasoning += part.text
            self._unsent.append(_reasoning_fields(part.text))
        elif isinstance(part, ToolCallStart):
            self._start_call(part.name)
        else:
            self._add_arguments(part)

    def _start_call(self, name: str) -> None:
        call = {"id": self._new_call_id(), "type": "function", "function": {"name": name, "arguments": ""}}
        self._calls.append(call)
        delta = call | {"function": {"name": name, "arguments": ""}}  # a copy, because the arguments of `call` change
        self._unsent.append({"tool_calls": [{"index": len(self._calls) - 1} | delta]})

    def _add_arguments(self, part: Arguments) -> None:
        self._calls[-1]["function"]["arguments"] += part.text
        delta = {"index": len(self._calls) - 1, "function": {"arguments": part.text}}
        self._unsent.append({"tool_calls": [delta]})


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _reasoning_fields(text: str) -> JsonObject:
    """Returns reasoning in both fields that clients read."""
    return {"reasoning_content": text, "reasoning": text}


class ChatRenderer(CompletionRenderer[ChatCompletion]):
    """Writes `chat.completion` objects and `chat.completion.chunk` objects."""

    PREFIX, OBJECT, CHUNK, TEXT_FIELD = "chatcmpl", "chat.completion", "chat.completion.chunk", "content"

    def __init__(self, body: ChatBody, generation: Generation) -> None:
        super().__init__(body, generation)
        new_id = partial(new_call_id, body, generation.served, "call")
        self._builders = [MessageBuilder(output_parser(body, generation), new_id) for _ in generation.requests]
        self._is_passthrough = self._builders[0].is_passthrough
        self._has_sent_role: set[int] = set()  # indexes of choices

    def add(self, index: int, output: RequestOutput) -> list[PositionedToken]:
        self._builders[index].add(output)
        return super().add(index, output)

    def response(self) -> ChatCompletion:
        prompt_logprobs = self.choices[0].prompt_logprobs
        return ChatCompletion.model_validate(self._response_fields() | {"prompt_logprobs": prompt_logprobs})

    def choice(self, index: int, choice: ChoiceState) -> JsonObject:
        builder = self._builders[index]
        return {
            "index": index,
            "message": builder.message(),
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": builder.finish_reason(choice.finish_reason),
        }

    def events(self, index: int, output: RequestOutput, delta: list[PositionedToken]) -> Iterator[JsonObject]:
        """Yields a chunk for each delta of the message. The first of them has the log-probabilities, the last one the
        finish reason. The chunk with the role is sent together with the first output, because clients take its arrival
        as the time of the first token."""
        if index not in self._has_sent_role:
            self._has_sent_role.add(index)
            role = {"role": "assistant", "content": ""}
            yield self._chunk({"index": index, "delta": role, "logprobs": None, "finish_reason": None})
        builder = self._builders[index]
        message_deltas = builder.take_deltas()
        if not message_deltas and (delta or output.finish_reason is not None):
            message_deltas = [{}]
        for number, message_delta in enumerate(message_deltas, 1):
            is_last = number == len(message_deltas)
            yield self._chunk(
                {
                    "index": index,
                    "delta": message_delta,
                    "logprobs": self._logprobs(delta or None) if number == 1 else None,
                    "finish_reason": builder.finish_reason(output.finish_reason) if is_last else None,
                }
            )

    @property
    def has_plain_chunks(self) -> bool:
        return super().has_plain_chunks and self._is_passthrough and 0 in self._has_sent_role

    def text_choice(self, text: str) -> JsonObject:
        return {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}

    def _logprobs(self, tokens: list[PositionedToken] | None) -> JsonObject | None:
        return None if tokens is None else chat_logprobs(tokens, self.tokenizer)


@router.post("/chat/completions", summary="Continue a conversation", response_model=ChatCompletion, responses=STREAM)
async def chat(body: ChatBody, request: Request, state: StateDep) -> Response | ChatCompletion:
    """Renders the messages with the model's chat template and generates the next message."""
    generation = await generate_chat(body, request, state)
    return await respond(ChatRenderer(body, generation), request, state, body.stream)
