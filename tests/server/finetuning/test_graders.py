"""Addresses to which jobs may send answers: those of the operator and the paths below them, and never a file."""

from pathlib import Path

import pytest

from fp8serve.errors import RequestError
from fp8serve.server.faults import Fault
from fp8serve.server.finetuning.graders import check_grader
from fp8serve.server.settings import Settings
from tests.server.conftest import Start

ALLOWED = ("https://graders.example/team/", "http://localhost:9000")


@pytest.mark.parametrize(
    "url",
    [
        "https://graders.example/team",
        "https://graders.example/team/sums?strict=1",
        "https://GRADERS.example:443/team/a/b",
        "http://localhost:9000/anything",
        None,
    ],
)
def test_what_is_allowed(url: str | None) -> None:
    check_grader(url, ALLOWED)


@pytest.mark.parametrize(
    "url",
    [
        "https://graders.example/",
        "https://graders.example/teammate",
        "https://graders.example/team/../admin",
        "https://graders.example/team/%2e%2e/admin",
        "https://graders.example/team/..\\admin",
        "http://graders.example/team",
        "https://graders.example:8443/team",
        "https://graders.example.evil/team",
        "https://user@graders.example/team",
        "http://localhost/",
        "http://127.0.0.1:9000/",
        "http://169.254.169.254/latest",
    ],
)
def test_what_is_not(url: str) -> None:
    with pytest.raises(Fault, match="This server does not send answers to that address"):
        check_grader(url, ALLOWED)


def test_an_address_that_is_none_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--grader-url must be an address"):
        Settings(model=tmp_path, grader_urls=("file:///etc",))


async def test_jobs_over_http(start: Start) -> None:
    async with start(grader_urls=("http://localhost:9000/grade",)) as server:
        ask = {"data": [{"prompt": "2 + 3 =", "sum": 5}], "method": "grpo", "seq_len": 64}
        for more, said in (
            ({"grader_url": "http://localhost:9001/grade"}, "This server does not send answers to that address"),
            ({"grader_url": "http://localhost:9000/grade", "loss_type": "ipo"}, "and not ipo"),
            ({"grader_url": "http://localhost:9000/grade", "num_generations": 1}, "num_generations"),
            ({"reward": "/etc/passwd"}, "reward"),
            ({}, "wants rewards from one place"),
        ):
            for route in ("/finetune", "/finetune/validate"):
                answer = await server.client.post(route, json={**ask, **more})
                assert (answer.status_code, said in answer.text) == (422, True), (more, answer.text)
        good = {**ask, "grader_url": "http://localhost:9000/grade"}
        report = (await server.client.post("/finetune/validate", json=good)).json()
        assert (report["data"]["rows"], report["memory_bytes"]["engine"] > 0) == (1, True)
        job = (await server.client.post("/finetune", json=good)).json()
        assert job["config"]["method"] == "grpo"
        assert "9000" not in str(job)
