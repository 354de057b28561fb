"""The options of the benchmarks. This module does not import torch, so that the command line starts fast."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Len

from fp8serve.engine.options import EngineOptions, KvDtype
from fp8serve.errors import JobError
from fp8serve.fp8.recipe import HeadDtype
from fp8serve.options import AUTO, DEVICE_HELP, About, check, options_of

Prompt = Annotated[int, Ge(1), About("Tokens of each prompt.")]
New = Annotated[int, Ge(2), About("Tokens to generate for each prompt.")]
Rows = Annotated[int, Ge(1), About("Sequences of 128 tokens in a step.")]
_ENGINE = {option.name: option.default for option in options_of(EngineOptions)}


class Checked:
    """The base class of options. Creating them raises JobError if a value is invalid."""

    def __post_init__(self) -> None:
        check(self, JobError)


@dataclass(frozen=True)
class EngineLoad(Checked):
    """The options of `bench engine`."""

    recipe: Annotated[str, About("Recipe, bf16, or 'stored' for the scales of the directory.")] = _ENGINE["recipe"]
    kv_cache_dtype: Annotated[KvDtype | None, About("Element type of the KV cache.", unset="as for serve")] = None
    head_dtype: Annotated[HeadDtype, About("Element type of the head (lm_head).")] = _ENGINE["head_dtype"]
    batches: Annotated[
        tuple[Annotated[int, Ge(1)], ...], Len(1), About("Sequences that are decoded together.", flag="--batch")
    ] = (1, 4, 8, 16)
    prompt: Prompt = 256
    new: New = 64
    device: Annotated[str, Len(1), About(DEVICE_HELP)] = AUTO


DEFAULT_OUTPUT_TOKENS = 64


@dataclass(frozen=True)
class SpeculationLoad(Checked):
    """The options of `bench speculation`."""

    recipe: Annotated[str, About("Recipe, bf16, or 'stored' for the scales of the directory.")] = _ENGINE["recipe"]
    kv_cache_dtype: Annotated[KvDtype | None, About("Element type of the KV cache.", unset="as for serve")] = None
    speculative_tokens: Annotated[int, Ge(1), Le(64), About("Maximum tokens of a draft.")] = 8
    draft_model: Annotated[
        str | None, About("Model that drafts tokens, instead of prompt lookup.", unset="none", metavar="MODEL")
    ] = None
    new: New = 128
    rounds: Annotated[int, Ge(1), About("Runs of each prompt with and without drafts.")] = 5
    temperature: Annotated[float, Ge(0), Le(100), About("Sampling temperature; 0 is greedy.")] = 0.0


@dataclass(frozen=True)
class Load(Checked):
    """The options of `bench serve`: the requests and the times at which they are sent."""

    num_prompts: Annotated[int, Ge(1), About("Number of requests.")] = 32
    max_concurrency: Annotated[int | None, Ge(1), About("Maximum concurrent requests.", unset="no limit")] = None
    request_rate: Annotated[float | None, Gt(0), About("Requests per second.", unset="all at once")] = None
    burstiness: Annotated[float, Gt(0), About("1 is a Poisson process; less is burstier, more is more even.")] = 1.0
    dataset: Annotated[
        Literal["random", "sharegpt", "jsonl"], About("Random token ids, ShareGPT's JSON, or JSON lines with prompt.")
    ] = "random"
    dataset_path: Annotated[str | None, About("File of the data set.", unset="none", metavar="FILE")] = None
    input_len: Annotated[int, Ge(1), About("Tokens of each random prompt.")] = 256
    output_len: Annotated[
        int | None, Ge(1), About("Maximum tokens to generate.", unset=f"the data set's, or {DEFAULT_OUTPUT_TOKENS}")
    ] = None
    ignore_eos: Annotated[bool | None, About("Continue after the end-of-text token.", unset="for random prompts")] = (
        None
    )
    api: Annotated[Literal["completions", "chat"], About("Route of the requests.")] = "completions"
    seed: Annotated[int, Ge(0), About("Seed of the prompts, their order, and their sending times.")] = 0
    vocab: int = 1000  # random prompts use ids below this


@dataclass(frozen=True)
class Shape(Checked):
    """The sizes of a Llama model with tied embeddings. The default has 10.2 million parameters."""

    hidden_size: Annotated[int, Ge(64), About("Width of the model.")] = 384
    layers: Annotated[int, Ge(1), About("Layers of the model.")] = 6
    heads: int = 6
    kv_heads: int = 2
    intermediate_size: int = 1024
    vocab_size: int = 2048

    @classmethod
    def of(cls, hidden_size: int, layers: int) -> "Shape":
        """Returns the sizes of a model with this hidden size. Heads have 64 elements, and the intermediate size is 8/3
        of the hidden size, rounded up to a multiple of 128."""
        if hidden_size % 64:
            raise JobError(f"hidden_size must be a multiple of 64, found {hidden_size}.")
        heads = hidden_size // 64
        intermediate_size = 128 * math.ceil(hidden_size * 8 / (3 * 128))
        return cls(hidden_size, layers, heads, 2 if heads % 2 == 0 else 1, intermediate_size)


@dataclass(frozen=True)
class StepOptions(Checked):
    """The options of `bench step`."""

    recipes: Annotated[tuple[str, ...], Len(1), About("Recipe to measure.", flag="--recipe")] = ("delayed",)
    rows: Rows = 4
    rounds: Annotated[int, Ge(1), About("Steps with each recipe.")] = 10


@dataclass(frozen=True)
class MonitorOptions(Checked):
    """The options of `bench monitor`."""

    rows: Rows = 4
    every: Annotated[int, Ge(1), About("Steps between two counts of FP8 values by the monitor.")] = 16
    rounds: Annotated[int, Ge(1), About("Rounds of that many steps with the monitor, and without.")] = 10
