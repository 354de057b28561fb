"""How an engine is started: one frozen record that the command line, the server and the worker process share."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fp8serve.engine.request import known_fields
from fp8serve.errors import RequestError

KvDtype = Literal["bf16", "fp8"]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of `Engine`; None means chosen from the model and the machine, and shown by `info()`."""

    recipe: str = "stored"  # "stored", "bf16", a recipe's name, or a recipe as JSON
    scales: str | None = None  # path of a scales.safetensors to use instead of the directory's own
    device: str = "cpu"
    kv_cache_dtype: KvDtype = "bf16"
    max_num_seqs: int = 16  # sequences that run at the same time
    max_model_len: int | None = None  # tokens of prompt and answer
    block_size: int = 16  # tokens in a cache block
    num_blocks: int | None = None
    max_batch_tokens: int = 512  # tokens computed in one step
    max_prefill_tokens: int = 128  # of these, prompt tokens while other requests are decoding
    gpu_memory: float | None = None  # share of a GPU's memory that this process may use; None: 0.9
    cuda_graphs: bool | None = None  # replay decoding steps; None: on a GPU, where it can be done

    def __post_init__(self) -> None:
        if self.kv_cache_dtype not in ("bf16", "fp8"):
            raise RequestError(f"kv_cache_dtype must be bf16 or fp8, not {self.kv_cache_dtype!r}.")
        for name in (
            "max_num_seqs",
            "max_model_len",
            "block_size",
            "num_blocks",
            "max_batch_tokens",
            "max_prefill_tokens",
        ):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise RequestError(f"{name} must be a positive integer, not {value!r}.")
        if self.max_batch_tokens < self.max_num_seqs:
            raise RequestError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_num_seqs ({self.max_num_seqs}), "
                "or a step could not give every running request a token."
            )

        self._check_gpu()

    def _check_gpu(self) -> None:
        share = self.gpu_memory
        if share is not None and not (type(share) in (int, float) and 0 < share <= 1):
            raise RequestError(f"gpu_memory must be a share of the GPU's memory, above 0 and at most 1, not {share!r}.")
        if self.cuda_graphs not in (None, True, False):
            raise RequestError(f"cuda_graphs must be true, false or left out, not {self.cuda_graphs!r}.")
        if not self.device.startswith("cuda") and (share is not None or self.cuda_graphs):
            name = "gpu_memory" if share is not None else "cuda_graphs"
            raise RequestError(f"{name} is for a GPU, and the device is {self.device!r}; leave it out or use a GPU.")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "EngineOptions":
        data: Any = json.loads(text)
        return cls(**known_fields(cls, data if isinstance(data, Mapping) else {}))
