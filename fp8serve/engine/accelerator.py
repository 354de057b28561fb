"""What an engine does on a GPU and not on a CPU: measure its memory, and capture its decoding steps.

Kept apart from `loading`, so that each decision can be tested where there is no GPU, with a stand-in for its answer.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from fp8serve.engine.graphs import Capture, CudaCapture
from fp8serve.engine.memory import CachePlan, check_length, gpu_bytes_of, gpu_cache_memory, plan
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.runner import Runner
from fp8serve.engine.scheduler import MOST_DRAFTED
from fp8serve.errors import MachineError
from fp8serve.fp8 import ops as ops  # registers the op called below
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.selfcheck import prepare_device
from fp8serve.model.building import Model
from fp8serve.model.config.decoder import ModelConfig
from fp8serve.model.network.decoder import Heads
from fp8serve.model.network.rotary import Rotation

_sample = torch.ops.fp8serve.sample.default


def check_device(name: str) -> torch.device:
    """MachineError when this machine does not have it, or its GPU cannot run the kernels that are there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise MachineError(f"There is no device {name!r}; use cpu or cuda.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MachineError(f"The device {name} was asked for, but PyTorch finds no GPU here; use --device cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise MachineError(f"The device {name} was asked for, but PyTorch finds {torch.cuda.device_count()} GPU here.")
    prepare_device(device)
    return device


@torch.inference_mode()
def largest_step(model: Model, options: EngineOptions) -> Tensor:
    """Runs a step with the largest number of tokens and sequences; every sequence samples and wants log-probabilities.

    Returns the log-probabilities, FP32 [sequences, vocab], which the sampler (sampler.py) holds while it draws from a
    copy of the rows. Attention is left out: it needs a fixed amount (memory.ATTENTION_PARTS) and its output, for which
    the query is returned.
    """
    device = cast(Tensor, model.head.weight).device
    tokens = torch.zeros(options.step_tokens, dtype=torch.long, device=device)
    last = tokens[: max(options.max_num_seqs, MOST_DRAFTED if options.drafted_tokens else 0)]
    logits = model.logits(model(tokens, tokens, _no_attention, last))
    ranked, chosen = torch.log_softmax(logits, -1), logits.clone()
    one = torch.ones(len(logits), dtype=torch.float64, device=device)
    _sample(chosen, one, one.long(), 0.5 * one, 0 * one, 0 * one)
    return ranked


def _no_attention(layer: int, heads: Heads, rotation: Rotation, last: Tensor | None) -> Tensor:
    return heads[0].clone() if last is None else heads[0][last]


def use_threads(options: EngineOptions) -> None:
    """Has this process compute on as many threads as the options say; no bit depends on it."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)


def plan_on_gpu(
    model: Model, config: ModelConfig, options: EngineOptions, dtype: torch.dtype, draft: ModelConfig | None = None
) -> CachePlan:
    """The cache's sizes from the memory that the weights, a `draft` model's included, and the model's largest step
    leave free."""
    check_length(config, options)
    device = cast(Tensor, model.head.weight).device
    step_bytes = gpu_bytes_of(lambda: largest_step(model, options), device)
    return plan(config, options, dtype, gpu_cache_memory(device, options, step_bytes), draft)


@dataclass(frozen=True, slots=True)
class GraphReport:
    """The batch sizes at which decoding is replayed, or the reason why it is not."""

    sizes: tuple[int, ...] = ()
    reason: str | None = None

    def text(self) -> str:
        return f"off: {self.reason}" if self.reason else f"batches of {', '.join(map(str, self.sizes))}"


def capture_decoding(
    runner: Runner, options: EngineOptions, max_model_len: int, capture: Capture | None = None
) -> GraphReport:
    """Captures decoding steps if that is wanted and possible. `capture`: CUDA's, unless a test passes its own.

    MachineError when capturing was asked for explicitly and is not possible.
    """
    if options.cuda_graphs is False:
        return GraphReport(reason="not asked for")
    if capture is None and runner.device.type != "cuda":
        return GraphReport(reason="the device is no GPU")
    try:
        runner.use_graphs(capture or CudaCapture(runner.device), options.max_num_seqs, max_model_len)
    except RuntimeError as problem:
        reason = (str(problem).splitlines() or [type(problem).__name__])[0]
        if options.cuda_graphs:
            raise MachineError(f"Decoding steps cannot be captured as CUDA graphs: {reason}") from problem
        return GraphReport(reason=reason)
    return GraphReport(tuple(runner.graphs.sizes if runner.graphs else ()))


def forget_trial_runs(layers: list[FrozenLinear]) -> None:
    """Resets what the layers counted during the trial."""
    for layer in layers:
        layer.reset_counters()
