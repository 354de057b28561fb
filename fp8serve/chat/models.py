"""The models that answer: an engine in this process, or a server."""

import itertools
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, Self

from annotated_types import Ge, Le

from fp8serve.chat.conversation import Message
from fp8serve.client.answers import Piece, chat_pieces
from fp8serve.client.api import Api
from fp8serve.errors import ModelError, RequestError
from fp8serve.options import About, check

OWN_TEMPERATURE = 0.7


@dataclass(frozen=True)
class ChatOptions:
    """How an answer is sampled."""

    temperature: Annotated[
        float | None,
        Ge(0),
        Le(100),
        About("0 takes the likeliest token every time.", unset=f"the server's; {OWN_TEMPERATURE} without one"),
    ] = None
    max_tokens: Annotated[int | None, Ge(1), About("Longest answer, in tokens.", unset="what the context holds")] = None
    seed: Annotated[int | None, Ge(0), About("Seed of the sampling.", unset="a fresh one for every answer")] = None

    def __post_init__(self) -> None:
        check(self, RequestError)


class ChatModel(Protocol):
    """`answer` raises an Fp8ServeError of one sentence, or KeyboardInterrupt; either way it can be asked again."""

    name: str

    def answer(self, messages: list[Message], options: ChatOptions) -> Iterator[Piece]: ...


class RemoteModel:
    """A model that a server serves: the one of that `name`, or its first."""

    def __init__(self, api: Api, name: str | None = None) -> None:
        self._api = api
        self.name = name or api.first_model()

    def answer(self, messages: list[Message], options: ChatOptions) -> Iterator[Piece]:
        chosen = {name: value for name, value in vars(options).items() if value is not None}
        return chat_pieces(self._api, {"model": self.name, "messages": messages, **chosen})


class LocalModel:
    """A model directory, loaded into this process, optionally with the adapter of a directory. At the end of a `with`
    its prefixes are stored if the options say so.

    ModelError: it has no chat template, or the adapter does not fit.
    """

    def __init__(self, directory: Path, options: Mapping[str, Any], adapter: Path | None = None) -> None:
        from fp8serve.engine.engine import Engine

        self.name = directory.resolve().name
        self._adapter = None if adapter is None else adapter.name
        self._ids = itertools.count()
        self._engine = Engine(directory, **options)
        tokenizer = self._engine.tokenizer
        if tokenizer is None or not tokenizer.has_chat_template:
            raise ModelError(f"{directory} has no chat template; fp8serve generate completes texts with it.")
        self._tokenizer = tokenizer
        if adapter is not None:
            self._engine.load_adapter(adapter.name, adapter)

    def answer(self, messages: list[Message], options: ChatOptions) -> Iterator[Piece]:
        from fp8serve.chat.models import held_interrupts
        from fp8serve.engine.request import Request
        from fp8serve.engine.sampling_params import SamplingParams

        ids = self._tokenizer.encode_chat(messages)
        sampling = SamplingParams(
            max_new_tokens=options.max_tokens or self._room(len(ids)),
            temperature=OWN_TEMPERATURE if options.temperature is None else options.temperature,
            seed=options.seed,
        )
        request = Request(f"chat-{next(self._ids)}", tuple(ids), sampling, adapter=self._adapter)
        self._engine.add_request(request)
        with closing(self._run(request.request_id)) as pieces, held_interrupts() as interrupted:  # type: ignore[type-var]
            for piece in pieces:
                yield piece
                if interrupted():
                    raise KeyboardInterrupt

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self._engine.save_prefixes()

    def _run(self, request_id: str) -> Iterator[Piece]:
        """Steps of the engine until the request has ended; a piece for each, so that interrupts are seen in between."""
        try:
            while self._engine.has_work():
                outputs = self._engine.step()
                if failed := [output.error for output in outputs if output.error is not None]:
                    raise RequestError(failed[0])
                yield Piece("text", "".join(output.text_delta for output in outputs))
        finally:
            self._engine.abort(request_id)

    def _room(self, num_prompt: int) -> int:
        limits = self._engine.limits
        holds = min(limits.max_model_len, limits.num_blocks * limits.block_size)
        if num_prompt >= holds:
            raise RequestError(f"The conversation has {num_prompt} tokens, and the context holds {holds}.")
        return holds - num_prompt


@contextmanager
def held_interrupts() -> Iterator[Callable[[], bool]]:
    """While the block runs, the first SIGINT only makes the function true; a second one has its usual effect."""
    seen: list[int] = []
    usual = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: object) -> None:
        seen.append(number)
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, usual)
