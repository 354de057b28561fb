"""Generates completions with an engine in the trainer's process, which has the weights and scales of the current step.

When a whole model is trained, each step copies its quantized weights into the engine (`served_state`,
`Engine.load_weights`). These are bit for bit the tensors that `export` writes and a server loads. When an adapter is
trained, the engine holds the base model as a server does, and each step loads the current adapter. The engine's
log-probabilities are therefore bit-identical to those of the next forward pass, except for the recipes in
model/parity.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fp8serve.engine.engine import Engine
from fp8serve.engine.output import RequestOutput
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import JobError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import to_json
from fp8serve.model.building import Model, build_on_meta
from fp8serve.model.config.mixture import needs_fp32
from fp8serve.train.config import TrainConfig
from fp8serve.train.forward import Forward
from fp8serve.train.lora import adapter_parameters, base_recipe, write_adapter_files
from fp8serve.train.methods.interface import RunContext

MAX_NUM_SEQS = 64
BLOCK_SIZE = 16  # tokens
GPU_STEP_TOKENS = 2048  # fixed, because on a GPU the bits of products depend on the number of rows
ADAPTER_NAME = "policy"


def served_state(forward: Forward) -> dict[str, Tensor]:
    """Returns the tensors of `served_model` under the names that `Engine.load_weights` expects."""
    return served_model(forward).state_dict()


@torch.no_grad()
def served_model(forward: Forward) -> Model:
    """Returns a copy of the trained model, quantized as a server holds it. Further training does not change the copy.

    Raises ScalesError if a layer has no scale yet under a delayed recipe.
    """
    recipe, decoder = forward.recipe, forward.network.decoder
    linears = {} if recipe is None or recipe.override_linear_precision[0] else forward.linears
    model = build_on_meta(decoder.config, torch.bfloat16)
    for name, parameter in decoder.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if owner not in linears:
            copied = parameter.detach().to(parameter.dtype if needs_fp32(name) else torch.bfloat16, copy=True)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(copied, requires_grad=False))
    for name, linear in linears.items():
        bias = None if linear.bias is None else linear.bias.detach().to(torch.bfloat16, copy=True)
        frozen = FrozenLinear.from_linear(linear, recipe, out_dtype=torch.bfloat16)  # type: ignore[arg-type]
        frozen.bias = bias
        model.set_submodule(name, frozen)
    model.tie()
    return model.eval()


@dataclass(frozen=True)
class Rollout:
    """A sampled completion with the log-probabilities FP32 [n] of its tokens. `is_truncated` means that it reached the
    maximum length."""

    token_ids: list[int]
    log_probs: npt.NDArray[np.float32]
    text: str
    is_truncated: bool


class RolloutEngine:
    """Samples completions. They depend on weights, seed, step and prompts, but not on earlier steps."""

    def __init__(self, config: TrainConfig, context: RunContext) -> None:
        self._config, self._forward = config, context.forward
        max_num_seqs = min(MAX_NUM_SEQS, config.batch_size * config.accumulate * config.num_generations)
        options: dict[str, Any] = {
            "device": config.device, "max_num_seqs": max_num_seqs, "max_model_len": config.seq_len,
            "block_size": BLOCK_SIZE, "num_blocks": max_num_seqs * -(-config.seq_len // BLOCK_SIZE),
            "kv_cache_dtype": "bf16", "invariant": config.invariant,
        }  # fmt: skip
        if torch.device(config.device).type == "cuda":
            options |= {"max_batch_tokens": GPU_STEP_TOKENS, "max_prefill_tokens": GPU_STEP_TOKENS}
        if config.lora_rank:
            recipe = base_recipe(config)
            self.engine = Engine(config.model, recipe=recipe if isinstance(recipe, str) else to_json(recipe), **options)
        else:
            self.engine = Engine(context.model_dir, model=served_model(context.forward), **options)
        self._params = SamplingParams(
            max_new_tokens=config.max_completion_tokens, temperature=config.temperature, logprobs=0
        )

    def update_weights(self) -> None:
        """Copies the current weights and scales of the run into the engine."""
        if not self._config.lora_rank:
            self.engine.load_weights(served_state(self._forward))
            return
        with TemporaryDirectory() as folder:
            write_adapter_files(Path(folder), self._config, adapter_parameters(self._forward.network.decoder))
            if ADAPTER_NAME in self.engine.adapters.by_name:
                self.engine.unload_adapter(ADAPTER_NAME)
            self.engine.load_adapter(ADAPTER_NAME, folder)

    def generate(self, step: int, prompts: Sequence[npt.NDArray[np.int32]]) -> list[list[Rollout]]:
        """Returns `num_generations` completions of each prompt."""
        requests = [
            [self._request(step, prompt, completion, ids) for completion in range(self._config.num_generations)]
            for prompt, ids in enumerate(prompts)
        ]
        outputs: dict[str, list[RequestOutput]] = {}
        for request in (request for group in requests for request in group):
            outputs[request.request_id] = []
            self.engine.add_request(request)
        while self.engine.has_work():
            for output in self.engine.step():
                outputs[output.request_id].append(output)
        return [[_rollout(outputs[request.request_id]) for request in group] for group in requests]

    def _request(self, step: int, prompt: int, completion: int, ids: npt.NDArray[np.int32]) -> Request:
        text = f"{self._config.seed}:{step}:{prompt}:{completion}".encode()
        seed = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
        adapter = ADAPTER_NAME if self._config.lora_rank else None
        params = replace(self._params, seed=seed)
        return Request(f"{prompt}-{completion}", tuple(ids.tolist()), params, adapter=adapter)


def _rollout(outputs: Sequence[RequestOutput]) -> Rollout:
    if (error := outputs[-1].error) is not None:
        raise JobError(f"The completion of a prompt could not be generated: {error}")
    tokens = [token for output in outputs for token in output.token_ids]
    log_probs = [item.logprob for output in outputs for item in output.logprobs or ()]
    text = "".join(output.text_delta for output in outputs)
    return Rollout(tokens, np.asarray(log_probs, np.float32), text, outputs[-1].finish_reason == "length")
