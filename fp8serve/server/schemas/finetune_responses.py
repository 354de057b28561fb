"""The shapes of what the routes of fine-tuning, files and activation answer, as `responses.py` has the others."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from fp8serve.server.schemas.responses import JsonObject, ResponseShape, ServedView

JobStatus = Literal["queued", "running", "paused", "succeeded", "failed", "cancelled"]


# -- fine-tuning -------------------------------------------------------------------------------------------------------


class JobView(ResponseShape):
    id: str
    status: JobStatus
    base_model: str
    fine_tuned_model: str | None
    active: bool
    created_at: int
    started_at: int | None
    finished_at: int | None
    cancel_requested: bool
    pause_requested: bool
    progress: JsonObject
    config: JsonObject
    training_file: str | None
    validation_file: str | None
    metadata: dict[str, str]
    error: JsonObject | None


class JobPage(ResponseShape):
    jobs: list[JobView]
    has_more: bool


class EventView(ResponseShape):
    id: int
    created_at: int
    level: str
    type: str
    message: str
    data: JsonObject


class EventPage(ResponseShape):
    events: list[EventView]
    has_more: bool


class CheckpointView(ResponseShape):
    step: int
    model: str
    created_at: int
    metrics: JsonObject


class Checkpoints(ResponseShape):
    checkpoints: list[CheckpointView]


class DeletedJob(ResponseShape):
    id: str
    deleted: bool


class Series(ResponseShape):
    metrics: list[JsonObject]


class DataCounts(BaseModel):
    """The trainer names further counts."""

    model_config = ConfigDict(extra="allow")

    rows: int
    tokens: int


class DryRun(ResponseShape):
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


class Available(ResponseShape):
    source: str
    model: str
    base: str


class Activating(ResponseShape):
    model: str
    seconds: float


class ModelView(ResponseShape):
    name: str
    default: bool
    state: str
    problem: str | None
    served: ServedView | None
    activating: Activating | None
    aliases: list[str]
    task: Literal["generate", "embed", "classify"] | None
    max_model_len: int | None
    in_flight: int
    memory_bytes: dict[str, int]
    adapters: list[JsonObject]


class Models(ResponseShape):
    alias: str
    state: str
    served: ServedView | None
    activating: Activating | None
    available: list[Available]
    models: list[ModelView]
    aliases: dict[str, str]
    loadable: list[str]


class Unloaded(ResponseShape):
    name: str
    state: Literal["unloaded"]


class Changed(ResponseShape):
    model: str
    served: ServedView
    previous: ServedView | None


class VerifiedView(ResponseShape):
    tokens: int
    perplexity: float
    perplexity_before: float | None


class Swapped(Changed):
    verified: VerifiedView | None


class Replaced(Swapped):
    weights_version: int


# -- OpenAI's view of the same -----------------------------------------------------------------------------------------


class FileObject(ResponseShape):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str
    expires_at: None
    status_details: None


class DeletedFile(ResponseShape):
    id: str
    object: Literal["file"]
    deleted: bool


class Page(ResponseShape):
    object: Literal["list"]
    has_more: bool
    first_id: str | None
    last_id: str | None


class FilePage(Page):
    data: list[FileObject]


class OpenAIJob(ResponseShape):
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


class OpenAIEvent(ResponseShape):
    object: Literal["fine_tuning.job.event"]
    id: str
    created_at: int
    level: str
    message: str
    type: Literal["metrics", "message"]
    data: JsonObject


class OpenAIEventPage(Page):
    data: list[OpenAIEvent]


class OpenAICheckpoint(ResponseShape):
    id: str
    object: Literal["fine_tuning.job.checkpoint"]
    created_at: int
    fine_tuned_model_checkpoint: str
    step_number: int
    fine_tuning_job_id: str
    metrics: JsonObject


class OpenAICheckpointPage(Page):
    data: list[OpenAICheckpoint]
