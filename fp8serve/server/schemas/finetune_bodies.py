"""The bodies that start a fine-tune job, natively spelt, and that say which weights to serve."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from fp8serve.fp8.recipe import RecipeName
from fp8serve.server.schemas.bodies import Body, Metadata

Count = Annotated[int, Field(ge=1, le=10**9)]
Rows = Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
FileId = Annotated[str, Field(max_length=64)]
RecipeValue = bool | int | Annotated[str, Field(max_length=64)] | Annotated[list[bool], Field(max_length=3)]
Suffix = Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9._-]*$")]


class FinetuneBody(Body):
    """`POST /finetune`: rows in `data`, or an uploaded `file_id`; every other field has the trainer's own default.

    `seq_len` left out is SEQ_LEN, or the model's whole context where that is shorter.
    """

    data: Rows | None = None
    file_id: FileId | None = None
    validation_data: Rows | None = None
    validation_file_id: FileId | None = None
    model: str | None = None
    suffix: Suffix = ""
    metadata: Metadata = Field(default_factory=dict)
    recipe: RecipeName = "delayed"
    recipe_options: Annotated[dict[str, RecipeValue], Field(max_length=32)] = Field(default_factory=dict)
    amax_history_len: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    epochs: Annotated[int, Field(ge=1, le=10_000)] = 1
    max_steps: Count | None = None
    batch_size: Annotated[int, Field(ge=1, le=65536)] = 8
    accumulate: Annotated[int, Field(ge=1, le=65536)] = 1
    seq_len: Annotated[int, Field(ge=2, le=1 << 20)] | None = None
    packing: Literal["rows", "tokens"] = "rows"
    learning_rate: Annotated[float, Field(ge=1e-12, le=10)] = 2e-5
    warmup_steps: Annotated[int, Field(ge=0, le=10**9)] | None = None
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.01
    clip: Annotated[float, Field(gt=0, le=1e6)] | None = 1.0
    master_weights: Literal["model", "optimizer"] = "model"
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    save_every: Count | None = None
    on_divergence: Literal["fail", "keep"] = "fail"
    keep_last: Annotated[int, Field(ge=1, le=1000)] = 2
    eval_every: Count | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.data is None) == (self.file_id is None):
            raise PydanticCustomError("one_source", "give either data (rows) or file_id")
        if self.validation_data is not None and self.validation_file_id is not None:
            raise PydanticCustomError("one_source", "give either validation_data or validation_file_id")
        return self

    def hyper_parameters(self) -> dict[str, Any]:
        """The fields of TrainConfig that a client decides."""
        renamed = {"learning_rate": "lr"}
        return {renamed.get(name, name): getattr(self, name) for name in HYPER_PARAMETERS}


HYPER_PARAMETERS = (
    "recipe",
    "recipe_options",
    "amax_history_len",
    "epochs",
    "max_steps",
    "batch_size",
    "accumulate",
    "seq_len",
    "packing",
    "learning_rate",
    "warmup_steps",
    "min_lr_ratio",
    "weight_decay",
    "clip",
    "master_weights",
    "seed",
    "save_every",
    "on_divergence",
    "keep_last",
    "eval_every",
)


class ActivateBody(Body):
    """`POST /models/{name}/activate`: a finished job's id, or "base" for the model the server was started with."""

    source: Annotated[
        str,
        Field(
            min_length=1,
            max_length=128,
            description='What to serve: the id of a fine-tune job that succeeded, or "base". GET /models lists them.',
        ),
    ]


class ActivateJobBody(Body):
    """`POST /finetune/{id}/activate`: nothing, or the step that the job's result must be of."""

    step: Annotated[int, Field(ge=1, le=10**9)] | None = None
