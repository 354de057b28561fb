"""`/v1/embeddings`, and `/v1/rerank` and `/v1/score` by the cosine of two texts' vectors."""

import base64
import math
import struct
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request

from fp8serve.errors import Fp8ServeError, RequestError
from fp8serve.server.api.bounded_route import BoundedRoute
from fp8serve.server.api.dependencies import StateDep
from fp8serve.server.faults import Code, Fault
from fp8serve.server.http.streams import until_disconnect
from fp8serve.server.parsing.request_parser import Prompt
from fp8serve.server.schemas.embedding_bodies import EmbeddingBody, RerankBody, ScoreBody
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.admission import Outcome, Places
from fp8serve.server.serving.served import Served

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=BoundedRoute)

JsonObject = dict[str, Any]


@router.post("/embeddings", summary="One vector for each text", response_model=None)
async def embeddings(body: EmbeddingBody, request: Request, state: StateDep) -> JsonObject:
    """Of an embedding model; its default prompt, if it has one, is put before texts."""
    vectors, tokens = await _vectors(body, body.inputs(), body.dimensions, request, state)
    as_text = body.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": i, "embedding": base64.b64encode(v).decode() if as_text else _numbers(v)}
        for i, v in enumerate(vectors)
    ]
    return {"object": "list", "model": body.model or state.models.name, "data": data, "usage": _usage(tokens)}


@router.post("/rerank", summary="Documents by their relevance to a query", response_model=None)
async def rerank(body: RerankBody, request: Request, state: StateDep) -> JsonObject:
    """By the cosine of their vectors and the query's; documents of equal relevance in their order."""
    (query, *documents), tokens = await _vectors(body, [body.query, *body.documents], None, request, state)
    scores = [_cosine(query, document) for document in documents]
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
    results = [
        {"index": i, "relevance_score": scores[i]}
        | ({"document": {"text": body.documents[i]}} if body.return_documents else {})
        for i in best
    ]
    name = body.model or state.models.name
    return {"id": request.scope["request_id"], "model": name, "results": results, "usage": _usage(tokens)}


@router.post("/score", summary="How close pairs of texts are", response_model=None)
async def score(body: ScoreBody, request: Request, state: StateDep) -> JsonObject:
    """By the cosine of their vectors."""
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = body.prompt
    if len(first) not in (1, len(second)):
        message = f"text_1 has {len(first)} texts and text_2 {len(second)}; give one, or as many."
        raise Fault(Code.INVALID_PARAMETER, message, param="text_1")
    vectors, tokens = await _vectors(body, [*first, *second], None, request, state)
    ones, others = vectors[: len(first)], vectors[len(first) :]
    pairs = zip(ones * len(others) if len(ones) == 1 else ones, others, strict=True)
    data = [{"object": "score", "index": i, "score": _cosine(*pair)} for i, pair in enumerate(pairs)]
    named = {"id": request.scope["request_id"], "object": "list", "created": int(time.time())}
    return named | {"model": body.model or state.models.name, "data": data, "usage": _usage(tokens)}


async def _vectors(
    body: EmbeddingBody | RerankBody | ScoreBody,
    texts: Sequence[Prompt],
    dimensions: int | None,
    request: Request,
    state: ServerState,
) -> tuple[list[bytes], int]:
    """The vectors as FP32, and how many tokens were read. What can be refused is refused before work is done."""
    served = state.served(body.model)
    if served.engine.limits.generates:
        message = "This model writes text and makes no vectors; serve an embedding model for this route."
        raise Fault(Code.INVALID_PARAMETER, message, param="model")
    state.parser.sizes(served.engine.limits.max_model_len).check(body)
    before = served.engine.info.get("prompt", "")
    prompts = [before + text if isinstance(text, str) else text for text in texts]
    with served.lease(), state.admission.reserve(len(prompts)) as places:
        read = await until_disconnect(request, state.parser.prompts(served, prompts))
        found = await until_disconnect(request, _embedded(served, read, dimensions, places))
    return found, sum(map(len, read))


async def _embedded(
    served: Served, read: Sequence[Sequence[int]], dimensions: int | None, places: Places
) -> list[bytes]:
    tickets, outcome = places.take([len(ids) for ids in read]), _FAILED
    try:
        found = await served.engine.embed(read, dimensions)
        outcome = _OK
        return found
    except RequestError as error:
        raise Fault(Code.INVALID_PARAMETER, str(error)) from None
    except Fp8ServeError as error:
        raise Fault(Code.ENGINE_DOWN, f"The engine stopped while it was answering: {error}", retry_after=2) from None
    finally:
        for ticket in tickets:
            ticket.close(outcome)


_OK: Outcome = "ok"
_FAILED: Outcome = "failed"


def _numbers(vector: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))


def _cosine(one: bytes, other: bytes) -> float:
    a, b = _numbers(one), _numbers(other)
    size = math.sqrt(_dot(a, a) * _dot(b, b))
    return max(-1.0, min(1.0, _dot(a, b) / size)) if size else 0.0


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
