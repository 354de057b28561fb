"""`/v1/chat/completions`: OpenAI's wire, on the same pipeline as all conversations."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from fp8serve.engine.output import RequestOutput
from fp8serve.server.answers.choice import AnswerReader
from fp8serve.server.answers.feed import Arguments, Call, Content, Part, Reasoning
from fp8serve.server.api.answer_pipeline import respond
from fp8serve.server.api.chat_generation import answer_reader, call_id, generate_chat
from fp8serve.server.api.openai.completion_routes import Choice, CompletionRenderer, Usage
from fp8serve.server.api.openai.logprobs import ChatLogprobs, Placed, PromptLogprobs, chat_logprobs
from fp8serve.server.api.routing import STREAM, Answer, BoundedRoute, JsonObject, StateDep, absent
from fp8serve.server.schemas.openai_bodies import ChatBody
from fp8serve.server.serving.generation import Generation

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=BoundedRoute)


class ChatFunction(Answer):
    name: str
    arguments: str


class ChatToolCall(Answer):
    id: str
    type: Literal["function"]
    function: ChatFunction


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = absent()
    reasoning: str | None = absent()
    tool_calls: list[ChatToolCall] | None = absent()


class ChatChoice(Answer):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


class ChatAnswer:
    """Takes the parts of an answer. `new_id` makes the id of a call."""

    def __init__(self, reader: AnswerReader, new_id: Callable[[], str]) -> None:
        self._reader, self._new_id = reader, new_id
        self._reasoning = self._content = ""
        self._calls: list[JsonObject] = []
        self._unsent: list[JsonObject] = []
        self._stopped_by: str | int | None = None

    def take(self, output: RequestOutput) -> None:
        self._stopped_by = output.stop_reason
        ends = output.finish_reason is not None
        for part in self._reader.take(output.text_delta, ends, output.is_cut_off):
            self._add(part)

    def drain(self) -> list[JsonObject]:
        """The deltas since the last call."""
        deltas, self._unsent = self._unsent, []
        return deltas

    def message(self) -> JsonObject:
        """The whole message. Beside calls, the content is null if there is no text."""
        message: JsonObject = {"role": "assistant", "content": self._content, "refusal": None}
        if self._reasoning:
            message |= _reasoning(self._reasoning)
        if self._calls:
            message |= {"content": self._content or None, "tool_calls": self._calls}
        return message

    def finish(self, reason: str | None) -> str | None:
        """OpenAI's finish reason: `tool_calls` only if no stop string cut off the last call."""
        return "tool_calls" if reason == "stop" and self._calls and not self._is_cut else reason

    @property
    def _is_cut(self) -> bool:
        return isinstance(self._stopped_by, str) and not _is_json(self._calls[-1]["function"]["arguments"])

    def _add(self, part: Part) -> None:
        if isinstance(part, Content):
            self._content += part.text
            self._unsent.append({"content": part.text})
        elif isinstance(part, Reasoning):
            self._reasoning += part.text
            self._unsent.append(_reasoning(part.text))
        elif isinstance(part, Call):
            self._begin_call(part.name)
        else:
            self._add_arguments(part)

    def _begin_call(self, name: str) -> None:
        call = {"id": self._new_id(), "type": "function", "function": {"name": name, "arguments": ""}}
        self._calls.append(call)
        first = call | {"function": {"name": name, "arguments": ""}}  # the other one grows
        self._unsent.append({"tool_calls": [{"index": len(self._calls) - 1} | first]})

    def _add_arguments(self, part: Arguments) -> None:
        self._calls[-1]["function"]["arguments"] += part.text
        piece = {"index": len(self._calls) - 1, "function": {"arguments": part.text}}
        self._unsent.append({"tool_calls": [piece]})


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _reasoning(text: str) -> JsonObject:
    """Reasoning under both names that clients look for."""
    return {"reasoning_content": text, "reasoning": text}


class ChatRenderer(CompletionRenderer[ChatCompletion]):
    """`chat.completion` objects and their chunks."""

    PREFIX, OBJECT, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatBody, generation: Generation) -> None:
        super().__init__(body, generation)
        new_id = partial(call_id, body, generation.served, "call")
        readers = [answer_reader(body, generation) for _ in generation.requests]
        self._answers = [ChatAnswer(reader, new_id) for reader in readers]
        self._opened: set[int] = set()  # choices whose role was streamed

    def add(self, index: int, output: RequestOutput) -> list[Placed]:
        self._answers[index].take(output)
        return super().add(index, output)

    def whole(self) -> ChatCompletion:
        return ChatCompletion.model_validate(self._ended() | {"prompt_logprobs": self.choices[0].prompt_logprobs})

    def choice(self, index: int, choice: Choice) -> JsonObject:
        answer = self._answers[index]
        return {
            "index": index,
            "message": answer.message(),
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": answer.finish(choice.finish),
        }

    def events(self, index: int, output: RequestOutput, new: list[Placed]) -> Iterator[JsonObject]:
        """The role before a choice's first output, since clients take that chunk for the first token; then a chunk for
        each delta: the first has the log-probabilities, the last says why the answer ended."""
        if index not in self._opened:
            self._opened.add(index)
            delta = {"role": "assistant", "content": ""}
            yield self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
        deltas = self._answers[index].drain()
        if not deltas and (new or output.finish_reason is not None):
            deltas = [{}]
        for number, delta in enumerate(deltas, 1):
            yield self._chunk(
                {
                    "index": index,
                    "delta": delta,
                    "logprobs": self._logprobs(new or None) if number == 1 else None,
                    "finish_reason": self._finish(index, output) if number == len(deltas) else None,
                }
            )

    def _finish(self, index: int, output: RequestOutput) -> str | None:
        return self._answers[index].finish(output.finish_reason)

    def _logprobs(self, placed: list[Placed] | None) -> JsonObject | None:
        return None if placed is None else chat_logprobs(placed, self.tokenizer)


@router.post("/chat/completions", summary="Continue a conversation", response_model=ChatCompletion, responses=STREAM)
async def chat(body: ChatBody, request: Request, state: StateDep) -> Response | ChatCompletion:
    """Renders the conversation by the model's own template."""
    generation = await generate_chat(body, request, state)
    return await respond(ChatRenderer(body, generation), request, state, body.stream)
