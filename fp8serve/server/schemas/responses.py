"""The shapes of what this server answers, for its OpenAPI description and for the tests that hold live answers to it.

Handlers build plain dictionaries; nothing here runs while a request is answered. Objects are closed: a field that an
answer has and its class lacks fails a test.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

JsonObject = dict[str, Any]
JobStatus = Literal["queued", "running", "succeeded", "failed", "cancelled"]


class Answer(BaseModel):
    """The base of all shapes."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


# -- failures ----------------------------------------------------------------------------------------------------------


class NativeError(Answer):
    error: str
    error_type: str
    code: str
    param: str = ""
    hint: str = ""
    request_id: str = ""


class OpenAIErrorBody(Answer):
    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(Answer):
    error: OpenAIErrorBody


# -- the server --------------------------------------------------------------------------------------------------------


class Health(Answer):
    ok: bool
    state: str


class Version(Answer):
    version: str


class ServedView(Answer):
    source: str
    model: str
    weight_version: str


class Info(Answer):
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
    engine: JsonObject
    train_on: Literal["refuse", "share", "pause"]
    training_device: str
    limits: dict[str, float]


class LayerScale(BaseModel):
    """Further fields count what happened to values; the engine names them."""

    model_config = ConfigDict(extra="allow")

    name: str


class Scales(Answer):
    weight_version: str
    layers: list[LayerScale]


# -- generation --------------------------------------------------------------------------------------------------------


class Token(Answer):
    id: int
    text: str
    logprob: float | None
    special: bool


class Details(Answer):
    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    generated_tokens: int
    seed: int | None
    input_length: int
    prefill: list[Token]
    tokens: list[Token]
    best_of_sequences: None
    top_tokens: list[list[Token]] = []


class Generated(Answer):
    generated_text: str
    details: Details | None = None
    model: str
    weight_version: str
    request_id: str


class Tokenized(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answer):
    prompt: str


class TextLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Answer):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    system_fingerprint: str
    usage: Usage


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[ChatLogprob]
    refusal: None


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Answer):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str
    usage: Usage


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None


class ModelList(Answer):
    object: Literal["list"]
    data: list[Model]


# -- fine-tuning -------------------------------------------------------------------------------------------------------


class JobView(Answer):
    id: str
    status: JobStatus
    base_model: str
    fine_tuned_model: str | None
    active: bool
    created_at: int
    started_at: int | None
    finished_at: int | None
    cancel_requested: bool
    progress: JsonObject
    config: JsonObject
    training_file: str | None
    validation_file: str | None
    metadata: dict[str, str]
    error: JsonObject | None


class JobPage(Answer):
    jobs: list[JobView]
    has_more: bool


class EventView(Answer):
    id: int
    created_at: int
    level: str
    type: str
    message: str
    data: JsonObject


class EventPage(Answer):
    events: list[EventView]
    has_more: bool


class CheckpointView(Answer):
    step: int
    created_at: int
    metrics: JsonObject


class Checkpoints(Answer):
    checkpoints: list[CheckpointView]


class Series(Answer):
    metrics: list[JsonObject]


class DataCounts(BaseModel):
    """The trainer names further counts."""

    model_config = ConfigDict(extra="allow")

    rows: int
    tokens: int


class DryRun(Answer):
    ok: bool
    bad_lines: list[JsonObject]
    bad_line_count: int
    data: DataCounts
    trainable_fraction: float
    steps: int
    steps_per_epoch: int
    longest_row: int
    microbatch_tokens: int
    memory_bytes: dict[str, int]
    sample: list[tuple[str, bool]]


class Available(Answer):
    source: str
    model: str


class Activating(Answer):
    model: str
    seconds: float


class Models(Answer):
    alias: str
    state: str
    served: ServedView | None
    activating: Activating | None
    available: list[Available]


class Swapped(Answer):
    model: str
    served: ServedView
    previous: ServedView | None


# -- OpenAI's view of the same -----------------------------------------------------------------------------------------


class FileObject(Answer):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str
    expires_at: None
    status_details: None


class DeletedFile(Answer):
    id: str
    object: Literal["file"]
    deleted: bool


class Page(Answer):
    object: Literal["list"]
    has_more: bool
    first_id: str | None
    last_id: str | None


class FilePage(Page):
    data: list[FileObject]


class OpenAIJob(Answer):
    id: str
    object: Literal["fine_tuning.job"]
    model: str
    fine_tuned_model: str | None
    organization_id: str
    status: JobStatus
    training_file: str
    validation_file: str | None
    result_files: list[str]
    trained_tokens: int | None
    error: JsonObject | None
    seed: int
    hyperparameters: JsonObject
    method: JsonObject
    integrations: list[JsonObject]
    metadata: dict[str, str] | None
    created_at: int
    finished_at: int | None
    estimated_finish: int | None


class OpenAIJobPage(Page):
    data: list[OpenAIJob]


class OpenAIEvent(Answer):
    object: Literal["fine_tuning.job.event"]
    id: str
    created_at: int
    level: str
    message: str
    type: Literal["metrics", "message"]
    data: JsonObject


class OpenAIEventPage(Page):
    data: list[OpenAIEvent]


class OpenAICheckpoint(Answer):
    id: str
    object: Literal["fine_tuning.job.checkpoint"]
    created_at: int
    fine_tuned_model_checkpoint: str
    step_number: int
    fine_tuning_job_id: str
    metrics: JsonObject


class OpenAICheckpointPage(Page):
    data: list[OpenAICheckpoint]
