"""How an engine is started: one frozen record that the command line, the server and the worker process share."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Len

from fp8serve.engine.request import Task
from fp8serve.errors import RequestError
from fp8serve.fp8.recipe import HeadDtype, RecipeChoice, to_json
from fp8serve.options import About, check, known_fields

KvDtype = Literal["bf16", "fp8"]
STEP_TOKENS = 512
MAX_LORA_RANK = 256
DRAFTED = 4  # most tokens of a draft model's draft, if speculative_tokens is not set


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of `Engine`; None means chosen from the model and the machine, and shown by `info()`.

    `recipe` may also be a recipe as JSON.
    """

    recipe: Annotated[
        str,
        Len(1),
        About("'stored': the scales in the directory; the others are made on the fly.", narrowed=RecipeChoice),
    ] = "stored"
    scales: Annotated[
        str | None, About("scales.safetensors to use.", unset="the directory's own", metavar="PATH", private=True)
    ] = None
    device: Annotated[str, Len(1), About("cpu or cuda.")] = "cpu"
    threads: Annotated[
        int | None, Ge(1), Le(1024), About("Threads that compute on a CPU.", unset="one for each core")
    ] = None
    kv_cache_dtype: Annotated[KvDtype, About("Element type of the KV cache.")] = "bf16"
    head_dtype: Annotated[HeadDtype, About("Element type of the matrix that makes logits; fp8: cast when loaded.")] = (
        "bf16"
    )
    task: Annotated[Task | None, About("What the model is served for.", unset="what its directory is for")] = None
    max_num_seqs: Annotated[int, Ge(1), About("Sequences that run at the same time.")] = 16
    max_model_len: Annotated[
        int | None,
        Ge(2),
        About("Most tokens of prompt and answer together; LongRoPE's frequencies depend on it.", unset="the model's"),
    ] = None
    block_size: Annotated[int, Ge(1), About("Tokens in a block of the cache.")] = 16
    kv_cache_bytes: Annotated[
        int | None, Ge(1), About("Memory that the cache may take.", unset="a quarter of what is free; on a GPU, all")
    ] = None
    num_blocks: Annotated[int | None, Ge(1), About("Blocks of the cache.", unset="what fits")] = None
    max_batch_tokens: Annotated[
        int | None,
        Ge(1),
        About("Tokens computed in one step.", unset=f"{STEP_TOKENS}, or max_num_seqs where that is more"),
    ] = None
    max_prefill_tokens: Annotated[
        int, Ge(1), About("Of these, tokens of prompts while other requests are decoding.")
    ] = 128
    speculative_tokens: Annotated[
        int,
        Ge(0),
        Le(64),
        About(
            "Tokens guessed at a time, checked in one step: from the text so far, or by the draft model; 0: none, or "
            f"{DRAFTED} with a draft model. Answers stay the same."
        ),
    ] = 0
    draft_model: Annotated[
        str | None,
        Len(1),
        About(
            "Directory of a small model of the same vocabulary that guesses tokens.",
            unset="none",
            metavar="MODEL",
            private=True,
        ),
    ] = None
    max_lora_rank: Annotated[
        int, Ge(1), Le(4096), About("Largest rank of an adapter that may be loaded (LoRA, DoRA).")
    ] = MAX_LORA_RANK
    gpu_memory: Annotated[
        float | None, Gt(0), Le(1), About("Share of a GPU's memory that may be used.", unset="0.9")
    ] = None
    cuda_graphs: Annotated[
        bool | None,
        About("Replay decoding steps as CUDA graphs.", unset="on a GPU", flag="--cuda-graphs/--no-cuda-graphs"),
    ] = None
    cache_dir: Annotated[
        str | None,
        Len(1),
        About("Directory that keeps the prefix cache across restarts.", unset="none", metavar="DIR", private=True),
    ] = None
    cache_dir_bytes: Annotated[int | None, Ge(1), About("Bytes of the prefix cache kept there.", unset="1 GiB")] = None
    cache_dir_seconds: Annotated[
        float | None, Gt(0), About("Seconds between two writes while the engine runs.", unset="300")
    ] = None
    drift_window: Annotated[int, Ge(1), About("Computed tokens between two looks at the range of inputs.")] = 8192
    drift_alarm: Annotated[
        float, Gt(0), About("Report a layer whose inputs exceed this many times the calibrated maximum.")
    ] = 2.0
    roll_history: Annotated[bool, About("Let scales of inputs follow the traffic, by delayed scaling.")] = False

    def __post_init__(self) -> None:
        check(self, RequestError)
        if self.step_tokens < self.max_num_seqs:
            raise RequestError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_num_seqs ({self.max_num_seqs}), "
                "or a step could not give every running request a token."
            )
        if self.cache_dir is None and (self.cache_dir_bytes or self.cache_dir_seconds):
            name = "cache_dir_bytes" if self.cache_dir_bytes else "cache_dir_seconds"
            raise RequestError(f"{name} needs cache_dir; set it, or leave {name} out.")
        if self.cache_dir is not None and self.roll_history:
            raise RequestError(
                "cache_dir keeps what fixed scales made, and with roll_history they follow the traffic; leave one out."
            )
        if not self.device.startswith("cuda") and (self.gpu_memory is not None or self.cuda_graphs):
            name = "cuda_graphs" if self.gpu_memory is None else "gpu_memory"
            raise RequestError(f"{name} is for a GPU, and the device is {self.device!r}; leave it out or use a GPU.")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "EngineOptions":
        """From keyword arguments, of which `recipe` may be a Recipe and `scales` a Path. RequestError."""
        values = known_fields(cls, options)
        if not isinstance(values.get("recipe", ""), str):
            values["recipe"] = to_json(values["recipe"])
        if isinstance(values.get("scales"), Path):
            values["scales"] = str(values["scales"])
        return cls(**values)

    @property
    def step_tokens(self) -> int:
        """Tokens computed in one step."""
        return self.max_batch_tokens or max(STEP_TOKENS, self.max_num_seqs)

    @property
    def drafted_tokens(self) -> int:
        """Tokens of a draft, at most; 0: nothing is drafted."""
        return self.speculative_tokens or (0 if self.draft_model is None else DRAFTED)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "EngineOptions":
        return cls(**known_fields(cls, json.loads(text)))
