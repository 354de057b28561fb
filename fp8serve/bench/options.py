"""The options of the studies; imported without torch, so that the command line can show them."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Len

from fp8serve.engine.options import EngineOptions, KvDtype
from fp8serve.errors import JobError
from fp8serve.fp8.recipe import HeadDtype
from fp8serve.options import About, check, options_of

Prompt = Annotated[int, Ge(1), About("Tokens of each prompt.")]
New = Annotated[int, Ge(2), About("Tokens of each answer.")]
Rows = Annotated[int, Ge(1), About("Sequences of 128 tokens in a step.")]
_ENGINE = {option.name: option.default for option in options_of(EngineOptions)}


class Checked:
    """Raises JobError for a value that cannot be used."""

    def __post_init__(self) -> None:
        check(self, JobError)


@dataclass(frozen=True)
class EngineLoad(Checked):
    recipe: Annotated[str, About("Recipe, bf16, or 'stored': what the directory stores.")] = _ENGINE["recipe"]
    kv_cache_dtype: Annotated[KvDtype, About("Element type of the KV cache.")] = _ENGINE["kv_cache_dtype"]
    head_dtype: Annotated[HeadDtype, About("Element type of the matrix that makes logits.")] = _ENGINE["head_dtype"]
    batches: Annotated[
        tuple[Annotated[int, Ge(1)], ...], Len(1), About("Sequences decoded together.", flag="--batch")
    ] = (1, 4, 8, 16)
    prompt: Prompt = 256
    new: New = 64
    device: Annotated[str, Len(1), About("cpu or cuda.")] = "cpu"


DEFAULT_OUTPUT = 64


@dataclass(frozen=True)
class SpeculationLoad(Checked):
    recipe: Annotated[str, About("Recipe, bf16, or 'stored': what the directory stores.")] = _ENGINE["recipe"]
    kv_cache_dtype: Annotated[KvDtype, About("Element type of the KV cache.")] = _ENGINE["kv_cache_dtype"]
    speculative_tokens: Annotated[int, Ge(1), Le(64), About("Tokens of a draft, at most.")] = 8
    draft_model: Annotated[
        str | None, About("Model that drafts tokens, instead of the text so far.", unset="none", metavar="MODEL")
    ] = None
    new: New = 128
    rounds: Annotated[int, Ge(1), About("Answers of each kind, in turn with and without drafts.")] = 5
    temperature: Annotated[float, Ge(0), Le(100), About("0: greedy.")] = 0.0


@dataclass(frozen=True)
class Load(Checked):
    """The requests of the clients, and their times."""

    num_prompts: Annotated[int, Ge(1), About("Requests in all.")] = 32
    max_concurrency: Annotated[int | None, Ge(1), About("Requests at the same time.", unset="no limit")] = None
    request_rate: Annotated[float | None, Gt(0), About("Requests sent in a second.", unset="all at once")] = None
    burstiness: Annotated[float, Gt(0), About("1: a Poisson process; less: burstier; more: more even.")] = 1.0
    dataset: Annotated[
        Literal["random", "sharegpt", "jsonl"], About("Random token ids, ShareGPT's JSON, or JSON lines with prompt.")
    ] = "random"
    dataset_path: Annotated[str | None, About("The file of the data set.", unset="none", metavar="FILE")] = None
    input_len: Annotated[int, Ge(1), About("Tokens of each random prompt.")] = 256
    output_len: Annotated[
        int | None, Ge(1), About("Longest answer, in tokens.", unset=f"the data set's, or {DEFAULT_OUTPUT}")
    ] = None
    ignore_eos: Annotated[
        bool | None, About("Answers continue after the end-of-text token.", unset="for random prompts")
    ] = None
    api: Annotated[Literal["completions", "chat"], About("The route for the requests.")] = "completions"
    seed: Annotated[int, Ge(0), About("Seed of prompts, their order, and their sending times.")] = 0
    vocab: int = 1000  # random prompts use ids below this


@dataclass(frozen=True)
class Shape(Checked):
    """A Llama with tied embeddings; the default has 10.2 million parameters."""

    hidden_size: Annotated[int, Ge(64), About("Width of the model.")] = 384
    layers: Annotated[int, Ge(1), About("Layers of the model.")] = 6
    heads: int = 6
    kv_heads: int = 2
    intermediate_size: int = 1024
    vocab_size: int = 2048

    @classmethod
    def of(cls, hidden_size: int, layers: int) -> "Shape":
        """The same proportions in another size: heads of 64, a feed-forward layer of 8/3 of the width."""
        if hidden_size % 64:
            raise JobError(f"hidden_size must be a multiple of 64, found {hidden_size}.")
        heads = hidden_size // 64
        wide = 128 * math.ceil(hidden_size * 8 / (3 * 128))
        return cls(hidden_size, layers, heads, 2 if heads % 2 == 0 else 1, wide)


# The options of `calibrate` for each method: fields of CalibrationOptions and ScalingOptions.


@dataclass(frozen=True)
class StepOptions(Checked):
    recipes: Annotated[tuple[str, ...], Len(1), About("Recipe to measure.", flag="--recipe")] = ("delayed",)
    rows: Rows = 4
    rounds: Annotated[int, Ge(1), About("Steps of each kind.")] = 10


@dataclass(frozen=True)
class MonitorOptions(Checked):
    rows: Rows = 4
    every: Annotated[int, Ge(1), About("Steps from one count of the codes to the next.")] = 16
    rounds: Annotated[int, Ge(1), About("Rounds of that many steps, with and without.")] = 10
