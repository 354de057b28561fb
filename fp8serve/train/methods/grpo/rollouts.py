"""The engine that answers a run's prompts, with the weights and scales that the run has at that step.

It lives in the trainer's process. For a whole model it gets this step's weights, quantized as they will be served
(`served_state`), in place of the last step's: bit for bit the tensors that `export` writes and an engine loads, but
from memory to memory (`Engine.load_weights`). For an adapter it has the base as it is served, and this step's adapter
beside it. So its log-probabilities have the bits of the next forward pass (model/parity.py names the recipes for which
they do not).
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
from fp8serve.model.config.mixture import keeps_fp32
from fp8serve.train.config import TrainConfig
from fp8serve.train.forward import Forward
from fp8serve.train.lora import base_recipe, trained, write_result
from fp8serve.train.methods.interface import Scene

MAX_SEQUENCES = 64
BLOCK = 16  # tokens
POLICY = "policy"  # an adapter's name


def served_state(forward: Forward) -> dict[str, Tensor]:
    """The tensors of `served_model`, named as `engine.weights` names them."""
    return served_model(forward).state_dict()


@torch.no_grad()
def served_model(forward: Forward) -> Model:
    """The served model of a whole model in training, with tensors of its own, which further training does not change.

    ScalesError: a layer has no scale yet under a delayed recipe.
    """
    recipe, decoder = forward.recipe, forward.network.decoder
    linears = {} if recipe is None or recipe.override_linear_precision[0] else forward.linears
    model = build_on_meta(decoder.config, torch.bfloat16)
    for name, parameter in decoder.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if owner not in linears:
            held = parameter.detach().to(parameter.dtype if keeps_fp32(name) else torch.bfloat16, copy=True)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(held, requires_grad=False))
    for name, linear in linears.items():
        bias = None if linear.bias is None else linear.bias.detach().to(torch.bfloat16, copy=True)
        frozen = FrozenLinear.from_linear(linear, recipe, out_dtype=torch.bfloat16)  # type: ignore[arg-type]
        frozen.bias = bias
        model.set_submodule(name, frozen)
    model.tie()
    return model.eval()


@dataclass(frozen=True)
class Drawn:
    """An answer: its tokens, their log-probabilities FP32 [n], its text. is_cut: it reached the largest length."""

    token_ids: list[int]
    log_probs: npt.NDArray[np.float32]
    text: str
    is_cut: bool


class Rollouts:
    """Draws answers. Their bits depend on weights, seed, step and prompts, but not on earlier steps."""

    def __init__(self, config: TrainConfig, scene: Scene) -> None:
        self._config, self._forward = config, scene.forward
        most = min(MAX_SEQUENCES, config.batch_size * config.accumulate * config.num_generations)
        options: dict[str, Any] = {
            "device": config.device, "max_num_seqs": most, "max_model_len": config.seq_len, "block_size": BLOCK,
            "num_blocks": most * -(-config.seq_len // BLOCK),
        }  # fmt: skip
        if config.lora_rank:
            recipe = base_recipe(config)
            self.engine = Engine(config.model, recipe=recipe if isinstance(recipe, str) else to_json(recipe), **options)
        else:
            self.engine = Engine(scene.source, model=served_model(scene.forward), **options)
        self._params = SamplingParams(max_new_tokens=config.longest_answer, temperature=config.temperature, logprobs=0)

    def push(self) -> None:
        """Gives the engine the present weights and scales of the run."""
        if not self._config.lora_rank:
            self.engine.load_weights(served_state(self._forward))
            return
        with TemporaryDirectory() as folder:
            write_result(Path(folder), self._config, trained(self._forward.network.decoder))
            if POLICY in self.engine.adapters.named:
                self.engine.unload_adapter(POLICY)
            self.engine.load_adapter(POLICY, folder)

    def draw(self, step: int, prompts: Sequence[npt.NDArray[np.int32]]) -> list[list[Drawn]]:
        """`num_generations` answers to each prompt."""
        requests = [
            [self._request(step, number, answer, ids) for answer in range(self._config.num_generations)]
            for number, ids in enumerate(prompts)
        ]
        outputs: dict[str, list[RequestOutput]] = {}
        for request in (request for group in requests for request in group):
            outputs[request.request_id] = []
            self.engine.add_request(request)
        while self.engine.has_work():
            for output in self.engine.step():
                outputs[output.request_id].append(output)
        return [[_drawn(outputs[request.request_id]) for request in group] for group in requests]

    def _request(self, step: int, number: int, answer: int, ids: npt.NDArray[np.int32]) -> Request:
        text = f"{self._config.seed}:{step}:{number}:{answer}".encode()
        seed = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
        adapter = POLICY if self._config.lora_rank else None
        params = replace(self._params, seed=seed)
        return Request(f"{number}-{answer}", tuple(ids.tolist()), params, adapter=adapter)


def _drawn(outputs: Sequence[RequestOutput]) -> Drawn:
    if (error := outputs[-1].error) is not None:
        raise JobError(f"A prompt could not be answered: {error}")
    tokens = [token for output in outputs for token in output.token_ids]
    log_probs = [item.logprob for output in outputs for item in output.logprobs or ()]
    text = "".join(output.text_delta for output in outputs)
    return Drawn(tokens, np.asarray(log_probs, np.float32), text, outputs[-1].finish_reason == "length")
