"""The shapes of this server's answers, for its OpenAPI description and for tests that compare live answers with it.

Handlers build plain dictionaries; nothing here runs while a request is answered. Objects are closed: an answer with a
field that its class lacks fails a test.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

JsonObject = dict[str, Any]


class ResponseShape(BaseModel):
    """The base of all shapes."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


# -- failures ----------------------------------------------------------------------------------------------------------


class NativeError(ResponseShape):
    error: str
    error_type: str
    code: str
    param: str = ""
    hint: str = ""
    request_id: str = ""


class OpenAIErrorBody(ResponseShape):
    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(ResponseShape):
    error: OpenAIErrorBody


class AnthropicErrorBody(ResponseShape):
    type: str
    message: str


class AnthropicError(ResponseShape):
    type: Literal["error"]
    error: AnthropicErrorBody
    request_id: str


# -- the server --------------------------------------------------------------------------------------------------------


class Health(ResponseShape):
    ok: bool
    state: str


class Version(ResponseShape):
    version: str


class ServedView(ResponseShape):
    source: str
    model: str
    weight_version: str


class Info(ResponseShape):
    model_id: str
    model_sha: str
    model_pipeline_tag: str
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    max_client_batch_size: int
    router: str
    version: str
    sha: None
    docker_label: None
    served: ServedView
    adapters: list[JsonObject]
    engine: JsonObject
    options: JsonObject
    train_on: Literal["refuse", "share", "pause"]
    training_device: str
    training_refused: str | None
    limits: dict[str, float]


class LayerScale(ResponseShape):
    """The input of one FP8 layer; numbers are null if its scale follows every input (docs/numerics.md)."""

    name: str
    input: str
    amax: float | None
    scale: float | None
    headroom: float | None
    saturated: int | None
    saturation: float | None
    calibrated_amax: float | None
    window_amax: float | None
    window_saturation: float | None
    drift: float | None
    drifts: bool


class Scales(ResponseShape):
    weight_version: str
    layers: list[LayerScale]


class ScaleEntry(ResponseShape):
    """`at`: Unix time of its last sample. `window_amax`: of the last window, null until one has ended."""

    at: float
    amax: float | None
    window_amax: float | None
    scale: float | None


class ScaleHistory(ResponseShape):
    """Oldest first; empty until the engine was first asked."""

    weight_version: str
    layer: str
    entries: list[ScaleEntry]


class SavedScales(ResponseShape):
    """`name`: of the directory, beside the model. `scales`: how many follow the traffic."""

    name: str
    scales: int


# -- generation --------------------------------------------------------------------------------------------------------


class Token(ResponseShape):
    id: int
    text: str
    logprob: float | None
    special: bool


class Details(ResponseShape):
    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    generated_tokens: int
    seed: int | None
    input_length: int
    prefill: list[Token]
    tokens: list[Token]
    best_of_sequences: None
    top_tokens: list[list[Token]] = []


class Generated(ResponseShape):
    generated_text: str
    details: Details | None = None
    model: str
    weight_version: str
    request_id: str


class Tokenized(ResponseShape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(ResponseShape):
    prompt: str


class TextLogprobs(ResponseShape):
    tokens: list[str]
    token_logprobs: list[float | None]  # null for the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(ResponseShape):
    logprob: float
    rank: int | None  # null if it is not among the requested alternatives
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id, for each place of a prompt; null for the first. Present when the request asks for it."""


class TextChoice(ResponseShape):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | None = None


class CachedTokens(ResponseShape):
    cached_tokens: int


class Usage(ResponseShape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Completion(ResponseShape):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    system_fingerprint: str
    usage: Usage


class TopLogprob(ResponseShape):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseShape):
    content: list[ChatLogprob]
    refusal: None


class CalledFunction(ResponseShape):
    name: str
    arguments: str


class ToolCall(ResponseShape):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(ResponseShape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(ResponseShape):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(ResponseShape):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


class Vector(ResponseShape):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # base64 of FP32, little-endian, if requested


class TextUsage(ResponseShape):
    prompt_tokens: int
    total_tokens: int


class Vectors(ResponseShape):
    object: Literal["list"]
    model: str
    data: list[Vector]
    usage: TextUsage


class RankedDocument(ResponseShape):
    text: str


class Ranked(ResponseShape):
    index: int
    relevance_score: float
    document: RankedDocument | None = None


class Ranking(ResponseShape):
    id: str
    model: str
    results: list[Ranked]
    usage: TextUsage


class Score(ResponseShape):
    object: Literal["score"]
    index: int
    score: float


class Scores(ResponseShape):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: TextUsage


class Classification(ResponseShape):
    index: int
    label: str  # the likeliest
    probs: list[float]  # of every label, in their order
    num_classes: int


class Classifications(ResponseShape):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: TextUsage


class Model(ResponseShape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Literal["model"]
    display_name: str
    created_at: str  # `created` as RFC 3339
    root: str
    parent: str | None
    state: str
    max_model_len: int | None
    task: Literal["generate", "embed", "classify"] | None  # None while nothing is loaded


class ModelList(ResponseShape):
    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None
