"""`/v1/embeddings`, and `/v1/rerank` and `/v1/score` by a cross-encoder or by the cosine of two texts' vectors."""

import base64
import math
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request

from fp8serve.server.api.bounded_route import BoundedRoute
from fp8serve.server.api.dependencies import StateDep
from fp8serve.server.api.openai.classifying_routes import relevance
from fp8serve.server.api.openai.encoding import at_once, most_tokens, usage
from fp8serve.server.faults import Code, Fault
from fp8serve.server.http.streams import until_disconnect
from fp8serve.server.parsing.request_parser import Prompt, check_fit
from fp8serve.server.parsing.texts import Asked
from fp8serve.server.schemas.embedding_bodies import EmbeddingBody, RerankBody, ScoreBody
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.served import Served

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=BoundedRoute)

JsonObject = dict[str, Any]


@router.post("/embeddings", summary="One vector for each text", response_model=None)
async def embeddings(body: EmbeddingBody, request: Request, state: StateDep) -> JsonObject:
    """By an embedding model. The named prompt, or the model's default one if it has any, is put before the texts."""
    served, how = state.served(body.model, "embed"), _How(body.dimensions, body.prompt_name)
    vectors, tokens = await _vectors(body, body.texts, how, request, served, state)
    as_text = body.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": i, "embedding": base64.b64encode(v).decode() if as_text else _numbers(v)}
        for i, v in enumerate(vectors)
    ]
    return {"object": "list", "model": body.model or served.source.model_id, "data": data, "usage": usage(tokens)}


@router.post("/rerank", summary="Documents by their relevance to a query", response_model=None)
async def rerank(body: RerankBody, request: Request, state: StateDep) -> JsonObject:
    """By a cross-encoder's own score, or the cosine of vectors; documents of equal relevance keep their order."""
    documents = body.texts
    pairs = [(body.query, document) for document in documents]
    served = state.served(body.model, "classify", "embed")
    scores, tokens = await _relevance(body, pairs, request, served, state)
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
    results = [
        {"index": i, "relevance_score": scores[i]}
        | ({"document": {"text": documents[i]}} if body.return_documents else {})
        for i in best
    ]
    name = body.model or served.source.model_id
    return {"id": request.scope["request_id"], "model": name, "results": results, "usage": usage(tokens)}


@router.post("/score", summary="How close pairs of texts are", response_model=None)
async def score(body: ScoreBody, request: Request, state: StateDep) -> JsonObject:
    """By a cross-encoder's own score, or the cosine of their vectors."""
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = body.texts
    if len(first) not in (1, len(second)):
        message = f"text_1 has {len(first)} texts and text_2 {len(second)}; give one, or as many."
        raise Fault(Code.INVALID_PARAMETER, message, param="text_1")
    pairs = list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))
    served = state.served(body.model, "classify", "embed")
    scores, tokens = await _relevance(body, pairs, request, served, state)
    data = [{"object": "score", "index": i, "score": score} for i, score in enumerate(scores)]
    named = {"id": request.scope["request_id"], "object": "list", "created": int(time.time())}
    return named | {"model": body.model or served.source.model_id, "data": data, "usage": usage(tokens)}


@dataclass(frozen=True)
class _How:
    """How a body's texts are read. documents: the indexes of the texts of which at most `document` tokens are read."""

    dimensions: int | None = None
    prompt_name: str | None = None
    document: int | None = None
    documents: range = range(0)

    def prompt(self, served: Served, texts: Sequence[Prompt]) -> str:
        """The prompt to put before texts. Fault: the model has none of that name, or the input is token ids."""
        info = served.engine.info
        if self.prompt_name is None:
            return str(info.get("prompt", ""))
        prompts: dict[str, str] = info.get("prompts", {})
        if self.prompt_name not in prompts:
            known = ", ".join(prompts) or "none"
            raise Fault(
                Code.INVALID_PARAMETER, f"This model has no prompt of that name; it has {known}.", param="prompt_name"
            )
        if not all(isinstance(text, str) for text in texts):
            message = "A prompt is put before texts, and input holds token ids; leave out prompt_name."
            raise Fault(Code.INVALID_PARAMETER, message, param="prompt_name")
        return prompts[self.prompt_name]


async def _relevance(
    body: RerankBody | ScoreBody,
    pairs: Sequence[tuple[str, str]],
    request: Request,
    served: Served,
    state: ServerState,
) -> tuple[list[float], int]:
    """The score of each pair, and how many tokens were read; with vectors each different text is read once."""
    if served.engine.limits.task == "classify":
        return await relevance(body, pairs, request, served, state)
    first, second = (list(dict.fromkeys(texts)) for texts in zip(*pairs, strict=True))
    document = body.max_tokens_per_doc if isinstance(body, RerankBody) else None
    if document is None:  # a text is read in the same way in both places
        second = [text for text in second if text not in set(first)]
    how = _How(document=document, documents=range(len(first), len(first) + len(second)))
    vectors, tokens = await _vectors(body, [*first, *second], how, request, served, state)
    one = dict(zip(first, vectors, strict=False))
    other = (one if document is None else {}) | dict(zip(second, vectors[len(first) :], strict=True))
    return [_cosine(one[a], other[b]) for a, b in pairs], tokens


async def _vectors(
    body: EmbeddingBody | RerankBody | ScoreBody,
    texts: Sequence[Prompt],
    how: "_How",
    request: Request,
    served: Served,
    state: ServerState,
) -> tuple[list[bytes], int]:
    """The vectors as FP32, and how many tokens were read. What can be refused is refused before work is done."""
    if (task := served.engine.limits.task) != "embed":
        does = "writes text" if task == "generate" else "scores labels"
        message = f"This model {does} and makes no vectors; name an embedding model for this route."
        raise Fault(Code.INVALID_PARAMETER, message, param="model")
    state.parser.sizes(served.engine.limits.max_model_len).check(body)
    before, most = how.prompt(served, texts), most_tokens(body, served, is_pair=False)
    with served.lease(), served.admission.reserve(1) as places:
        read = await _read(texts, before, most, how, served, request, state)
        tokens = [len(ids) for ids in read]
        found = await until_disconnect(
            request, at_once(lambda: served.engine.embed(read, how.dimensions), tokens, places, request.scope["visit"])
        )
    return found, sum(tokens)


async def _read(
    texts: Sequence[Prompt],
    before: str,
    most: int | None,
    how: _How,
    served: Served,
    request: Request,
    state: ServerState,
) -> list[list[int]]:
    """Token ids of each text, with `before` put before it; inputs that are ids stay as they are."""
    asked = [
        Asked(before + text, None, most, how.document if i in how.documents else None, before=before)
        for i, text in enumerate(texts)
        if isinstance(text, str)
    ]
    found = iter(await until_disconnect(request, state.parser.texts(served, asked)) if asked else [])
    rows = [next(found)[0] if isinstance(text, str) else text for text in texts]
    rows = [served.tokenizer.first_of(ids, most) if most else ids for ids in rows]
    for ids in rows:
        check_fit(served, len(ids))
    return rows


def _numbers(vector: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))


def _cosine(one: bytes, other: bytes) -> float:
    a, b = _numbers(one), _numbers(other)
    size = math.sqrt(_dot(a, a) * _dot(b, b))
    return max(-1.0, min(1.0, _dot(a, b) / size)) if size else 0.0


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))
