"""An embedding model behind the routes: a real engine in a real process, and OpenAI's own client unmodified."""

import base64
import struct
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch

from fp8serve.engine.embedding import Embedder
from tests.engine.tiny import write_model
from tests.model.encoders import BERT, make, pooled
from tests.server.process import Process, serving

TEXTS = ["some text", "other words here", "some tent"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("live") / "tiny"
    make(path, BERT)
    pooled(path, "mean_tokens", normalize=True, max_length=24, prompts={"p": "x "}, default="p")
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Process]:
    with serving(folder.parent / "log", model=str(folder), data_dir=str(folder.parent / "data"), recipe="rowwise") as p:
        yield p
        assert p.stop() == 0
        assert "Traceback" not in p.log.read_text()


@pytest.fixture
def client(server: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as openai_client:
        yield openai_client


@pytest.mark.smoke
def test_openais_client_gets_the_embedders_vectors(client: openai.OpenAI, folder: Path) -> None:
    expected = Embedder(folder, recipe="rowwise").embed(TEXTS)
    for form in ("float", "base64"):
        response = client.embeddings.create(model="tiny", input=TEXTS, encoding_format=form)  # type: ignore[call-overload]
        vectors = [e.embedding for e in response.data]
        if form == "base64":
            vectors = [list(struct.unpack("<64f", base64.b64decode(v))) for v in vectors]
        assert torch.equal(torch.tensor(vectors), expected.vectors)
        assert [e.index for e in response.data] == [0, 1, 2]
        assert response.usage.prompt_tokens == response.usage.total_tokens == sum(expected.tokens)


def test_documents_that_are_too_long_are_truncated_on_request(server: Process, folder: Path) -> None:
    embedder = Embedder(folder, recipe="rowwise")
    documents = ["some text", "z" * 9000, "ab"]

    def ranked(query: str, cut: list[str], **options: object) -> None:
        body = {"query": query, "documents": documents} | options
        answer = server.client.post("/v1/rerank", json=body).json()
        scores = [r["relevance_score"] for r in sorted(answer["results"], key=lambda r: int(r["index"]))]
        of_query, *others = embedder.embed([query, *cut]).vectors
        assert scores == pytest.approx([float(of_query @ other) for other in others], abs=1e-6)

    ranked("ab", ["some text", "z" * 20, "ab"], truncate=True)  # of 24, prompt and special tokens take four
    ranked("zzzzz", ["some", "zzzz", "ab"], max_tokens_per_doc=4)
    refused = server.client.post("/v1/rerank", json={"query": "ab", "documents": documents, "truncate": False})
    assert refused.status_code == 400
    for long in ([[5] * 90, [5]], ["z" * 9000]):
        answer = server.client.post("/v1/embeddings", json={"input": long, "truncate": True})
        assert answer.json()["usage"]["prompt_tokens"] == 24 + (len(long) - 1)


def test_documents_may_be_objects_as_other_clients_send_them(server: Process) -> None:
    texts = ["some tent", "other words", "z"]
    plain, objects = (
        server.client.post("/v1/rerank", json={"query": "a tent", "documents": documents, "return_documents": True})
        for documents in (texts, [{"text": texts[0]}, texts[1], {"text": texts[2]}])
    )
    assert objects.status_code == 200
    assert objects.json()["results"] == plain.json()["results"]


@pytest.mark.parametrize(
    ("route", "body", "words"),
    [
        ("embeddings", {"input": []}, "input: give a text, some texts, token ids or some lists of token ids"),
        ("embeddings", {"input": ["a", [1]]}, "input: give a text, some texts"),
        ("embeddings", {"input": [["a" * 9000]] * 9}, "input: give a text, some texts"),
        ("score", {"text_1": [], "text_2": "a"}, "text_1: give a text, or a list of one or more texts"),
        ("rerank", {"query": "a", "documents": []}, "documents: give a list of one or more texts"),
        ("rerank", {"query": "a", "documents": [{"title": "a"}]}, "documents: give a list of one or more texts"),
    ],
)
def test_the_refusal_of_an_invalid_input_names_the_accepted_types(
    server: Process, route: str, body: object, words: str
) -> None:
    answer = server.client.post(f"/v1/{route}", json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_two_thousand_texts_are_one_request(server: Process) -> None:
    answer = server.client.post("/v1/embeddings", json={"input": ["a"] * 2048, "dimensions": 1})
    assert len(answer.json()["data"]) == 2048
    refused = server.client.post("/v1/embeddings", json={"input": ["a"] * 2049})
    assert refused.json()["error"]["message"].startswith("2049 texts are more than this server's limit")


def test_one_text_token_ids_and_dimensions(client: openai.OpenAI, folder: Path) -> None:
    embedder = Embedder(folder, recipe="rowwise")
    ids = embedder.tokenizer.encode("x some text")
    answers = [client.embeddings.create(model="tiny", input=what, dimensions=8) for what in ("some text", ids, [ids])]
    expected = embedder.embed(["some text"], dimensions=8).vectors[0].tolist()
    assert all(answer.data[0].embedding == expected for answer in answers)


def test_prompts_by_name_and_truncation(client: openai.OpenAI, folder: Path) -> None:
    embedder = Embedder(folder, recipe="rowwise")

    def embed(text: str | list[int], **more: object) -> list[float]:
        return client.embeddings.create(model="tiny", input=text, extra_body=more).data[0].embedding

    assert embed("a b", prompt_name="p") == embed("a b")
    long = "ab" * 5000  # read by a parser process
    for text in ("ab" * 20, long):
        cut = embedder.embed([text], truncate=True)
        assert (
            embed(text, truncate_prompt_tokens=-1) == embed(text, truncate_prompt_tokens=24) == cut.vectors[0].tolist()
        )
    ids = embedder.tokenizer.encode("x abcdefgh")
    assert embed("abcdefgh", truncate_prompt_tokens=6) == embedder.embed([ids[:5] + ids[-1:]]).vectors[0].tolist()
    assert embed(ids * 9, truncate_prompt_tokens=6) == embedder.embed([ids[:5] + ids[-1:]]).vectors[0].tolist()
    assert embed("ab", truncate_prompt_tokens=24) == embed("ab")


def test_rerank_and_score_agree(server: Process) -> None:
    ranked = server.client.post("/v1/rerank", json={"query": TEXTS[0], "documents": TEXTS, "return_documents": True})
    results = ranked.json()["results"]
    assert results[0]["index"] == 0
    assert results[0]["relevance_score"] == pytest.approx(1)
    assert results[0]["document"] == {"text": TEXTS[0]}
    by_score = [r["relevance_score"] for r in results]
    assert by_score == sorted(by_score, reverse=True)
    first = server.client.post("/v1/rerank", json={"query": TEXTS[0], "documents": TEXTS, "top_n": 1}).json()
    assert first["results"] == [{k: v for k, v in results[0].items() if k != "document"}]
    scores = server.client.post("/v1/score", json={"text_1": TEXTS[0], "text_2": TEXTS}).json()["data"]
    assert {s["index"]: s["score"] for s in scores} == {r["index"]: r["relevance_score"] for r in results}
    pairs = server.client.post("/v1/score", json={"text_1": TEXTS, "text_2": TEXTS}).json()["data"]
    assert [p["score"] for p in pairs] == pytest.approx([1, 1, 1])


@pytest.mark.parametrize(
    ("route", "body", "words"),
    [
        ("embeddings", {"input": "a" * 40}, "context holds 24"),
        ("embeddings", {"input": [10**6]}, "outside the vocabulary"),
        ("embeddings", {"input": "a", "dimensions": 65}, "1 to 64"),
        ("embeddings", {"input": []}, "input"),
        ("embeddings", {"input": "a", "unknown": 1}, "unknown"),
        ("embeddings", {"input": "a", "prompt_name": "q"}, "no prompt of that name; it has p"),
        ("embeddings", {"input": "a", "prompt_name": ""}, "no prompt of that name; it has p"),
        ("embeddings", {"input": [5, 6], "prompt_name": "p"}, "input holds token ids"),
        ("embeddings", {"input": "a", "truncate_prompt_tokens": 25}, "reads 24 tokens of a text at most"),
        ("embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("embeddings", {"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ("rerank", {"query": "a", "documents": []}, "documents"),
        ("score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1 has 2 texts and text_2 3"),
        ("completions", {"prompt": "a", "max_tokens": 1}, "embedding model, which writes no text"),
    ],
)
def test_refusals_are_one_sentence(server: Process, route: str, body: dict[str, object], words: str) -> None:
    answer = server.client.post(f"/v1/{route}", json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_the_list_of_models_has_the_task(server: Process) -> None:
    assert server.client.get("/v1/models").json()["data"][0]["task"] == "embed"
    assert server.client.get("/scales").status_code == 200
    assert server.client.get("/info").status_code == 200
    assert server.client.get("/metrics").status_code == 200


def test_a_model_that_writes_text_makes_no_vectors(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny")
    with serving(
        tmp_path / "log", model=str(tmp_path / "tiny"), data_dir=str(tmp_path / "data"), recipe="bf16"
    ) as process:
        answer = process.client.post("/v1/embeddings", json={"input": "a"})
        assert answer.status_code == 400
        assert "writes text and makes no vectors" in answer.json()["error"]["message"]
        assert process.client.get("/v1/models").json()["data"][0]["task"] == "generate"
        assert "tool calls are read as" in process.log.read_text()
