"""Jobs may send answers only to addresses that the operator allows, or to paths below them, and never to a file."""

from pathlib import Path

import pytest

from fp8serve.client.api import base_url
from fp8serve.errors import JobError, RequestError
from fp8serve.options import http_address
from fp8serve.server.faults import Fault
from fp8serve.server.finetuning.submission import check_grader
from fp8serve.server.settings import Settings
from fp8serve.train.config import TrainConfig
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
def test_an_address_below_an_allowed_one_is_accepted(url: str | None) -> None:
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
def test_any_other_address_is_refused(url: str) -> None:
    with pytest.raises(Fault, match="This server does not send completions to that address"):
        check_grader(url, ALLOWED)


NO_ADDRESSES = [
    "x", "file:///etc", "http://", "http://x:abc/", "http://[::1", "http://x:99999/", "http://x:0/", "http://[zz]/",
    "http://x y/", "http://x/\ny", "http://\u00e9/", f"http://{'a' * 64}.example/", "http://a..b/", "http:///x", "//x/",
]  # fmt: skip


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_a_text_that_is_no_address_is_refused_with_a_sentence(url: str, tmp_path: Path) -> None:
    assert http_address(url) is None
    for allowed in (ALLOWED, ()):
        with pytest.raises(Fault, match="grader_url must be an address such as") as fault:
            check_grader(url, allowed)
        assert fault.value.status("/finetune") == 422
    with pytest.raises(JobError, match="grader_url must be an address such as"):
        TrainConfig(model="m", data=("d",), out="o", method="grpo", grader_url=url)
    with pytest.raises(RequestError, match="--grader-url must be an address"):
        Settings(model=tmp_path, grader_urls=(url,))
    with pytest.raises(RequestError, match="--otlp-endpoint must be an address"):
        Settings(model=tmp_path, otlp_endpoint=url)
    with pytest.raises(RequestError, match="is not the URL of a server"):
        base_url(url)


@pytest.mark.parametrize(
    "url", ["http://localhost", "https://a-b.example:8443/x?y=1", "http://[::1]:9000/", "http://10.0.0.1"]
)
def test_a_valid_address_is_parsed(url: str) -> None:
    parts = http_address(url)
    assert parts is not None
    assert parts.geturl() == url


async def test_jobs_with_a_grader_are_checked_over_http(start: Start) -> None:
    async with start(grader_urls=("http://localhost:9000/grade",)) as server:
        body = {"data": [{"prompt": "2 + 3 =", "sum": 5}], "method": "grpo", "seq_len": 64}
        for more, message in (
            ({"grader_url": "http://x:abc/"}, "grader_url must be an address"),
            ({"grader_url": "http://[::1"}, "grader_url must be an address"),
            ({"grader_url": "http://x:99999/"}, "grader_url must be an address"),
            ({"grader_url": "http://localhost:9001/grade"}, "This server does not send completions to that address"),
            (
                {"grader_url": "http://localhost:9000/grade", "loss_type": "simpo"},
                "loss_type simpo is no loss of the method grpo",
            ),
            ({"grader_url": "http://localhost:9000/grade", "num_generations": 1}, "num_generations"),
            ({"reward": "/etc/passwd"}, "reward"),
            ({}, "needs one source of rewards"),
        ):
            for route in ("/finetune", "/finetune/validate"):
                answer = await server.client.post(route, json={**body, **more})
                assert (answer.status_code, message in answer.text) == (422, True), (more, answer.text)
        good = {**body, "grader_url": "http://localhost:9000/grade"}
        report = (await server.client.post("/finetune/validate", json=good)).json()
        assert (report["data"]["rows"], report["memory_bytes"]["engine"] > 0) == (1, True)
        job = (await server.client.post("/finetune", json=good)).json()
        assert job["config"]["method"] == "grpo"
        assert "9000" not in str(job)
