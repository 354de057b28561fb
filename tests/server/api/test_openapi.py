"""The OpenAPI description lists every route, and live answers, refusals included, match it.

Schemathesis generates valid and invalid requests from the description and checks each answer: a documented status,
media type and schema, `Allow` with a 405, and never a 5xx. It also follows every link of the description.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.generation.stateful.state_machine import StepOutput
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from fp8serve.server.api.openapi_description import ERROR_CODES, EXAMPLES, JOBS
from fp8serve.server.named_models import NamedAdapter
from fp8serve.server.serving import served_scales
from tests.patience import PATIENCE
from tests.server.conftest import Server, Start
from tests.server.fakes import Launcher, classifying_engine, embedding_engine, model_dir, rolling_engine
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


@pytest.mark.hypothesis
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("method", "path"), sorted(ERROR_CODES))
def test_live_answers_are_as_described(description: Any, method: str, path: str, mode: GenerationMode) -> None:
    operation = description[path][method.upper()]
    cases = operation.as_strategy(generation_mode=mode)

    @hypothesis.given(cases)
    @hypothesis.settings(max_examples=5, suppress_health_check=ANY)
    def check_answer(case: Any) -> None:
        case.call_and_validate(checks=CHECKS, timeout=PATIENCE)

    try:
        check_answer()
    except hypothesis.errors.Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE  # nothing about the request can be broken


async def test_every_route_is_described(start: Start) -> None:
    async with start() as server:
        document = (await server.client.get("/openapi.json")).json()
        described = {(method, path) for path, operations in document["paths"].items() for method in operations}
        assert described == set(ERROR_CODES)
        for operations in document["paths"].values():
            for operation in operations.values():
                assert any(status.startswith("2") for status in operation["responses"])
        assert "HTTPValidationError" not in document["components"]["schemas"]
        links = document["paths"]["/finetune"]["post"]["responses"]["202"]["links"]
        assert len(links) == 9
        assert {link["parameters"]["job_id"] for link in links.values()} == {"$response.body#/id"}


async def follow(server: Server, document: Any, path: str, status: str, created: str) -> set[str]:
    """Follows every link of an answer that created an object with the id `created`; returns the operations reached."""
    operations = {o["operationId"]: (m, p) for p, every in document["paths"].items() for m, o in every.items()}
    links = document["paths"][path]["post"]["responses"][status]["links"]
    for name in sorted(links, key=lambda name: operations[name][0] == "delete"):
        method, place = operations[name]
        for parameter in links[name].get("parameters", {}):
            place = place.replace("{" + parameter + "}", created)
        body = links[name].get("requestBody")
        body = body and {key: created if value == "$response.body#/id" else value for key, value in body.items()}
        answer = await server.client.request(method, place, json=body)
        assert answer.status_code in (200, 409), (name, answer.text)  # 409: a job that has not succeeded
    return set(links)


async def test_links_lead_somewhere(start: Start) -> None:
    async with start() as server:
        document = (await server.client.get("/openapi.json")).json()
        job = (await server.client.post("/finetune", json=EXAMPLES["/finetune"])).json()["id"]
        assert len(await follow(server, document, "/finetune", "202", job)) == 9
        form: Any = {"data": {"purpose": "fine-tune"}, "files": {"file": ("a.jsonl", b'{"text": "x"}\n')}}
        file = (await server.client.post("/v1/files", **form)).json()["id"]
        assert len(await follow(server, document, "/v1/files", "200", file)) == 4


@pytest.mark.parametrize("path", EXAMPLES)
async def test_the_examples_of_the_description_are_accepted(
    start: Start, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_scales, "COMMAND", (sys.executable, "-c", ""))  # writes nothing
    engines = dict.fromkeys(("/v1/embeddings", "/v1/rerank", "/v1/score"), embedding_engine)
    engines |= {"/classify": classifying_engine, "/scales/save": rolling_engine}
    (tmp_path / "more" / "clerk-2026-01").mkdir(parents=True)
    (tmp_path / "more" / "clerk-2026-01" / "adapter_config.json").touch()
    (model_dir(tmp_path / "more" / "policy" / "step-12") / "model.safetensors").touch()
    tutor = NamedAdapter("tutor", tmp_path / "tutor")
    adapters = (tutor,) if path == "/v1/unload_lora_adapter" else ()
    launcher = Launcher(engines[path]) if path in engines else None
    async with start(launcher, models_dir=tmp_path / "more", adapters=adapters) as server:
        answer = await server.client.post(path.replace("{name}", "tiny"), json=EXAMPLES[path])
        assert answer.status_code in (200, 202), answer.text


async def test_the_source_of_activate_requests_is_described(start: Start) -> None:
    async with start() as server:
        schemas = (await server.client.get("/openapi.json")).json()["components"]["schemas"]
        assert '"base"' in schemas["ActivateBody"]["properties"]["source"]["description"]


def links_of(description: Any) -> list[Any]:
    """Returns every link of the description, as schemathesis reads it."""
    operations = description.as_state_machine()._transitions.operations.values()
    return [link for operation in operations for link in operation.outgoing if not link.is_inferred]


def answered(description: Any, path: str, file_id: str | None = None) -> StepOutput:
    """Returns the answer of an operation that creates a job or a file."""
    operation = description[path]["POST"]
    if path == "/v1/files":
        form = {"purpose": "fine-tune", "file": b'{"text": "x"}\n'}
        case = operation.Case(body=form, media_type="multipart/form-data")
    else:
        body = EXAMPLES.get(path, {"model": "base", "training_file": file_id})
        case = operation.Case(body=body, media_type="application/json")
    response = case.call(timeout=PATIENCE)
    assert response.status_code in (200, 202), response.text
    return StepOutput(response=response, case=case)


@pytest.mark.hypothesis
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_every_link_leads_to_answers_as_described(description: Any, mode: GenerationMode) -> None:
    """Calls the target of each link with the id from the previous answer, in valid and in invalid requests."""
    file = answered(description, "/v1/files")
    created = {path: answered(description, path, file.response.json()["id"]) for path in ("/finetune", JOBS)}
    created["/v1/files"] = file
    links = sorted(links_of(description), key=lambda link: link.target.method == "delete")
    assert {link.source.path for link in links} == set(created)
    for link in links:
        if mode is GenerationMode.POSITIVE or link.target.body or link.target.query:  # else nothing can be broken
            follow_with(link, created[link.source.path], mode)


def follow_with(link: Any, created: StepOutput, mode: GenerationMode) -> None:
    """Sends requests along a link, with the ids from the answer `created`."""
    extracted = link.extract(created)
    places = {name: parameter.value.ok() for name, parameter in extracted.parameters.get("path_parameters", {}).items()}
    body = {} if extracted.request_body is None else extracted.request_body.value.ok()
    assert places or body, link.full_name

    @hypothesis.given(link.target.as_strategy(generation_mode=mode))
    @hypothesis.settings(max_examples=1, suppress_health_check=ANY)
    def check_answer(case: Any) -> None:
        case.path_parameters = {**(case.path_parameters or {}), **places}
        if body and isinstance(case.body, dict):
            case.body |= body
        case.call_and_validate(checks=CHECKS, timeout=PATIENCE)

    check_answer()


@pytest.mark.hypothesis
def test_walks_from_answer_to_answer_meet_nothing_undescribed(description: Any) -> None:
    """Schemathesis makes jobs and files, valid and broken, and continues with the ids in the answers."""
    walked = description.include(path_regex="^/(finetune|v1/files|v1/fine_tuning)")

    class Walk(walked.as_state_machine()):  # type: ignore[misc]
        def get_call_kwargs(self, case: Any) -> dict[str, Any]:
            return {"timeout": PATIENCE}

        def validate_response(self, response: Any, case: Any, *_: Any, **__: Any) -> None:
            case.validate_response(response, checks=CHECKS)

    options = {"suppress_health_check": ANY}
    Walk.run(settings=hypothesis.settings(max_examples=6, stateful_step_count=8, **options))
