"""`/classify`, and the scores of pairs by a cross-encoder for `/v1/rerank` and `/v1/score`."""

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request

from fp8serve.server.api.bounded_route import BoundedRoute
from fp8serve.server.api.dependencies import StateDep
from fp8serve.server.api.openai.encoding import at_once, most_tokens, usage
from fp8serve.server.faults import Code, Fault
from fp8serve.server.http.streams import until_disconnect
from fp8serve.server.parsing.texts import Asked
from fp8serve.server.schemas.embedding_bodies import ClassifyBody, RerankBody, ScoreBody
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.served import Served

router = APIRouter(tags=["OpenAI"], route_class=BoundedRoute)


@router.post("/classify", summary="The likeliest label of each text", response_model=None)
async def classify(body: ClassifyBody, request: Request, state: StateDep) -> dict[str, Any]:
    """By a classifier, with the score of every label. This is vLLM's route."""
    served = state.served(body.model, "classify")
    labels = _labels(served)
    most = most_tokens(body, served, is_pair=False)
    rows, tokens = await _scores(body, [Asked(text, None, most) for text in body.texts], served, request, state)
    data = [
        {"index": i, "label": labels[max(range(len(row)), key=row.__getitem__)], "probs": row, "num_classes": len(row)}
        for i, row in enumerate(rows)
    ]
    named = {"id": request.scope["request_id"], "object": "list", "created": int(time.time())}
    return named | {"model": body.model or served.source.model_id, "data": data, "usage": usage(tokens)}


async def relevance(
    body: RerankBody | ScoreBody,
    pairs: Sequence[tuple[str, str]],
    request: Request,
    served: Served,
    state: ServerState,
) -> tuple[list[float], int]:
    """One score for each pair, and how many tokens were read. Fault: the model has more than one label."""
    if (labels := len(_labels(served))) != 1:
        message = f"This model scores {labels} labels and no relevance; ask /classify for them."
        raise Fault(Code.INVALID_PARAMETER, message, param="model")
    most, around = most_tokens(body, served, is_pair=True), served.engine.info.get("pair")
    document = body.max_tokens_per_doc if isinstance(body, RerankBody) else None
    asked = [Asked(one, two, most, document, around) for one, two in pairs]
    rows, tokens = await _scores(body, asked, served, request, state)
    return [row[0] for row in rows], tokens


def _labels(served: Served) -> list[str]:
    """The model's labels. Fault: it has none."""
    if served.engine.limits.task != "classify":
        message = "This model has no labels; name a classifier or a cross-encoder for this route."
        raise Fault(Code.INVALID_PARAMETER, message, param="model")
    labels: list[str] = served.engine.info["labels"]
    return labels


async def _scores(
    body: ClassifyBody | RerankBody | ScoreBody,
    asked: Sequence[Asked],
    served: Served,
    request: Request,
    state: ServerState,
) -> tuple[list[list[float]], int]:
    """The score of every label for each text, or pair of texts, and how many tokens were read."""
    state.parser.sizes(served.engine.limits.max_model_len).check(body)
    with served.lease(), served.admission.reserve(1) as places:
        read = await until_disconnect(request, state.parser.texts(served, asked))
        ids, segments = [r[0] for r in read], [r[1] for r in read]
        tokens = [len(i) for i in ids]
        found = await until_disconnect(
            request, at_once(lambda: served.engine.classify(ids, segments), tokens, places, request.scope["visit"])
        )
    return found, sum(tokens)
