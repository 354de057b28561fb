"""Fused parts of a decoder layer in training have the bits of separate modules, which run where fusion is impossible.

Only a GPU uses the fused parts. These tests patch `_is_on_gpu`, so that the CPU runs them, composed of CPU kernels.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fp8serve.fp8 import casting
from fp8serve.fp8 import fused as fused_layers
from fp8serve.fp8.autocast import autocast
from fp8serve.fp8.conversion import convert
from fp8serve.fp8.recipe import DelayedScaling, Recipe, from_name
from fp8serve.model.checkpoint import load_trainable
from fp8serve.model.network.fusion import IDENTITY
from fp8serve.train.forward import Forward, collate, mean_loss, summed_loss
from fp8serve.train.state import scaling_tensors
from tests.tiny import write_tiny_model
from tests.train.test_forward import row

DELAYED = DelayedScaling(amax_history_len=3)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of every fused op that runs."""
    names: list[str] = []

    def counted(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (names.append(name), op(*arguments))[1]  # type: ignore[func-returns-value]

    for name in ("_cast_norm", "_cast_silu", "_cast_silu_gradients"):
        monkeypatch.setattr(fused_layers, name, counted(name, getattr(fused_layers, name)))
    return names


def results(model_dir: Path, recipe: Recipe, recompute: bool = False, prepare: Any = None) -> list[Tensor]:
    """Losses, gradients and scaling states of a few steps with gradient accumulation."""
    decoder = load_trainable(model_dir)
    convert(decoder)
    if prepare is not None:
        prepare(decoder)
    forward = Forward(decoder, recipe, recompute=recompute)
    batches = [collate([row(i, 20), row(i + 9, 7)], "cpu") for i in range(2)]
    if isinstance(recipe, DelayedScaling):
        forward.observe(mean_loss(batches[0]))
    tensors: list[Tensor] = []
    for _ in range(3):
        with forward.accumulated_update():
            for i, batch in enumerate(batches):
                loss = summed_loss(forward.logits(batch, is_first_microbatch=i == 0), batch.targets)[0]
                loss.backward()  # type: ignore[no-untyped-call]
                tensors.append(loss.detach())
        tensors += [p.grad.clone() for p in decoder.parameters() if p.grad is not None]
    return tensors + list(scaling_tensors(forward).values())


@pytest.mark.parametrize("layout", ["tn", "any"])
def test_fused_parts_have_the_bits_of_separate_modules(
    model_dir: Path, layout: casting.Layout, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with patch.object(casting, "layout_of", lambda device: layout):
        separate = results(model_dir, DELAYED)
        assert calls == []
        monkeypatch.setattr(fused_layers, "_is_on_gpu", lambda x: True)
        fused = results(model_dir, DELAYED)
    layers, passes = 2, 6
    counts = {name: calls.count(name) / layers / passes for name in calls}
    assert counts == {"_cast_norm": 2, "_cast_silu": 1, "_cast_silu_gradients": 1}
    assert len(separate) > 60
    assert all(map(torch.equal, separate, fused))


def give_bias(decoder: Any) -> None:
    for layer in decoder.model.layers:
        for name in ("gate_proj", "up_proj"):
            linear = layer.mlp.get_submodule(name)
            linear.bias = torch.nn.Parameter(torch.ones(linear.out_features))


def hook_gate(decoder: Any) -> None:
    for layer in decoder.model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda module, inputs, output: output * 2)


def hook_norm(decoder: Any) -> None:
    for layer in decoder.model.layers:
        layer.input_layernorm.register_forward_hook(lambda module, inputs, output: output * 2)
        layer.post_attention_layernorm.register_forward_hook(lambda module, inputs, output: output * 2)


def hook_gradient_of_norm(decoder: Any) -> None:
    for layer in decoder.model.layers:
        layer.input_layernorm.register_full_backward_hook(lambda module, inputs, output: (inputs[0] * 2,))
        layer.post_attention_layernorm.register_full_backward_hook(lambda module, inputs, output: (inputs[0] * 2,))


def observe_up(decoder: Any) -> None:
    for layer in decoder.model.layers:
        layer.mlp.up_proj.observer = lambda *_: None


def freeze_up(decoder: Any) -> None:
    for layer in decoder.model.layers:
        layer.mlp.up_proj.requires_grad_(False)


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (give_bias, {"_cast_norm"}),
        (hook_gate, {"_cast_norm"}),
        (hook_norm, set()),
        (hook_gradient_of_norm, set()),
        (observe_up, {"_cast_norm"}),
        (freeze_up, {"_cast_norm"}),
    ],
)
def test_layers_that_cannot_be_fused_run_as_separate_modules(
    model_dir: Path, prepare: Any, expected: set[str], calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    separate = results(model_dir, DELAYED, prepare=prepare)
    monkeypatch.setattr(fused_layers, "_is_on_gpu", lambda x: True)
    fused = results(model_dir, DELAYED, prepare=prepare)
    assert set(calls) == expected
    assert all(map(torch.equal, separate, fused))


@pytest.mark.parametrize("recipe", [from_name("current"), from_name("rowwise"), DELAYED], ids=str)
def test_other_recipes_and_recomputed_layers_run_as_separate_modules(
    model_dir: Path, recipe: Recipe, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recompute = recipe is DELAYED
    separate = results(model_dir, recipe, recompute)
    monkeypatch.setattr(fused_layers, "_is_on_gpu", lambda x: True)
    assert all(map(torch.equal, separate, results(model_dir, recipe, recompute)))
    assert calls == []


def test_an_infinite_gradient_is_not_hidden(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cast saturates; the step must still see that the gradient was infinite."""
    monkeypatch.setattr(fused_layers, "_is_on_gpu", lambda x: True)
    decoder = load_trainable(model_dir)
    convert(decoder)
    forward = Forward(decoder, DELAYED)
    batch = collate([row(1, 20)], "cpu")
    (summed_loss(forward.logits(batch), batch.targets)[0] * torch.inf).backward()  # type: ignore[no-untyped-call]
    grad = decoder.model.layers[0].mlp.gate_proj.weight.grad
    assert grad is not None
    assert not grad.isfinite().all()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
@pytest.mark.parametrize("tokens", [128, 90])
def test_a_layers_mlp_and_projections_on_a_gpu(
    model_dir: Path, device: str, tokens: int, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs, gradients and states with fused ops and with the same modules one by one, on one device."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    runs = []
    for fused in (False, True):
        monkeypatch.setattr(fused_layers, "_is_on_gpu", lambda x, fused=fused: fused)
        decoder = load_trainable(model_dir, dtype=torch.bfloat16, device=device)
        convert(decoder)
        layer = decoder.model.layers[0]
        results: list[Tensor] = []
        for step in range(3):
            x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(step)).to(device, torch.bfloat16)
            x.requires_grad_()
            with autocast(recipe=DELAYED):
                q, k, v = layer.self_attn.qkv(x, layer.input_layernorm)
                y = layer.mlp(x, layer.post_attention_layernorm, IDENTITY)
            (q.sum() + (k * v).sum() + y.square().sum()).backward()
            results += [q.detach(), k.detach(), v.detach(), y.detach(), x.grad]  # type: ignore[list-item]
            results += [p.grad for p in layer.parameters() if p.grad is not None]
            layer.zero_grad()
        results += [t for name, t in layer.state_dict().items() if ".input." in name or ".grad_output." in name]
        runs.append(results)
        assert bool(calls) == fused
    assert len(runs[0]) > 60
    assert all(map(torch.equal, *runs))
