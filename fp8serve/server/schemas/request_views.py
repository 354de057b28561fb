"""What `GET /requests` shows of the requests under way."""

from typing import Literal

from fp8serve.server.schemas.responses import ResponseShape

RequestState = Literal["queued", "prefill", "decode"]


class RequestView(ResponseShape):
    """One HTTP request that the engine computes, with all its answers, but without their texts.

    `id`: made here, for these routes. `request_id`: that of the log and the answer's header, which a client may choose.
    `model`: the name that answers. `age`: seconds since it was admitted. `state`: decode from its first token on.
    """

    id: str
    request_id: str
    tenant: str
    model: str
    age: float
    state: RequestState
    answers: int
    prompt_tokens: int
    generated_tokens: int
    max_new_tokens: int


class RequestList(ResponseShape):
    """The oldest `requests`, and how many there are in all."""

    requests: list[RequestView]
    total: int
