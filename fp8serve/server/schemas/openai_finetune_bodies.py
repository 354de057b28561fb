"""The body of `POST /v1/fine_tuning/jobs`.

`method` is supervised or dpo; anything else is refused, never replaced by one of them. `"auto"` means the default of
the native route. OpenAI's `learning_rate_multiplier` multiplies that default. Fields beyond OpenAI's make an adapter,
or choose among the losses of dpo.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from fp8serve.options import options_of
from fp8serve.server.schemas.bodies import Body, Metadata, Strict
from fp8serve.server.schemas.derived import fields_of, given
from fp8serve.server.schemas.finetune_bodies import FileId, FinetuneBody, Suffix
from fp8serve.server.schemas.foreign_fields import refused, with_foreign_fields
from fp8serve.train.config import TrainConfig
from fp8serve.train.methods.options import ADAPTER, OPTIONS

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
