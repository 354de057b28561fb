"""The server's work per streamed token is bounded by the number of function calls, which does not depend on the
machine."""

import pytest

from benchmarks.front_calls import measure
from fp8serve.server.serving.generation import Generation

MAX_CALLS = 28.0  # Python and C functions per token, with one event per token


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
async def test_a_token_calls_few_functions(route: str) -> None:
    figures = await measure(route, rounds=1, streams=(4, 12))
    assert 0 < figures["calls"] <= MAX_CALLS


async def test_more_work_for_a_token_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokens = Generation.write_tokens

    def slower(generation: Generation, *arguments: object) -> bool:
        for _ in range(20):
            len("work")
        return write_tokens(generation, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Generation, "write_tokens", slower)
    assert (await measure("/v1/completions", rounds=1, streams=(4, 12)))["calls"] > MAX_CALLS
