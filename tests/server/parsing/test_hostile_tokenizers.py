"""Hostile tokenizers are refused with a sentence or give the right ids, and the server answers the next request."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers

from fp8serve.errors import ModelError
from fp8serve.model.text.limited_process import JobResult
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.model.text.tokenizer_facts import TokenizerFacts, describe
from fp8serve.processes import Head
from fp8serve.server.parsing.parser_pool import JobLimits
from fp8serve.server.parsing.request_parser import SHORT_SECONDS
from fp8serve.server.serving.served_weights import WeightSource
from fp8serve.server.settings import ServerLimits, Settings
from tests.model.hostile_tokenizers import CASES, Hostile
from tests.patience import eventually
from tests.server.conftest import Server, Start
from tests.server.fakes import FakeEngine, Launcher

CPU, MEMORY = 2.0, 256 << 20
LIMITS = ServerLimits(reading_seconds=CPU, reading_memory=MEMORY)
SAMPLES = {"normalizer doubles 30 times", "decoder writes halves of characters", "ids are equal"}  # one per outcome
REFUSALS = {"tokenizer_error", "invalid_parameter", "context_length_exceeded"}


class DescribingLauncher(Launcher):
    """Reads the directory's tokenizer in a limited process, as the server does."""

    async def __call__(self, source: WeightSource) -> tuple[FakeEngine, TokenizerFacts]:
        facts = await asyncio.to_thread(describe, source.directory, CPU, MEMORY)
        engine, _ = await super().__call__(source)
        return engine, facts


def is_a_sentence(text: str) -> bool:
    return text.endswith(".") and "\n" not in text and "panicked" not in text


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.smoke) if n in SAMPLES else n for n in CASES])
async def test_a_hostile_tokenizer_is_refused_or_right(start: Start, settings: Settings, name: str) -> None:
    case = CASES[name]
    case.write(settings.model)
    async with start(DescribingLauncher(), wait=False, limits=LIMITS) as server:
        default = server.state.models.default
        await eventually(lambda: default.ready or default.state == "failed", "a decision")
        assert (await server.client.get("/health/live")).status_code == 200
        assert (default.state == "failed") == (case.outcome == "file"), default.problem
        if case.outcome == "file":
            assert isinstance(default.problem, ModelError)
            assert "tokenizer.json" in str(default.problem)
            assert is_a_sentence(str(default.problem))
        else:
            await _is_read_or_refused(server, case, settings.model)


async def _is_read_or_refused(server: Server, case: Hostile, directory: Path) -> None:
    answer = await server.client.post("/v1/completions", json={"prompt": case.text, "max_tokens": 1})
    if case.outcome == "text":
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] in REFUSALS
        assert is_a_sentence(answer.json()["error"]["message"].removesuffix(" Send less at once."))
    else:
        assert answer.status_code in (200, 400)  # 400: ids that the engine does not have, or more than its context
        ids = (await server.client.post("/tokenize", json={"prompt": case.text})).json()["tokens"]
        assert ids == ids_by_the_library(directory, case.text)
        assert streamed(directory, ids * 40) == Tokenizer.from_dir(directory).decode(ids * 40)
    back = await server.client.post("/detokenize", json={"tokens": [0] * 300})  # the next request is answered
    if 0 in Tokenizer.from_dir(directory).vocabulary.values():
        assert (back.status_code, back.json()) == (200, {"prompt": Tokenizer.from_dir(directory).decode([0] * 300)})
    else:
        assert (back.status_code, back.json()["code"]) == (422, "invalid_parameter")


def ids_by_the_library(directory: Path, text: str) -> list[int]:
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.no_truncation()
    backend.no_padding()
    ids: list[int] = backend.encode(text).ids
    return ids


def streamed(directory: Path, ids: list[int]) -> str:
    stream = Tokenizer.from_dir(directory).stream()
    return "".join([*map(stream.push, ids), stream.flush()])


async def test_only_the_limits_end_a_parser(start: Start, settings: Settings) -> None:
    """A tokenizer that fails in the library leaves its process alive for the next request."""
    CASES["template names an unknown token"].write(settings.model)
    async with start(DescribingLauncher(), limits=LIMITS) as server:
        for _ in range(2):
            answer = await server.client.post("/generate", json={"inputs": "a"})
            assert (answer.status_code, answer.json()["code"]) == (422, "tokenizer_error")
        processes = [process._process for process in server.state.parser.pool._processes]
        assert [process.returncode for process in processes if process is not None] == [None]


@pytest.mark.slow
async def test_a_short_text_does_not_hold_a_parser_for_long(start: Start, settings: Settings) -> None:
    """With the default limits of a server, which are large enough for long texts."""
    CASES["normalizer doubles 30 times"].write(settings.model)
    allowed: list[JobLimits] = []
    async with start(DescribingLauncher()) as server:
        run = server.state.parser.pool.run

        async def recording(head: Head, body: bytes, allowance: JobLimits) -> JobResult:
            allowed.append(allowance)
            return await run(head, body, allowance)

        server.state.parser.pool.run = recording  # type: ignore[method-assign]
        answer = await server.client.post("/generate", json={"inputs": "aaaaa"})
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_parameter")
        assert "more" in answer.json()["error"]
        assert [allowance.cpu for allowance in allowed] == [SHORT_SECONDS]


def test_the_facts_are_the_same_after_the_journey(settings: Settings) -> None:
    tokenizer = Tokenizer.from_dir(settings.model)
    assert describe(settings.model) == TokenizerFacts.from_tokenizer(tokenizer)
    assert replace(TokenizerFacts.from_tokenizer(tokenizer), bound=None) == TokenizerFacts.from_json(
        replace(TokenizerFacts.from_tokenizer(tokenizer), bound=None).to_json()
    )
