"""Training mixtures of experts: the loss falls, a resumed run has the same bits, and the engine computes the
log-probabilities of training."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from fp8serve.fp8.autocast import autocast
from fp8serve.fp8.conversion import convert
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.recipe import DelayedScaling, from_name
from fp8serve.model.checkpoint import load_scales, load_servable, load_trainable
from fp8serve.model.network.experts import Experts, mixtures
from fp8serve.train.forward import Forward, collate, mean_loss
from fp8serve.train.scratch import random_weights
from fp8serve.train.trainer import Trainer

from .conftest import Configure
from .test_export import served, trained
from .test_forward import row
from .test_trainer import RECIPES, after, hashes, of_type

EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 64},
    "qwen3_moe": EXPERTS | {"norm_topk_prob": True, "head_dim": 16},
}
NAMES = {"mixtral": "Mixtral", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe"}


def write_mixture(out: Path, dense: Path, kind: str) -> Path:
    """Writes a random model like `dense`, with experts instead of MLPs."""
    shutil.copytree(dense, out)
    config = json.loads((dense / "config.json").read_text())
    del config["mlp_bias"], config["attention_bias"]
    config |= {"model_type": kind, "architectures": [f"{NAMES[kind]}ForCausalLM"], **KINDS[kind]}
    (out / "config.json").write_text(json.dumps(config))
    (out / "model.safetensors.index.json").unlink()
    save_file(random_weights(out, 0), out / "model.safetensors", {"format": "pt"})
    return out


@pytest.fixture(params=list(KINDS))
def mixture(request: pytest.FixtureRequest, tmp_path: Path, model_dir: Path) -> Path:
    return write_mixture(tmp_path / "mixture", model_dir, request.param)


@pytest.fixture
def qwen(tmp_path: Path, model_dir: Path) -> Path:
    return write_mixture(tmp_path / "qwen", model_dir, "qwen3_moe")


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_lowers_the_loss(configure: Configure, qwen: Path, recipe: str) -> None:
    events: list[dict[str, Any]] = []
    result = Trainer(configure(model=str(qwen), recipe=recipe, max_steps=16, lr=3e-3)).run(events.append)
    losses = [e["train_loss"] for e in of_type(events, "metrics")]
    assert sum(losses[-4:]) / 4 < 0.85 * losses[0]
    assert result.model is not None


@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "block", "mxfp8", "nvfp4"])
@torch.no_grad()
def test_trainer_and_server_compute_the_same_bits(configure: Configure, mixture: Path, recipe: str) -> None:
    with torch.enable_grad():
        result, setup = trained(configure, model=str(mixture), recipe=recipe, max_steps=3)
    assert result.model is not None
    model, rows = load_servable(result.model), setup.items[:6]
    assert {n for n, m in model.named_modules() if isinstance(m, FrozenLinear)} == set(model.linear_names())
    assert torch.equal(setup.forward.log_probs(collate(rows, "cpu")), served(result.model, rows))


def test_a_run_stopped_after_every_step_has_the_same_bits(configure: Configure, mixture: Path, tmp_path: Path) -> None:
    common = {"model": str(mixture), "accumulate": 2, "save_every": 2, "max_steps": 4, "keep_last": 1}
    through = Trainer(configure(**common, out=str(tmp_path / "a"))).run()
    config = configure(**common, out=str(tmp_path / "b"))
    for _ in range(4):
        Trainer(config).run(stop=after(1))
    result = Trainer(config).run()
    assert result.checkpoint is not None
    assert through.checkpoint is not None
    assert hashes(Path(result.checkpoint), ".safetensors") == hashes(Path(through.checkpoint), ".safetensors")


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current", "rowwise", "block", "mxfp8", "nvfp4"])
def test_loss_and_gradients_of_a_step_are_close_to_transformers(mixture: Path, recipe: str) -> None:
    """Compares loss and gradients of one step in FP8 with those of transformers in FP32."""
    theirs: Any = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32, experts_implementation="eager")
    rows = row(1, 90)
    ids = torch.from_numpy(rows.ids.astype("int64"))
    expected = theirs(input_ids=ids[None], labels=ids[None]).loss
    expected.backward()
    chosen = None if recipe == "bf16" else from_name(recipe)
    decoder = load_trainable(mixture)
    if chosen is not None:
        convert(decoder)
    forward = Forward(decoder, chosen)
    batch = collate([rows], "cpu")
    if recipe == "delayed":
        forward.observe(mean_loss(batch))
    loss = torch.nn.functional.cross_entropy(forward.logits(batch).float(), batch.targets)
    loss.backward()  # type: ignore[no-untyped-call]
    assert abs(float(loss.detach() - expected.detach())) < 0.01
    ours, exact = gradients(decoder), gradients(theirs)
    limit = 0.85 if recipe == "nvfp4" else 0.97
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"):
        assert torch.cosine_similarity(ours[name].flatten(), exact[name].flatten(), dim=0) > limit, name
    block = decoder.config.experts
    assert block is not None
    first, down = f"model.layers.1.{block.names.block}.experts", theirs.model.layers[1].mlp.experts.down_proj
    zero = torch.zeros_like(down[0])
    actual = torch.stack([ours.get(f"{first}.{e}.{block.names.down}.weight", zero) for e in range(5)])
    # rounding may send a token to another expert, so the gradients of all experts are compared as one tensor
    assert torch.cosine_similarity(actual.flatten(), down.grad.flatten(), dim=0) > limit - 0.07


def starve_expert(decoder: torch.nn.Module, expert: int) -> Experts:
    """Changes the first router so that it never chooses `expert`. Returns the experts of that layer."""
    name, experts = next(iter(mixtures(decoder).items()))
    router: Any = decoder.get_submodule(f"{name}.gate").weight
    with torch.no_grad():
        others = [i for i in range(5) if i != expert]
        router[others[1]], router[others[3]], router[expert] = -router[others[0]], -router[others[2]], 0
    return experts


def test_observation_gives_every_expert_scales_also_without_tokens(qwen: Path) -> None:
    decoder = load_trainable(qwen)
    convert(decoder)
    experts, forward = starve_expert(decoder, 2), Forward(decoder, DelayedScaling(amax_history_len=4))
    batch = collate([row(1, 90)], "cpu")
    forward.observe(mean_loss(batch))
    assert experts.tokens[2] == 0
    for expert in experts:
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            linear = expert.get_submodule(leaf)
            assert isinstance(linear, Linear)
            assert all(state.scale != 1 for state in linear.scaling.values())
    scales = [e.get_submodule("up_proj").scaling["grad_output"].scale for e in experts]  # type: ignore[union-attr, index]
    assert scales[2] == min(scales)
    assert not experts.route_to_all_experts


def test_an_expert_without_tokens_gets_no_gradient(qwen: Path) -> None:
    decoder = load_trainable(qwen)
    convert(decoder)
    experts = starve_expert(decoder, 2)
    with autocast(recipe=DelayedScaling()):
        Forward(decoder, DelayedScaling()).logits(collate([row(1, 90)], "cpu")).sum().backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None for p in experts[2].parameters())
    assert all(p.grad is not None for p in experts[experts.tokens.argmax()].parameters())


def test_scales_of_every_expert_are_exported(configure: Configure, qwen: Path) -> None:
    result = Trainer(configure(model=str(qwen), max_steps=2)).run()
    assert result.model is not None
    scales = load_scales(Path(result.model) / "scales.safetensors", result.model)
    for name in load_servable(result.model).linear_names():
        assert scales.input_scale(name) != 1
