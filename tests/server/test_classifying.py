"""Classifiers and cross-encoders behind the routes: a real engine in a real process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers

from fp8serve.engine.classifying import Classifier
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.server.parsing.parser_process import JOBS
from fp8serve.server.parsing.texts import TextRequest, encode_text
from tests.engine.test_classifying import headed
from tests.model.encoders import BERT
from tests.server.process import Process, serving

DOCUMENTS = ["some text", "other words", "a tent"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[1, 3], ids=["one label", "three labels"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, Path]]:
    folder = tmp_path_factory.mktemp("live")
    model = headed(folder / "tiny", BERT, request.param)
    with serving(folder / "log", model=str(model), data_dir=str(folder / "data"), recipe="rowwise") as p:
        yield p, model
        assert p.stop() == 0
        assert "Traceback" not in p.log.read_text()


def test_clients_get_the_scores_of_the_head(served: tuple[Process, Path]) -> None:
    server, folder = served
    classifier = Classifier(folder, recipe="rowwise")
    labels = classifier.head.labels
    expected = classifier.classify(DOCUMENTS)
    answer = server.client.post("/classify", json={"input": DOCUMENTS}).json()
    assert [row["probs"] for row in answer["data"]] == expected.scores.tolist()
    assert [row["label"] for row in answer["data"]] == [labels[i] for i in expected.scores.argmax(1)]
    assert {row["num_classes"] for row in answer["data"]} == {len(labels)}
    assert answer["usage"]["prompt_tokens"] == sum(expected.tokens)
    assert server.client.post("/classify", json={"input": DOCUMENTS[0]}).json()["data"] == answer["data"][:1]
    assert server.client.get("/v1/models").json()["data"][0]["task"] == "classify"
    assert "tool calls" not in server.log.read_text()
    assert server.client.get("/info").status_code == server.client.get("/metrics").status_code == 200
    pairs = classifier.classify([("a b", document) for document in DOCUMENTS]).scores
    ranked = server.client.post("/v1/rerank", json={"query": "a b", "documents": DOCUMENTS})
    scores = server.client.post("/v1/score", json={"text_1": "a b", "text_2": DOCUMENTS})
    if len(labels) == 1:
        assert [s["score"] for s in scores.json()["data"]] == pairs[:, 0].tolist()
        assert ranked.json()["results"][0]["index"] == int(pairs.argmax())
    else:
        assert ranked.status_code == scores.status_code == 400
        assert "scores 3 labels and no relevance" in scores.json()["error"]["message"]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("route", "body", "words"),
    [
        ("/classify", {"input": "a" * 60}, "context holds 40"),
        ("/classify", {"input": "a" * 70_000}, "context holds 40"),
        ("/classify", {"input": []}, "input"),
        ("/classify", {"input": [[1]]}, "input"),
        ("/v1/embeddings", {"input": "a"}, "scores labels and makes no vectors"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}, "classifier, which writes no text"),
    ],
)
def test_refusals_are_one_sentence(
    served: tuple[Process, Path], route: str, body: dict[str, object], words: str
) -> None:
    answer = served[0].client.post(route, json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_half_of_a_surrogate_pair_is_refused(served: tuple[Process, Path]) -> None:
    kind = {"content-type": "application/json"}
    for long in ("", "a" * 9000):
        body = b'{"input": ["%s\\ud800"]}' % long.encode()
        answer = served[0].client.post("/classify", content=body, headers=kind)
        assert answer.status_code == 400
        assert "Traceback" not in served[0].log.read_text()


def test_a_parser_process_reads_pairs_as_the_front_does(served: tuple[Process, Path]) -> None:
    pairs = [("some text", "a b"), ("some text", None), ("", "ä")]
    pieces = [(text or "").encode() for pair in pairs for text in pair]
    tokenizer = Tokenizer.from_dir(served[1])
    for most, document in ((None, None), (6, None), (None, 2), (7, 3)):
        forms = [(second is None, most, document) for _, second in pairs]
        head = {"directory": str(served[1]), "lengths": [*map(len, pieces)], "limits": forms}
        head |= {"prompt_parts": None, "prefix": ""}
        expected = [encode_text(tokenizer, TextRequest(*pair, most, document)) for pair in pairs]
        assert JOBS["pairs"](head, b"".join(pieces))[0]["pairs"] == expected


def test_a_pair_that_is_too_long_is_truncated_on_request(served: tuple[Process, Path]) -> None:
    """The pair cut by the library tokenizers, as sentence-transformers does."""
    server, folder = served
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    classifier = Classifier(folder, recipe="rowwise")
    long = ["a b " * 30, "some", "c d e " * 2000]

    def scores(most: int, *pairs: tuple[str, ...]) -> list[list[float]]:
        backend.enable_truncation(most)
        encodings = [backend.encode(*pair) for pair in pairs]
        rows: list[list[float]] = classifier.classify_ids(
            [e.ids for e in encodings], [e.type_ids for e in encodings]
        ).scores.tolist()
        return rows

    for most, options in ((40, {"truncate": True}), (40, {"truncation": True}), (9, {"truncate_prompt_tokens": 9})):
        answer = server.client.post("/classify", json={"input": long, **options}).json()
        assert [row["probs"] for row in answer["data"]] == scores(most, *((text,) for text in long))
        if len(classifier.head.labels) == 1:
            body = {"text_1": "q r s t u v", "text_2": long}
            response = server.client.post("/v1/score", json=body | options).json()["data"]
            assert [[s["score"]] for s in response] == scores(most, *(("q r s t u v", text) for text in long))
            response = server.client.post(
                "/v1/rerank", json={"query": "q r s t u v", "documents": long} | options
            ).json()
            assert len(response["results"]) == 3
    for most, words in ((41, "reads 40 tokens"), (2, "leaves no room for text")):
        refused = server.client.post("/classify", json={"input": "a", "truncate_prompt_tokens": most})
        assert refused.status_code == 400
        assert words in refused.json()["error"]["message"]


def test_documents_are_cut_to_so_many_tokens(served: tuple[Process, Path]) -> None:
    server, folder = served
    classifier = Classifier(folder, recipe="rowwise")
    body = {"query": "a b", "documents": ["some text", "x" * 9000], "max_tokens_per_doc": 4}
    answer = server.client.post("/v1/rerank", json=body)
    if len(classifier.head.labels) == 1:
        expected = classifier.classify([("a b", "some"), ("a b", "xxxx")]).scores[:, 0].tolist()
        scores = {r["index"]: r["relevance_score"] for r in answer.json()["results"]}
        assert [scores[0], scores[1]] == expected
    else:
        assert answer.status_code == 400
