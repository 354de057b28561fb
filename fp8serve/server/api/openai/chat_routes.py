"""The route `/v1/chat/completions`: OpenAI's chat completions."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from fp8serve.engine.output import RequestOutput
from fp8serve.server.api.chat_generation import Segment, SegmentedOutput, SegmentEvent, generate_chat
from fp8serve.server.api.generation_pipeline import respond
from fp8serve.server.api.openai.completion_routes import ChoiceState, CompletionRenderer, Usage
from fp8serve.server.api.openai.logprobs import ChatLogprobs, PositionedToken, PromptLogprobs, chat_logprobs
from fp8serve.server.api.routing import STREAM, BoundedRoute, JsonObject, ResponseModel, StateDep, omit_if_none
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
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]
    token_ids: list[int] | None = omit_if_none()


class ChatCompletion(ResponseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = omit_if_none()


class ChatRenderer(CompletionRenderer[ChatCompletion]):
    """Writes `chat.completion` objects and `chat.completion.chunk` objects."""

    PREFIX, OBJECT, CHUNK, TEXT_FIELD = "chatcmpl", "chat.completion", "chat.completion.chunk", "content"

    def __init__(self, body: ChatBody, generation: Generation) -> None:
        super().__init__(body, generation)
        self._outputs = [SegmentedOutput(body, generation) for _ in generation.requests]
        self._unsent: list[list[JsonObject]] = [[] for _ in generation.requests]  # deltas of each choice
        self._has_sent_role: set[int] = set()  # indexes of choices

    def add(self, index: int, output: RequestOutput) -> list[PositionedToken]:
        segmented = self._outputs[index]
        deltas = (_message_delta(segmented, event) for event in segmented.add(output))
        self._unsent[index] += [delta for delta in deltas if delta]
        return super().add(index, output)

    def response(self) -> ChatCompletion:
        first = self.choices[0]
        prompt_token_ids = first.prompt_token_ids if self.body.return_token_ids else None
        fields = {"prompt_logprobs": first.prompt_logprobs, "prompt_token_ids": prompt_token_ids}
        return ChatCompletion.model_validate(self._response_fields() | fields)

    def choice(self, index: int, choice: ChoiceState) -> JsonObject:
        """Returns the JSON of a choice. The content of its message is null if it has tool calls but no text."""
        output = self._outputs[index]
        message: JsonObject = {"role": "assistant", "content": output.text("content"), "refusal": None}
        if reasoning := output.text("reasoning"):
            message |= _reasoning_fields(reasoning)
        if output.calls:
            message |= {"content": message["content"] or None, "tool_calls": list(map(_tool_call, output.calls))}
        logprobs, reason = self._logprobs(choice.logprobs), _finish_reason(output)
        token_ids = choice.token_ids if self.body.return_token_ids else None
        fields = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
        return fields | {"token_ids": token_ids}

    def events(self, index: int, output: RequestOutput, delta: list[PositionedToken]) -> Iterator[JsonObject]:
        """Yields a chunk for each delta of the message. The first of them has the log-probabilities, the last one the
        finish reason. The chunk with the role is sent together with the first output, because clients take its arrival
        as the time of the first token."""
        if index not in self._has_sent_role:
            self._has_sent_role.add(index)
            role = {"role": "assistant", "content": ""}
            yield self._chunk({"index": index, "delta": role, "logprobs": None, "finish_reason": None})
        message_deltas, self._unsent[index] = self._unsent[index], []
        if not message_deltas and (delta or output.finish_reason is not None):
            message_deltas = [{}]
        for number, message_delta in enumerate(message_deltas, 1):
            is_last = number == len(message_deltas)
            yield self._chunk(
                {
                    "index": index,
                    "delta": message_delta,
                    "logprobs": self._logprobs(delta or None) if number == 1 else None,
                    "finish_reason": _finish_reason(self._outputs[index]) if is_last else None,
                }
            )

    @property
    def has_plain_chunks(self) -> bool:
        return super().has_plain_chunks and self._outputs[0].is_passthrough and 0 in self._has_sent_role

    def text_choice(self, text: str) -> JsonObject:
        return {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}

    def _logprobs(self, tokens: list[PositionedToken] | None) -> JsonObject | None:
        as_ids = self.body.return_tokens_as_token_ids
        return None if tokens is None else chat_logprobs(tokens, self.tokenizer, as_ids)


def _message_delta(output: SegmentedOutput, event: SegmentEvent) -> JsonObject:
    """Returns the delta of the message for an event, or an empty object if the message does not change."""
    if event.segment.type != "call":
        fields = {"content": event.delta} if event.segment.type == "content" else _reasoning_fields(event.delta)
        return fields if event.event == "delta" else {}
    if event.event == "stop":
        return {}
    call: JsonObject = {"index": sum(segment.type == "call" for segment in output.segments[: event.index])}
    if event.event == "start":
        call |= _tool_call(replace(event.segment, text=""))
    else:
        call |= {"function": {"arguments": event.delta}}
    return {"tool_calls": [call]}


def _tool_call(segment: Segment) -> JsonObject:
    function = {"name": segment.name, "arguments": segment.text}
    return {"id": segment.call_id, "type": "function", "function": function}


def _reasoning_fields(text: str) -> JsonObject:
    """Returns reasoning in both fields that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def _finish_reason(output: SegmentedOutput) -> str | None:
    """Returns OpenAI's finish reason. If the message has tool calls, `stop` becomes `tool_calls`, unless a stop string
    truncated the last call."""
    if output.finish_reason != "stop" or not output.calls:
        return output.finish_reason
    if not isinstance(output.stop_reason, str):
        return "tool_calls"
    try:
        json.loads(output.calls[-1].text)
    except (ValueError, RecursionError):
        return "stop"
    return "tool_calls"


@router.post("/chat/completions", summary="Continue a conversation", response_model=ChatCompletion, responses=STREAM)
async def chat(body: ChatBody, request: Request, state: StateDep) -> Response | ChatCompletion:
    """Renders the messages with the model's chat template and generates the next message."""
    generation = await generate_chat(body, request, state)
    return await respond(ChatRenderer(body, generation), request, state, body.stream)
