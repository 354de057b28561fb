"""The bodies that load a model, unload it, and give it another name."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from fp8serve.server.schemas.bodies import Body

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
