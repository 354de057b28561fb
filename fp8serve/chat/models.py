"""The models of a chat: an engine in this process, or a model behind a server.

Servers have two names for reasoning, `reasoning_content` and `reasoning`. A tool call is streamed in fragments; the
first one holds the tool's name.
"""

import itertools
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self

from annotated_types import Ge, Le

from fp8serve.client.api import Api
from fp8serve.errors import ModelError, RequestError, ServerError, shown
from fp8serve.options import About, check

DEFAULT_TEMPERATURE = 0.7
Message = dict[str, Any]
Kind = Literal["text", "reasoning", "tool"]


@dataclass(frozen=True)
class Piece:
    """A fragment of a chat completion. If `starts_call` is true, `text` is a tool's name, and the next pieces hold the
    arguments of the call."""

    kind: Kind
    text: str
    starts_call: bool = False


@dataclass(frozen=True)
class ChatOptions:
    """The sampling options of a chat."""

    temperature: Annotated[
        float | None,
        Ge(0),
        Le(100),
        About("0 always takes the most likely token.", unset=f"the server's; {DEFAULT_TEMPERATURE} without a server"),
    ] = None
    max_tokens: Annotated[
        int | None, Ge(1), About("Maximum number of tokens to generate.", unset="what fits in the context")
    ] = None
    seed: Annotated[int | None, Ge(0), About("Seed of the sampling.", unset="a new one for every answer")] = None

    def __post_init__(self) -> None:
        check(self, RequestError)


class ChatModel(Protocol):
    """The interface of a chat's model. `answer` yields a chat completion. It may raise an Fp8ServeError or
    KeyboardInterrupt, and can be called again afterwards."""

    name: str

    def answer(self, messages: list[Message], options: ChatOptions) -> Iterator[Piece]: ...


class RemoteModel:
    """A model that a server serves. If `name` is None, it is the server's first model."""

    def __init__(self, api: Api, name: str | None = None) -> None:
        self._api = api
        self.name = name or api.first_model()

    def answer(self, messages: list[Message], options: ChatOptions) -> Iterator[Piece]:
        sampling = {name: value for name, value in vars(options).items() if value is not None}
        return chat_pieces(self._api, {"model": self.name, "messages": messages, **sampling})


def chat_pieces(api: Api, body: dict[str, Any]) -> Iterator[Piece]:
    """Streams a request to /v1/chat/completions. Raises ServerError if the server refuses the request or the stream
    breaks off."""
    is_finished = False
    with closing(api.objects("/v1/chat/completions", {**body, "stream": True})) as events:  # type: ignore[type-var]
        for event in events:
            try:
                for choice in event.get("choices") or ():
                    is_finished = is_finished or choice.get("finish_reason") is not None
                    yield from _delta_pieces(choice.get("delta") or {})
            except (AttributeError, TypeError):
                raise ServerError(f"The server sent an event unknown to OpenAI's API: {shown(event)}.") from None
    if not is_finished:
        raise ServerError("The server closed the stream before the end of its response.")


def _delta_pieces(delta: dict[str, Any]) -> Iterator[Piece]:
    if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
        yield Piece("reasoning", str(reasoning))
    if text := delta.get("content") or delta.get("refusal"):
        yield Piece("text", str(text))
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        if name := function.get("name"):
            yield Piece("tool", str(name), starts_call=True)
        if arguments := function.get("arguments"):
            yield Piece("tool", str(arguments))


class LocalModel:
    """A model directory that is loaded into this process, optionally with an adapter. Use it in a `with` statement,
    which saves the prefix cache at its end if the options have a cache_dir.

    Raises ModelError if the model has no chat template or the adapter does not fit.
    """

    def __init__(self, directory: Path, options: Mapping[str, Any], adapter: Path | None = None) -> None:
        from fp8serve.engine.engine import Engine

        self.name = directory.resolve().name
        self._adapter = None if adapter is None else adapter.name
        self._ids = itertools.count()
        self._engine = Engine(directory, **options)
        tokenizer = self._engine.tokenizer
        if tokenizer is None or not tokenizer.has_chat_template:
            raise ModelError(f"{directory} has no chat template; use fp8serve generate, which completes plain texts.")
        self._tokenizer = tokenizer
        if adapter is not None:
            self._engine.load_adapter(adapter.name, adapter)

    def answer(self, messages: list[Message], options: ChatOptions) -> Iterator[Piece]:
        from fp8serve.engine.request import Request
        from fp8serve.engine.sampling_params import SamplingParams

        ids = self._tokenizer.encode_chat(messages)
        sampling = SamplingParams(
            max_new_tokens=options.max_tokens or self._remaining_tokens(len(ids)),
            temperature=DEFAULT_TEMPERATURE if options.temperature is None else options.temperature,
            seed=options.seed,
        )
        request = Request(f"chat-{next(self._ids)}", tuple(ids), sampling, adapter=self._adapter)
        self._engine.add_request(request)
        with closing(self._run(request.request_id)) as pieces, deferred_interrupt() as is_interrupted:  # type: ignore[type-var]
            for piece in pieces:
                yield piece
                if is_interrupted():
                    raise KeyboardInterrupt

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self._engine.save_prefixes()

    def _run(self, request_id: str) -> Iterator[Piece]:
        """Runs the engine until the request has ended. Yields a piece after every step, so that the caller can check
        for an interrupt."""
        try:
            while self._engine.has_work():
                outputs = self._engine.step()
                if errors := [output.error for output in outputs if output.error is not None]:
                    raise RequestError(errors[0])
                yield Piece("text", "".join(output.text_delta for output in outputs))
        finally:
            self._engine.abort(request_id)

    def _remaining_tokens(self, num_prompt: int) -> int:
        limits = self._engine.limits
        max_tokens = min(limits.max_model_len, limits.num_blocks * limits.block_size)
        if num_prompt >= max_tokens:
            raise RequestError(f"The conversation has {num_prompt} tokens, and the context holds {max_tokens}.")
        return max_tokens - num_prompt


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Defers the first SIGINT within the block: it only makes the yielded function return True. A second SIGINT has its
    usual effect."""
    signals: list[int] = []
    previous_handler = signal.getsignal(signal.SIGINT)

    def defer(number: int, frame: object) -> None:
        signals.append(number)
        signal.signal(signal.SIGINT, previous_handler)

    signal.signal(signal.SIGINT, defer)
    try:
        yield lambda: bool(signals)
    finally:
        signal.signal(signal.SIGINT, previous_handler)
