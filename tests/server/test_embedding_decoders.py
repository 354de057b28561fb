"""Decoders that embed and that rank, behind the routes: real engines in real processes."""

import math
from pathlib import Path

import pytest

from fp8serve.engine.classifying import Classifier
from fp8serve.engine.embedding import Embedder
from tests.engine.test_embedding_decoder import embedding
from tests.engine.test_reranking_decoder import published
from tests.server.process import serving

DOCUMENTS = ["some text", "a b", "", "long " * 2000]

pytestmark = pytest.mark.slow


@pytest.mark.smoke
def test_a_decoder_embeds(tmp_path: Path) -> None:
    folder = embedding(tmp_path / "tiny")
    with serving(tmp_path / "log", model=str(folder), data_dir=str(tmp_path / "data"), recipe="rowwise") as server:
        expected = Embedder(folder, recipe="rowwise").embed(["ab"], prompt_name="query").vectors[0]
        response = server.client.post("/v1/embeddings", json={"input": "ab", "prompt_name": "query"}).json()
        assert response["data"][0]["embedding"] == expected.tolist()
        assert server.client.get("/v1/models").json()["data"][0]["task"] == "embed"
        refused = server.client.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 400
        assert "embedding model, which writes no text" in refused.json()["error"]["message"]


@pytest.mark.parametrize("has_marker", [True, False])
def test_a_decoder_ranks(tmp_path: Path, has_marker: bool) -> None:
    published(tmp_path / "tiny", has_marker)
    task = {} if has_marker else {"task": "classify"}
    options = {"model": str(tmp_path / "tiny"), "data_dir": str(tmp_path / "data"), "recipe": "rowwise", **task}
    with serving(tmp_path / "log", **options) as server:
        pairs = [("who", document) for document in DOCUMENTS[:3]]
        expected = Classifier(tmp_path / "tiny", recipe="rowwise").classify(pairs).scores[:, 0].tolist()
        response = server.client.post("/v1/rerank", json={"query": "who", "documents": DOCUMENTS[:3]}).json()["results"]
        assert all(math.isclose(row["relevance_score"], expected[row["index"]]) for row in response)
        body = {"text_1": "who", "text_2": DOCUMENTS[:3]}
        assert [row["score"] for row in server.client.post("/v1/score", json=body).json()["data"]] == expected
        assert server.client.post("/v1/rerank", json={"query": "who", "documents": DOCUMENTS}).status_code == 400
