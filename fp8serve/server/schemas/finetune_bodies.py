"""The bodies that start fine-tune jobs, natively and in OpenAI's format, and the bodies that load and activate weights.

OpenAI's `method` may be supervised or dpo; other methods are refused. `"auto"` stands for the default of the native
route, and `learning_rate_multiplier` multiplies the default learning rate. Further fields, which OpenAI's API lacks,
configure an adapter or the loss of dpo.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from fp8serve.options import options_of
from fp8serve.server.schemas.bodies import Body, Metadata, Strict, explicit_options, fields_of
from fp8serve.server.schemas.compatibility_fields import refused, with_compatibility_fields
from fp8serve.train.config import API_NAMES, NOT_IN_API, TrainConfig
from fp8serve.train.methods.options import ADAPTER_OPTIONS, METHOD_OPTIONS, RowLength

Rows = Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
FileId = Annotated[str, Field(max_length=64)]
RecipeValue = bool | int | Annotated[str, Field(max_length=64)] | Annotated[list[bool], Field(max_length=3)]
Suffix = Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9._-]*$")]


@fields_of(TrainConfig, exclude=NOT_IN_API, renamed=API_NAMES)
class FinetuneBody(Body):
    """The body of `POST /finetune` with rows in `data` or with an uploaded `file_id`. The other fields have the
    trainer's defaults. The default of `seq_len` is limited by the model's context."""

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
        Field(min_length=1, max_length=2048, description="URL of the grader for grpo; the server must allow it."),
    ] = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.data is None) == (self.file_id is None):
            raise PydanticCustomError("one_source", "give either data (rows) or file_id")
        if self.validation_data is not None and self.validation_file_id is not None:
            raise PydanticCustomError("one_source", "give either validation_data or validation_file_id")
        return self

    def hyper_parameters(self) -> dict[str, Any]:
        """Returns the fields of TrainConfig that clients may set."""
        names = (o.name for o in options_of(TrainConfig) if o.name not in NOT_IN_API)
        return {name: getattr(self, API_NAMES.get(name, name)) for name in names}


DEFAULT_MAX_PERPLEXITY_RATIO = 2.0
MaxPerplexityRatio = Annotated[
    float,
    Field(
        ge=1,
        le=1e9,
        description="Largest ratio of the new weights' perplexity to the served weights', on rows of the job.",
    ),
]


class ActivateBody(Body):
    """The body of `POST /models/{name}/activate`. `source` is the id of a finished job, the name of a checkpoint, or
    "base" for the weights with which the server was started."""

    source: Annotated[
        str,
        Field(
            min_length=1,
            max_length=128,
            description=(
                'The weights to serve: the id of a fine-tune job that succeeded, a checkpoint, or "base". '
                "GET /models and GET /finetune/{id}/checkpoints list them."
            ),
        ),
    ]
    max_perplexity_ratio: MaxPerplexityRatio = DEFAULT_MAX_PERPLEXITY_RATIO


class ActivateJobBody(Body):
    """The body of `POST /finetune/{id}/activate`. If `step` is set, the checkpoint of this step is served instead of
    the result."""

    step: Annotated[int, Field(ge=1, lt=10**9)] | None = None
    max_perplexity_ratio: MaxPerplexityRatio = DEFAULT_MAX_PERPLEXITY_RATIO


class SaveScalesBody(Body):
    """The body of `POST /scales/save`. `name` is the name of the new directory beside the model. The default is the
    model's name with the date and time."""

    name: Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None


LEARNING_RATE = TrainConfig.lr
ADDITIONAL_OPTIONS = {*ADAPTER_OPTIONS, *METHOD_OPTIONS["dpo"]} - {"beta"}
EXCLUDED_OPTIONS = [option.name for option in options_of(TrainConfig) if option.name not in ADDITIONAL_OPTIONS]


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
    def _settings_match_type(self) -> Self:
        other = "dpo" if self.type == "supervised" else "supervised"
        if getattr(self, other) is not None:
            raise PydanticCustomError("method", f"has settings of {other} beside the type {self.type}; leave them out")
        return self

    @property
    def hyperparameters(self) -> HyperParameters:
        """The hyperparameters of this method."""
        if self.type == "dpo":
            return (self.dpo or Dpo()).hyperparameters
        return (self.supervised or Supervised()).hyperparameters


@with_compatibility_fields([refused("OpenAI", "integrations", "Start the server with --report-to.", [])])
@fields_of(TrainConfig, exclude=EXCLUDED_OPTIONS, optional=True)
class JobBody(Body):
    """The body of `POST /v1/fine_tuning/jobs`."""

    model: str
    training_file: FileId
    validation_file: FileId | None = None
    suffix: Suffix | None = None
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    method: Method | None = None
    hyperparameters: HyperParameters | None = None
    metadata: Metadata | None = None

    def to_native(self) -> FinetuneBody:
        """Returns the body of the native route for the same job."""
        method = self.method or Method(type="supervised")
        hyper = method.hyperparameters if self.method is not None else self.hyperparameters or HyperParameters()
        fields: dict[str, Any] = {
            "method": {"supervised": "sft", "dpo": "dpo"}[method.type],
            "beta": getattr(hyper, "beta", None),
            "epochs": hyper.n_epochs,
            "batch_size": hyper.batch_size,
            "seed": self.seed,
            "suffix": self.suffix,
            "metadata": self.metadata,
        }
        if hyper.learning_rate_multiplier != "auto":
            fields["learning_rate"] = LEARNING_RATE * hyper.learning_rate_multiplier
        fields = {k: v for k, v in fields.items() if v is not None and v != "auto"}
        fields |= {"file_id": self.training_file, "validation_file_id": self.validation_file}
        return FinetuneBody(model=self.model, **fields, **explicit_options(self, TrainConfig, EXCLUDED_OPTIONS))


Name = Annotated[str, Field(min_length=1, max_length=256)]


class LoadBody(Body):
    """The body of `POST /models/{name}/load`. `source` may be omitted for a model that was loaded before."""

    source: Annotated[
        Name | None,
        Field(
            description="The id of a fine-tune job that succeeded, the name of its result, or a directory of "
            "--models-dir. GET /models lists them."
        ),
    ] = None
    options: Annotated[
        dict[Annotated[str, Field(max_length=64)], Any],
        Field(max_length=32, description="Fields of EngineOptions, tool_parser and reasoning_parser."),
    ] = Field(default_factory=dict)


class UnloadBody(Body):
    """The body of `POST /models/{name}/unload`. `seconds` is the time for active requests to complete. The default is
    the server's `drain_seconds`."""

    seconds: Annotated[float, Field(ge=0, le=86_400)] | None = None


class WeightsBody(Body):
    """The body of `POST /weights`. The weights are another version of a served model."""

    path: Annotated[Name, Field(description="The name of a directory of --models-dir that holds a model.")]
    model: Annotated[
        Name | None, Field(description="The model whose weights are replaced; the default model if omitted.")
    ] = None
    seconds: Annotated[
        float | None,
        Field(ge=0, le=86_400, description="Time for active requests to complete; default: `drain_seconds`."),
    ] = None
    texts: Annotated[
        list[Annotated[str, Field(min_length=1)]] | None,
        Field(min_length=1, max_length=64, description="Texts on which both perplexities are measured."),
    ] = None
    max_perplexity_ratio: Annotated[
        float | None,
        Field(ge=1, le=1e9, description="Largest ratio of the new perplexity to the old; default 2. Needs `texts`."),
    ] = None

    @model_validator(mode="after")
    def _ratio_needs_texts(self) -> Self:
        if self.max_perplexity_ratio is not None and self.texts is None:
            raise PydanticCustomError("no_texts", "max_perplexity_ratio needs texts")
        return self


class LoadAdapterBody(Body):
    """The body of `POST /v1/load_lora_adapter`, vLLM's route."""

    lora_name: Annotated[Name, Field(description="The adapter's name in requests.")]
    lora_path: Annotated[
        Annotated[str, Field(min_length=1, max_length=4096)],
        Field(
            description="The id of a fine-tune job that trained an adapter, the name of its result, or a directory of "
            "--models-dir that holds an adapter: its name or its path."
        ),
    ]
    base_model_name: Annotated[
        Name | None, Field(description="The model of the adapter; the default model if omitted.")
    ] = None


class UnloadAdapterBody(Body):
    """The body of `POST /v1/unload_lora_adapter`, vLLM's route."""

    lora_name: Name


class AliasBody(Body):
    """The body of `POST /models/{name}/alias`. `remove` deletes the alias instead of adding it."""

    alias: Name
    remove: bool = False
