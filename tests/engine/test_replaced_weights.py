"""A running engine computes with the current weights of its model, however they were replaced."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8serve.engine import packing
from fp8serve.engine.engine import Engine
from fp8serve.fp8.batch_invariant import has_batch_invariant_products
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.model.checkpoint import load_servable

from .test_fused import SIZES, mixed_steps, projections_are_joined
from .tiny import call_each_layer, write_model, write_scales

pytestmark = pytest.mark.skipif(not has_batch_invariant_products("cpu"), reason="the CPU kernels are not built")
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
           "mlp.up_proj", "mlp.down_proj")  # fmt: skip
Change = Callable[[Any], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with biases."""
    return write_biased_model(tmp_path_factory.mktemp("models") / "one")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same sizes."""
    return write_biased_model(tmp_path_factory.mktemp("models") / "other", seed=1)


def write_biased_model(path: Path, seed: int = 0) -> Path:
    biased = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, "vocab_size": 272}
    write_model(path, "llama", seed, **SIZES | biased)
    write_scales(path, path / "made-up")
    return path


@pytest.fixture(params=["rows", "packed"])
def engine(request: pytest.FixtureRequest, model: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(packing, "worth_packing", lambda: request.param == "packed")
    return loaded(model)


def loaded(path: Path) -> Engine:
    """Returns an engine that has generated before, so that its layers are joined."""
    engine = Engine(path, recipe=DelayedScaling(), scales=path / "made-up")
    engine.pack_weights()
    logits(engine)
    return engine


def logits(engine: Engine) -> list[Tensor]:
    return [engine.loaded.runner.run(work).clone() for work in mixed_steps()[1:3]]


def assert_takes_effect(engine: Engine, change: Change, module: Any) -> None:
    """Asserts that `change` changes the logits, to those of the same modules called one by one."""
    before = logits(engine)
    change(module)
    after = logits(engine)
    assert not any(map(torch.equal, before, after))
    call_each_layer(engine)
    assert all(map(torch.equal, after, logits(engine)))


def negated(weight: Tensor) -> Tensor:
    """Returns the negated E4M3 tensor, in the same memory layout."""
    return (weight.view(torch.uint8) ^ 0x80).view(weight.dtype)


def write(layer: FrozenLinear) -> None:
    layer.weight_q.copy_(negated(layer.weight_q))


def write_data(layer: FrozenLinear) -> None:
    layer.weight_q.data.view(torch.uint8).bitwise_xor_(0x80)


def replace_data(layer: FrozenLinear) -> None:
    layer.weight_q.data = negated(layer.weight_q)


def assign(layer: FrozenLinear) -> None:
    layer.weight_q = negated(layer.weight_q)


def register(layer: FrozenLinear) -> None:
    layer.register_buffer("weight_q", negated(layer.weight_q))


def swap(layer: FrozenLinear) -> None:
    torch.utils.swap_tensors(layer.weight_q, negated(layer.weight_q))


def write_scale(layer: FrozenLinear) -> None:
    layer.weight_scale_inv.mul_(2)


def replace_scale(layer: FrozenLinear) -> None:
    layer.weight_scale_inv = torch.tensor(0.125)


def replace_scale_data(layer: FrozenLinear) -> None:
    layer.weight_scale_inv.data = layer.weight_scale_inv * 2


def write_bias(layer: FrozenLinear) -> None:
    layer.bias.neg_()  # type: ignore[union-attr]


def replace_bias(layer: FrozenLinear) -> None:
    layer.bias = layer.bias.neg()  # type: ignore[union-attr]


def replace_input_scale(layer: FrozenLinear) -> None:
    """Replaces the input scale of one layer, so that it can no longer share a cast with its neighbours."""
    scale = layer.input_scale * 64  # type: ignore[operator]
    layer.input_scale, layer.input_scale_inv = scale, scale.reciprocal()


CHANGES = [write, write_data, replace_data, assign, register, swap, write_scale, replace_scale, replace_scale_data,
           write_bias, replace_bias, replace_input_scale]  # fmt: skip


@pytest.mark.pairwise
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", LINEARS)
def test_changing_a_linear_takes_effect(engine: Engine, name: str, change: Change) -> None:
    assert_takes_effect(engine, change, engine.loaded.frozen[f"model.layers.0.{name}"])


@pytest.mark.parametrize("name", LINEARS)
def test_replacing_a_linear_takes_effect(engine: Engine, name: str) -> None:
    """The new weight is not packed, even if its neighbours are; all are joined into one matrix again."""
    name = f"model.layers.0.{name}"
    layer, model = engine.loaded.frozen[name], engine.loaded.runner.model
    shape = layer.out_features, layer.in_features
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(torch.float8_e4m3fn)
    new = FrozenLinear(weight, torch.tensor(0.01), layer.bias, layer.input_scale, out_dtype=layer.out_dtype)

    def change(_: object) -> None:
        model.set_submodule(name, new)
        engine.loaded.frozen[name] = new

    before = logits(engine)
    change(None)
    after = logits(engine)
    assert not any(map(torch.equal, before, after))
    assert all(projections_are_joined(engine).values())
    call_each_layer(engine)
    assert all(map(torch.equal, after, logits(engine)))


def test_a_linear_that_cannot_be_joined_runs_by_itself_until_it_can(engine: Engine) -> None:
    """A linear that cannot be joined runs by itself, and is joined again once that is possible."""
    model, name = engine.loaded.runner.model, "model.layers.1.mlp.up_proj"
    layer = engine.loaded.frozen[name]
    before = logits(engine)
    model.set_submodule(name, nn.Linear(layer.in_features, layer.out_features, dtype=torch.bfloat16))
    assert not any(map(torch.equal, before, logits(engine)))
    assert projections_are_joined(engine)["1.gate_up"] is False
    model.set_submodule(name, layer)
    assert all(map(torch.equal, before, logits(engine)))
    assert all(projections_are_joined(engine).values())


@pytest.mark.parametrize("name", ["input_layernorm", "post_attention_layernorm"])
def test_replacing_a_norm_takes_effect(engine: Engine, name: str) -> None:
    layer: Any = engine.loaded.runner.model.model.layers[1]
    norm = getattr(layer, name)
    for change in (
        lambda: norm.weight.data.mul_(2),
        lambda: setattr(norm.weight, "data", norm.weight.data * 2),
        lambda: setattr(norm, "weight", nn.Parameter(norm.weight.detach() / 2)),
        lambda: setattr(norm, "eps", 1.0),
        lambda: setattr(layer, name, nn.RMSNorm(SIZES["hidden_size"], dtype=torch.bfloat16)),
    ):
        assert_takes_effect(engine, lambda _, change=change: change(), None)
        for linear, frozen in engine.loaded.frozen.items():
            engine.loaded.runner.model.set_submodule(linear, frozen)


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_loading_another_state_dict_takes_effect(engine: Engine, other: Path, assign: bool) -> None:
    """Unpacked weights with one scale each are loaded into joined, packed weights."""
    state = load_servable(other, DelayedScaling(), other / "made-up").state_dict()
    before = logits(engine)
    engine.loaded.runner.model.load_state_dict(state, assign=assign)
    after = logits(engine)
    assert not any(map(torch.equal, before, after))
    assert all(map(torch.equal, after, logits(loaded(other))))


def test_functional_call_uses_its_tensors(engine: Engine) -> None:
    """torch.func.functional_call puts them into the modules' dictionaries, past every setter."""
    model, name = engine.loaded.runner.model, "model.layers.0.self_attn.k_proj"
    weight = engine.loaded.frozen[name].weight_q
    other = {f"{name}.weight_q": negated(weight), "model.layers.1.input_layernorm.weight": torch.rand(256).bfloat16()}
    before, forward = logits(engine), model.forward

    def called(*args: Any) -> Any:
        model.forward = forward  # type: ignore[method-assign]
        try:
            return torch.func.functional_call(model, other, args)
        finally:
            model.forward = called  # type: ignore[method-assign]

    model.forward = called  # type: ignore[method-assign]
    assert not any(map(torch.equal, before, logits(engine)))
    model.forward = forward  # type: ignore[method-assign]
    assert all(map(torch.equal, before, logits(engine)))
    assert all(projections_are_joined(engine).values())


def test_hooks_of_joined_and_fused_modules_are_called(engine: Engine) -> None:
    """The hooks are on a joined layer, on one that adds to the residual, on a norm, and on the modules around them."""
    model: Any = engine.loaded.runner.model
    calls: list[str] = []
    layer = model.model.layers[0]
    watched = {"k": layer.self_attn.k_proj, "o": layer.self_attn.o_proj, "norm": layer.input_layernorm,
               "attention": layer.self_attn, "mlp": layer.mlp, "layer": layer}  # fmt: skip
    before = logits(engine)
    handles = [
        module.register_forward_hook(lambda m, args, out, name=name: calls.append(name))
        for name, module in watched.items()
    ]
    assert all(map(torch.equal, before, logits(engine)))
    assert set(calls) == set(watched)
    for handle in handles:
        handle.remove()
    calls.clear()
    assert all(map(torch.equal, before, logits(engine)))
    assert calls == []
    assert all(projections_are_joined(engine).values())
