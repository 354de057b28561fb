"""The body of `POST /v1/fine_tuning/jobs`.

`method` must be supervised; anything else is refused, never replaced by it. `"auto"` means the default of the native
route. OpenAI's `learning_rate_multiplier` multiplies that default. Fields beyond OpenAI's make an adapter.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from fp8serve.options import options_of
from fp8serve.server.schemas.bodies import Body, Metadata, Strict
from fp8serve.server.schemas.derived import fields_of, given
from fp8serve.server.schemas.finetune_bodies import FileId, FinetuneBody, Suffix
from fp8serve.train.config import ADAPTER, TrainConfig

LEARNING_RATE = TrainConfig.lr
NOT_OF_ADAPTERS = [option.name for option in options_of(TrainConfig) if option.name not in ADAPTER]


class HyperParameters(Strict):
    n_epochs: Annotated[int, Field(ge=1, le=50)] | Literal["auto"] = "auto"
    batch_size: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = "auto"
    learning_rate_multiplier: Annotated[float, Field(ge=1e-6, le=1e5)] | Literal["auto"] = "auto"


class Supervised(Strict):
    hyperparameters: HyperParameters = HyperParameters()


class Method(Strict):
    type: Literal["supervised"]
    supervised: Supervised = Supervised()


@fields_of(TrainConfig, leave_out=NOT_OF_ADAPTERS, optional=True)
class JobBody(Body):
    """`POST /v1/fine_tuning/jobs`."""

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {"integrations": (None, [])}

    model: str
    training_file: FileId
    validation_file: FileId | None = None
    suffix: Suffix | None = None
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    method: Method | None = None
    hyperparameters: HyperParameters | None = None
    metadata: Metadata | None = None
    integrations: list[Any] | None = None

    def native(self) -> FinetuneBody:
        """The same job as the native route spells it."""
        chosen = (
            self.method.supervised.hyperparameters
            if self.method is not None
            else self.hyperparameters or HyperParameters()
        )
        named: dict[str, Any] = {
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
        return FinetuneBody(model=self.model, **files, **chosen_here, **given(self, TrainConfig, NOT_OF_ADAPTERS))
