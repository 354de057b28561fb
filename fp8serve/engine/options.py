"""The options of an engine: a frozen dataclass that the command line, the server and the engine process share."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Len

from fp8serve.engine.request import Task
from fp8serve.errors import RequestError
from fp8serve.fp8.recipe import HeadDtype, RecipeChoice, to_json
from fp8serve.options import AUTO, DEVICE_HELP, About, check, known_fields

KvDtype = Literal["bf16", "fp8"]
CPU_NUM_SEQS, CPU_BATCH_TOKENS, CPU_PREFILL_TOKENS = 16, 512, 128  # defaults.py has those of a GPU
DERIVED = "derived from the GPU; on a CPU"
MAX_LORA_RANK = 256
LOST_SECONDS = 8.0  # without a sign of life, after which a rank of tensor_parallel counts as lost
DEFAULT_DRAFT_TOKENS = 4  # of a draft model, if speculative_tokens is not set


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of `Engine`. If an option is None, it is chosen from the model and the machine (defaults.py), and
    `info()` shows the choice. `recipe` may also be a recipe as JSON."""

    recipe: Annotated[
        str,
        Len(1),
        About("'stored' uses the scales of the directory; other recipes cast at load time.", narrowed=RecipeChoice),
    ] = "stored"
    scales: Annotated[
        str | None, About("scales.safetensors to use.", unset="the directory's own", metavar="PATH", private=True)
    ] = None
    device: Annotated[str, Len(1), About(DEVICE_HELP)] = AUTO
    threads: Annotated[
        int | None,
        Ge(1),
        Le(1024),
        About("Threads that compute on a CPU.", unset="one for each core; 2 in a server's engine on a GPU"),
    ] = None
    kv_cache_dtype: Annotated[
        KvDtype | None,
        About("Element type of the KV cache.", unset="bf16; on a GPU fp8, if the model's configuration asks for it"),
    ] = None
    head_dtype: Annotated[HeadDtype, About("Element type of the head (lm_head); fp8 casts it when it is loaded.")] = (
        "bf16"
    )
    task: Annotated[Task | None, About("Task that the model is served for.", unset="the task of its directory")] = None
    max_num_seqs: Annotated[
        int | None,
        Ge(1),
        About("Maximum number of sequences that run at the same time.", unset=f"{DERIVED} {CPU_NUM_SEQS}"),
    ] = None
    max_model_len: Annotated[
        int | None,
        Ge(2),
        About("Maximum tokens of prompt plus output; LongRoPE's frequencies depend on it.", unset="the model's"),
    ] = None
    block_size: Annotated[int, Ge(1), About("Tokens in a block of the KV cache.")] = 16
    kv_cache_bytes: Annotated[
        int | None,
        Ge(1),
        About("Bytes of the KV cache, of all ranks together.", unset="a quarter of the free memory; on a GPU, all"),
    ] = None
    num_blocks: Annotated[int | None, Ge(1), About("Number of blocks of the KV cache.", unset="as many as fit")] = None
    max_batch_tokens: Annotated[
        int | None,
        Ge(1),
        About("Maximum tokens of one step.", unset=f"{DERIVED} {CPU_BATCH_TOKENS}, or max_num_seqs if that is larger"),
    ] = None
    max_prefill_tokens: Annotated[
        int | None,
        Ge(1),
        About(
            "Maximum prompt tokens of a step while other requests are decoding.",
            unset=f"as many as the GPU computes in 25 ms; on a CPU {CPU_PREFILL_TOKENS}",
        ),
    ] = None
    speculative_tokens: Annotated[
        int,
        Ge(0),
        Le(64),
        About(
            "Maximum tokens of a draft, from prompt lookup or the draft model; 0 drafts none, or "
            f"{DEFAULT_DRAFT_TOKENS} with a draft model. Outputs do not change."
        ),
    ] = 0
    draft_model: Annotated[
        str | None,
        Len(1),
        About(
            "Directory of a small model with the same vocabulary that drafts tokens.",
            unset="none",
            metavar="MODEL",
            private=True,
        ),
    ] = None
    max_lora_rank: Annotated[int, Ge(1), Le(4096), About("Maximum rank of an adapter (LoRA or DoRA).")] = MAX_LORA_RANK
    gpu_memory: Annotated[
        float | None,
        Gt(0),
        Le(1),
        About(
            "Fraction of a GPU's memory that may be used.",
            unset="0.92; 0.9 beside other processes; 0.6 in a server that accepts fine-tune jobs",
        ),
    ] = None
    cuda_graphs: Annotated[
        bool | None,
        About("Replay steps as CUDA graphs.", unset="on a GPU", flag="--cuda-graphs/--no-cuda-graphs"),
    ] = None
    invariant: Annotated[
        bool,
        About(
            "Sum in an order that does not depend on the number of rows or on tensor_parallel, so that answers do not "
            "depend on the batch, and log-probabilities are those of training. On a GPU, or with tensor_parallel, this "
            "is slower; a CPU in one process always does it."
        ),
    ] = False
    tensor_parallel: Annotated[
        int,
        Ge(1),
        Le(1024),
        About(
            "Processes that divide the model among them. On GPUs each has its own. Their sums round differently from "
            "those of one process, unless invariant is set."
        ),
    ] = 1
    cache_dir: Annotated[
        str | None,
        Len(1),
        About("Directory that stores the prefix cache across restarts.", unset="none", metavar="DIR", private=True),
    ] = None
    cache_dir_bytes: Annotated[int | None, Ge(1), About("Maximum bytes of a saved prefix cache.", unset="1 GiB")] = None
    cache_dir_seconds: Annotated[
        float | None, Gt(0), About("Minimum seconds between two saves of the prefix cache.", unset="300")
    ] = None
    drift_window: Annotated[int, Ge(1), About("Computed tokens between two checks of input ranges.")] = 8192
    drift_alarm: Annotated[
        float, Gt(0), About("Log a warning if a layer's inputs exceed this many times the calibrated maximum.")
    ] = 2.0
    roll_history: Annotated[bool, About("Update the scales of inputs from the traffic, by delayed scaling.")] = False

    def __post_init__(self) -> None:
        check(self, RequestError)
        if self.step_tokens < self.num_seqs:
            raise RequestError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_num_seqs ({self.max_num_seqs}), "
                "so that a step can generate a token for every running request."
            )
        if self.cache_dir is None and (self.cache_dir_bytes or self.cache_dir_seconds):
            name = "cache_dir_bytes" if self.cache_dir_bytes else "cache_dir_seconds"
            raise RequestError(f"{name} needs cache_dir; set it, or leave {name} out.")
        if self.cache_dir is not None and self.roll_history:
            raise RequestError(
                "cache_dir cannot be used with roll_history, because a saved prefix cache needs fixed scales; leave "
                "one of the two out."
            )
        if self.tensor_parallel > 1:
            self._check_ranks()
        if not self.device.startswith(("cuda", AUTO)) and (self.gpu_memory is not None or self.cuda_graphs):
            name = "cuda_graphs" if self.gpu_memory is None else "gpu_memory"
            raise RequestError(f"{name} is for a GPU, and the device is {self.device!r}; leave it out or use a GPU.")

    def _check_ranks(self) -> None:
        """Raises RequestError for an option that tensor_parallel does not support."""
        for name in ("cache_dir", "roll_history", "cuda_graphs"):
            if getattr(self, name):
                raise RequestError(f"{name} needs the whole model in one process; leave out {name} or tensor_parallel.")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "EngineOptions":
        """Creates the options from keyword arguments; `recipe` may also be a Recipe and `scales` a Path. Raises
        RequestError for an unknown or invalid option."""
        values = known_fields(cls, options)
        if not isinstance(values.get("recipe", ""), str):
            values["recipe"] = to_json(values["recipe"])
        if isinstance(values.get("scales"), Path):
            values["scales"] = str(values["scales"])
        return cls(**values)

    @property
    def num_seqs(self) -> int:
        """The largest number of sequences that run at the same time: max_num_seqs, or the default of a CPU."""
        return self.max_num_seqs or min(CPU_NUM_SEQS, self.max_batch_tokens or CPU_NUM_SEQS)

    @property
    def step_tokens(self) -> int:
        """The largest number of tokens of one step: max_batch_tokens, or the default of a CPU."""
        return self.max_batch_tokens or max(CPU_BATCH_TOKENS, self.num_seqs)

    @property
    def prefill_tokens(self) -> int:
        """The largest number of prompt tokens of a step while other requests are decoding: max_prefill_tokens, or the
        default of a CPU."""
        return self.max_prefill_tokens or CPU_PREFILL_TOKENS

    @property
    def drafted_tokens(self) -> int:
        """The largest number of tokens of a draft; 0 if nothing is drafted."""
        return self.speculative_tokens or (0 if self.draft_model is None else DEFAULT_DRAFT_TOKENS)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "EngineOptions":
        return cls(**known_fields(cls, json.loads(text)))
