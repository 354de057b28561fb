"""The description against the server: every route is in it, and live answers, refusals included, have its shapes.

Schemathesis makes requests from the description, valid ones and broken ones, and holds each answer to it: a documented
status, media type and schema, `Allow` with a 405, and never a 5xx.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from fp8serve.server.description import ROUTES
from tests.server.conftest import Start
from tests.server.fakes import model_dir
from tests.server.process import Process, serving

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
]

ANY = list(hypothesis.HealthCheck)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    path = tmp_path_factory.mktemp("openapi")
    options = {"model": str(model_dir(path / "tiny")), "data_dir": str(path / "data"), "train_on": "share"}
    with serving(path / "log", **options, fake=True) as process:
        yield process


@pytest.fixture(scope="module")
def description(server: Process) -> Any:
    return schemathesis.openapi.from_url(server.url + "/openapi.json")


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("method", "path"), sorted(ROUTES))
def test_live_answers_are_as_described(description: Any, method: str, path: str, mode: GenerationMode) -> None:
    operation = description[path][method.upper()]
    cases = operation.as_strategy(generation_mode=mode)

    @hypothesis.given(cases)
    @hypothesis.settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=ANY)
    def hold(case: Any) -> None:
        case.call_and_validate(checks=CHECKS, timeout=60)

    try:
        hold()
    except hypothesis.errors.Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE  # nothing about the request can be broken


def test_every_route_is_described(start: Start) -> None:
    async def body() -> None:
        async with start() as server:
            document = (await server.client.get("/openapi.json")).json()
            found = {(method, path) for path, operations in document["paths"].items() for method in operations}
            assert found == set(ROUTES)
            for operations in document["paths"].values():
                for operation in operations.values():
                    assert any(status.startswith("2") for status in operation["responses"])
            assert "HTTPValidationError" not in document["components"]["schemas"]
            links = document["paths"]["/finetune"]["post"]["responses"]["202"]["links"]
            assert len(links) == 6
            assert {link["parameters"]["job_id"] for link in links.values()} == {"$response.body#/id"}

    asyncio.run(body())
