"""The bodies that start a fine-tune job, natively and as OpenAI spells it, and that say which weights to serve.

OpenAI's `method` is supervised or dpo; anything else is refused, never replaced by one of them. `"auto"` means the
default of the native route. OpenAI's `learning_rate_multiplier` multiplies that default. Fields beyond OpenAI's make an
adapter, or choose among the losses of dpo.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from fp8serve.options import options_of
from fp8serve.server.schemas.bodies import Body, Metadata, Strict, fields_of, given
from fp8serve.server.schemas.foreign_fields import refused, with_foreign_fields
from fp8serve.train.config import NOT_ON_THE_WIRE, WIRE_NAMES, TrainConfig
from fp8serve.train.methods.options import ADAPTER, OPTIONS
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


LEARNING_RATE = TrainConfig.lr
BEYOND_OPENAI = {*ADAPTER, *OPTIONS["dpo"]} - {"beta"}
ELSEWHERE = [option.name for option in options_of(TrainConfig) if option.name not in BEYOND_OPENAI]


class HyperParameters(Strict):
    n_epochs: Annotated[int, Field(ge=1, le=50)] | Literal["auto"] = "auto"
    batch_size: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = "auto"
    learning_rate_multiplier: Annotated[float, Field(ge=1e-6, le=1e5)] | Literal["auto"] = "auto"


class Supervised(Strict):
    hyperparameters: HyperParameters = HyperParameters()


class DpoHyperParameters(HyperParameters):
    beta: Annotated[float, Field(gt=0, le=1000)] | Literal["auto"] = "auto"


class Dpo(Strict):
    hyperparameters: DpoHyperParameters = DpoHyperParameters()


class Method(Strict):
    type: Literal["supervised", "dpo"]
    supervised: Supervised | None = None
    dpo: Dpo | None = None

    @model_validator(mode="after")
    def _own_settings(self) -> Self:
        other = "dpo" if self.type == "supervised" else "supervised"
        if getattr(self, other) is not None:
            raise PydanticCustomError("method", f"has settings of {other} beside the type {self.type}; leave them out")
        return self

    @property
    def chosen(self) -> HyperParameters:
        """The settings given for the method of this type."""
        if self.type == "dpo":
            return (self.dpo or Dpo()).hyperparameters
        return (self.supervised or Supervised()).hyperparameters


@with_foreign_fields([refused("OpenAI", "integrations", "Start the server with --report-to.", [])])
@fields_of(TrainConfig, leave_out=ELSEWHERE, optional=True)
class JobBody(Body):
    """`POST /v1/fine_tuning/jobs`."""

    model: str
    training_file: FileId
    validation_file: FileId | None = None
    suffix: Suffix | None = None
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    method: Method | None = None
    hyperparameters: HyperParameters | None = None
    metadata: Metadata | None = None

    def native(self) -> FinetuneBody:
        """The same job as the native route spells it."""
        method = self.method or Method(type="supervised")
        chosen = method.chosen if self.method is not None else self.hyperparameters or HyperParameters()
        named: dict[str, Any] = {
            "method": {"supervised": "sft", "dpo": "dpo"}[method.type],
            "beta": getattr(chosen, "beta", None),
            "epochs": chosen.n_epochs,
            "batch_size": chosen.batch_size,
            "seed": self.seed,
            "suffix": self.suffix,
            "metadata": self.metadata,
        }
        if chosen.learning_rate_multiplier != "auto":
            named["learning_rate"] = LEARNING_RATE * chosen.learning_rate_multiplier
        chosen_here = {k: v for k, v in named.items() if v is not None and v != "auto"}
        files: dict[str, Any] = {"file_id": self.training_file, "validation_file_id": self.validation_file}
        return FinetuneBody(model=self.model, **files, **chosen_here, **given(self, TrainConfig, ELSEWHERE))


Name = Annotated[str, Field(min_length=1, max_length=256)]


class LoadBody(Body):
    """`POST /models/{name}/load`: nothing, for a name that was served before, or what the name is to stand for."""

    source: Annotated[
        Name | None,
        Field(
            description="The id of a fine-tune job that succeeded, or of its result, or a directory of --models-dir. "
            "GET /models lists them."
        ),
    ] = None
    options: Annotated[
        dict[Annotated[str, Field(max_length=64)], Any],
        Field(max_length=32, description="Fields of EngineOptions, tool_parser and reasoning_parser."),
    ] = Field(default_factory=dict)


class UnloadBody(Body):
    """`POST /models/{name}/unload`: how long answers under way may take; the server's `drain_seconds` if left out."""

    seconds: Annotated[float, Field(ge=0, le=86_400)] | None = None


class WeightsBody(Body):
    """`POST /weights`: a directory with another version of a model that is served."""

    path: Annotated[Name, Field(description="A directory of --models-dir that holds a model, by its name there.")]
    model: Annotated[Name | None, Field(description="Whose weights they are; the default's if left out.")] = None
    seconds: Annotated[
        float | None,
        Field(ge=0, le=86_400, description="For requests under way; the server's `drain_seconds` if left out."),
    ] = None
    texts: Annotated[
        list[Annotated[str, Field(min_length=1)]] | None,
        Field(min_length=1, max_length=64, description="On which the perplexity is measured, before and after."),
    ] = None
    max_perplexity_ratio: Annotated[
        float | None,
        Field(ge=1, le=1e9, description="How many times that of before it may be; 2 if left out. Needs `texts`."),
    ] = None

    @model_validator(mode="after")
    def _ratio_of_texts(self) -> Self:
        if self.max_perplexity_ratio is not None and self.texts is None:
            raise PydanticCustomError("no_texts", "max_perplexity_ratio is measured on texts; give texts, too")
        return self


class LoadAdapterBody(Body):
    """`POST /v1/load_lora_adapter`, as vLLM has it."""

    lora_name: Annotated[Name, Field(description="By which requests ask for it.")]
    lora_path: Annotated[
        Annotated[str, Field(min_length=1, max_length=4096)],
        Field(
            description="The id of a fine-tune job that trained an adapter, or of its result, or a directory of "
            "--models-dir that holds one, by its name there or as a whole."
        ),
    ]
    base_model_name: Annotated[
        Name | None, Field(description="The model beside which it is served; the default if left out.")
    ] = None


class UnloadAdapterBody(Body):
    """`POST /v1/unload_lora_adapter`, as vLLM has it."""

    lora_name: Name


class AliasBody(Body):
    """`POST /models/{name}/alias`: the other name, and whether it is to be taken away."""

    alias: Name
    remove: bool = False
