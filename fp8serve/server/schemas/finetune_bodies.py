"""The bodies that start a fine-tune job, natively spelt, and that say which weights to serve."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from fp8serve.options import options_of
from fp8serve.server.schemas.bodies import Body, Metadata
from fp8serve.server.schemas.derived import fields_of
from fp8serve.server.schemas.wire_names import NOT_ON_THE_WIRE, WIRE_NAMES
from fp8serve.train.config import TrainConfig
from fp8serve.train.run_options import RowLength

Rows = Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
FileId = Annotated[str, Field(max_length=64)]
RecipeValue = bool | int | Annotated[str, Field(max_length=64)] | Annotated[list[bool], Field(max_length=3)]
Suffix = Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9._-]*$")]


@fields_of(TrainConfig, leave_out=NOT_ON_THE_WIRE, renamed=WIRE_NAMES)
class FinetuneBody(Body):
    """`POST /finetune`: rows in `data`, or an uploaded `file_id`; every other field has the trainer's own default.

    `seq_len` left out is the trainer's default, or the model's whole context where that is shorter.
    """

    data: Rows | None = None
    file_id: FileId | None = None
    validation_data: Rows | None = None
    validation_file_id: FileId | None = None
    model: str | None = None
    suffix: Suffix = ""
    metadata: Metadata = Field(default_factory=dict)
    recipe_options: Annotated[dict[str, RecipeValue], Field(max_length=32)] = Field(default_factory=dict)
    seq_len: RowLength | None = None
    grader_url: Annotated[
        str | None,
        Field(min_length=1, max_length=2048, description="Gives the rewards (grpo): one that the server may ask."),
    ] = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.data is None) == (self.file_id is None):
            raise PydanticCustomError("one_source", "give either data (rows) or file_id")
        if self.validation_data is not None and self.validation_file_id is not None:
            raise PydanticCustomError("one_source", "give either validation_data or validation_file_id")
        return self

    def hyper_parameters(self) -> dict[str, Any]:
        """The fields of TrainConfig that a client decides."""
        names = (o.name for o in options_of(TrainConfig) if o.name not in NOT_ON_THE_WIRE)
        return {name: getattr(self, WIRE_NAMES.get(name, name)) for name in names}


USUAL_MAX_RATIO = 2.0
MaxRatio = Annotated[
    float,
    Field(
        ge=1,
        le=1e9,
        description="How many times the perplexity of what serves that of the new weights may be, on rows of the job.",
    ),
]


class ActivateBody(Body):
    """`POST /models/{name}/activate`: a finished job's id, a checkpoint's name, or "base" for the model the server was
    started with.
    """

    source: Annotated[
        str,
        Field(
            min_length=1,
            max_length=128,
            description=(
                'What to serve: the id of a fine-tune job that succeeded, a checkpoint of a job, or "base". '
                "GET /models and GET /finetune/{id}/checkpoints list them."
            ),
        ),
    ]
    max_perplexity_ratio: MaxRatio = USUAL_MAX_RATIO


class ActivateJobBody(Body):
    """`POST /finetune/{id}/activate`: nothing, or the step of the checkpoint to serve instead of the result."""

    step: Annotated[int, Field(ge=1, lt=10**9)] | None = None
    max_perplexity_ratio: MaxRatio = USUAL_MAX_RATIO


class SaveScalesBody(Body):
    """`POST /scales/save`: the directory's name, beside the model; without one, the model's with the date and time."""

    name: Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
