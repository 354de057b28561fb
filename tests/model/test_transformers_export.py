"""A model of transformers, trained in a user's own loop, is served with its scales from training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fp8serve
from fp8serve import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Linear, autocast, convert
from fp8serve.cli import main
from fp8serve.engine.engine import Engine
from fp8serve.errors import ModelError, RecipeError, ScalesError
from fp8serve.fp8 import ops
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import Recipe
from fp8serve.model.checkpoint import load_scales, load_servable, load_trainable
from fp8serve.model.transformers_export import restore_scaling
from tests.model.oracle import all_logits, make_model, write_tokenizer

RECIPE = DelayedScaling(amax_history_len=4)
IDS = torch.arange(24).reshape(2, 12) * 7 % 256


def train(model: nn.Module, steps: int = 3, recipe: Recipe | None = RECIPE) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        with autocast(enabled=recipe is not None, recipe=recipe):
            loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def trained(folder: Path, kind: str = "llama", recipe: Recipe | None = RECIPE, **options: Any) -> Any:
    """Returns a model loaded from `folder`/base (which also gets a tokenizer), converted to FP8 and trained."""
    model = make_model(kind, folder / "base", **options)
    write_tokenizer(folder / "base")
    return train(convert(model), recipe=recipe)


def layers(model: nn.Module) -> dict[str, Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, Linear)}


def logits(model: Any, recipe: Recipe) -> Tensor:
    with torch.no_grad(), autocast(recipe=recipe):
        output: Tensor = model(input_ids=IDS[:1]).logits[0].float()
    return output


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "llama-tied",
        "llama-bias",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3",
        "granite",
        "smollm3",
        "apertus",
    ],
)
def test_the_served_model_has_the_logits_of_training(kind: str, tmp_path: Path) -> None:
    model = trained(tmp_path, kind)
    assert fp8serve.export(model, tmp_path / "out", recipe=RECIPE) == tmp_path / "out"
    served = load_servable(tmp_path / "out")
    for name, layer in layers(model).items():
        frozen, state = served.get_submodule(name), layer.scaling
        assert isinstance(frozen, FrozenLinear)
        q, _ = ops.quantize(layer.weight.detach(), scale=state["weight"].scale)
        assert torch.equal(frozen.weight_q.float(), q.float())
        assert frozen.input_scale is not None
        assert torch.equal(frozen.input_scale, state["input"].scale)
    here, there = logits(model, RECIPE), all_logits(served, IDS[0].tolist())
    assert (here - there).norm() < 0.05 * here.norm()


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj", "model.embed_tokens"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_diverged_model_is_refused(name: str, value: float, tmp_path: Path) -> None:
    model = trained(tmp_path)
    model.get_parameter(f"{name}.weight").data[0, 0] = value
    with pytest.raises(ModelError, match=rf"The weight {name}.weight holds NaN or an infinity; a model that diverged"):
        fp8serve.export(model, tmp_path / "out", recipe=RECIPE)
    assert not (tmp_path / "out").exists()


def test_amax_histories_of_training_are_exported(tmp_path: Path) -> None:
    model = trained(tmp_path)
    fp8serve.export(model, tmp_path / "out", recipe=RECIPE)
    scales = load_scales(tmp_path / "out" / "scales.safetensors", tmp_path / "out")
    live = {f"{n}.{kind}": s for n, layer in layers(model).items() for kind, s in layer.scaling.items()}
    assert scales.recipe == RECIPE
    assert scales.tensors.keys() == live.keys()
    for key, entry in scales.tensors.items():
        assert entry.amax_history is not None
        assert torch.equal(entry.scale, live[key].scale)
        assert torch.equal(entry.amax_history, live[key].amax_history)
    assert scales.observations["tensors"]["model.layers.0.mlp.up_proj.input"] == 3


def test_the_product_serves_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = trained(tmp_path, dtype=torch.float32)
    fp8serve.export(model, tmp_path / "out", recipe=RECIPE)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert "model.layers.0.mlp.up_proj" in capsys.readouterr().out
    engine = Engine(tmp_path / "out")
    assert len(engine.generate(["the thing"], max_new_tokens=4, ignore_eos=True)[0].token_ids) == 4


@pytest.mark.parametrize(
    ("recipe", "granularity"),
    [
        (Float8CurrentScaling(), "tensor"),
        (Float8CurrentScaling(granularity="row"), "row"),
        (Float8BlockScaling(), "block128x128"),
    ],
)
def test_recipes_without_state_are_exported_by_content(recipe: Recipe, granularity: Any, tmp_path: Path) -> None:
    model = trained(tmp_path, recipe=recipe)
    fp8serve.export(model, tmp_path / "out", recipe=recipe)
    served = load_servable(tmp_path / "out")
    for name, layer in layers(model).items():
        q, _ = ops.quantize(layer.weight.detach(), granularity=granularity)
        assert torch.equal(served.get_submodule(name).weight_q.float(), q.float())  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("recipe", [None, DelayedScaling(override_linear_precision=(True, False, False))])
def test_layers_trained_in_high_precision_are_served_in_high_precision(recipe: Recipe | None, tmp_path: Path) -> None:
    model = trained(tmp_path, recipe=recipe)
    fp8serve.export(model, tmp_path / "out", recipe=recipe)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    served = load_trainable(tmp_path / "out", dtype=torch.bfloat16)
    assert torch.equal(served.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)  # type: ignore[union-attr, index]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a warning of torch's tracer
def test_wrappers_do_not_change_what_is_written(tmp_path: Path) -> None:
    model = trained(tmp_path)
    fp8serve.export(model, tmp_path / "plain", recipe=RECIPE)
    model.model.layers[0] = torch.compile(model.model.layers[0])
    fp8serve.export(torch.compile(model), tmp_path / "compiled", recipe=RECIPE)  # type: ignore[arg-type]
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "compiled" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_a_data_parallel_model_is_exported(tmp_path: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(trained(tmp_path))
        fp8serve.export(model, tmp_path / "out", recipe=RECIPE)
    finally:
        dist.destroy_process_group()
    assert load_scales(tmp_path / "out" / "scales.safetensors", tmp_path / "out").recipe == RECIPE


@pytest.mark.parametrize("how", ["object", "directory"])
def test_the_tokenizer_comes_from_where_the_caller_says(how: str, tmp_path: Path) -> None:
    model = trained(tmp_path)
    tokenizer = write_tokenizer(tmp_path / "elsewhere", template="{{ messages[0]['content'] }}")
    source = tokenizer if how == "object" else tmp_path / "elsewhere"
    fp8serve.export(model, tmp_path / "out", recipe=RECIPE, tokenizer=source)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded.chat_template == "{{ messages[0]['content'] }}"


def test_models_that_cannot_be_exported_are_refused(tmp_path: Path) -> None:
    model, out = trained(tmp_path), tmp_path / "out"
    bloom = transformers.BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=32)
    partly = convert(make_model("llama", tmp_path / "partly"), skip=("lm_head", "down_proj"))
    refused: list[tuple[type[Exception], str, nn.Module, Recipe]] = [
        (ModelError, "has no configuration of transformers", nn.Linear(2, 2), RECIPE),
        (ModelError, "BloomForCausalLM", transformers.BloomForCausalLM(bloom), RECIPE),
        (ModelError, "down_proj was not converted", train(partly), RECIPE),
        (ScalesError, "has not run with gradients", convert(make_model("llama", tmp_path / "fresh")), RECIPE),
    ]
    for base in ("partly", "fresh"):
        write_tokenizer(tmp_path / base)
    for kind, words, wrong, recipe in refused:
        with pytest.raises(kind, match=words):
            fp8serve.export(wrong, out, recipe=recipe, tokenizer=tmp_path / "base")
    with pytest.raises(RecipeError, match="recipe must be the recipe of the training, or None, found 'delayed'"):
        fp8serve.export(model, out, recipe="delayed")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="The format 'gguf' does not exist"):
        fp8serve.export(model, out, recipe=RECIPE, format="gguf")
    (tmp_path / "base" / "tokenizer.json").unlink()
    (tmp_path / "base" / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match="no tokenizer in"):
        fp8serve.export(model, out, recipe=RECIPE)
    out.mkdir()
    (out / "taken").touch()
    with pytest.raises(ModelError, match="not empty"):
        fp8serve.export(model, out, recipe=RECIPE, tokenizer=tmp_path / "fresh")


class Own(transformers.LlamaForCausalLM):
    """A user's subclass with the computation of its base class."""


def test_the_class_of_the_model_decides_the_architecture(tmp_path: Path) -> None:
    model = trained(tmp_path)
    with pytest.raises(ModelError, match="LlamaModel cannot be exported; give the causal"):
        fp8serve.export(model.model, tmp_path / "out", recipe=RECIPE)
    model.__class__ = Own
    fp8serve.export(model, tmp_path / "out", recipe=RECIPE)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_what_is_staged_is_not_exported(tmp_path: Path) -> None:
    model = trained(tmp_path)
    with autocast(recipe=RECIPE):
        model(input_ids=IDS)
        fp8serve.export(model, tmp_path / "out", recipe=RECIPE)
    scales = load_scales(tmp_path / "out" / "scales.safetensors", tmp_path / "out")
    assert all(e.amax_history is not None and e.amax_history[0] == 0 for e in scales.tensors.values())


def test_a_converted_head_is_announced(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "base")
    write_tokenizer(tmp_path / "base")
    train(convert(model, skip=()))
    with pytest.warns(UserWarning, match="lm_head ran in FP8 and will be served in high precision"):
        fp8serve.export(model, tmp_path / "out", recipe=RECIPE)
    assert load_servable(tmp_path / "out").lm_head.weight.dtype is torch.bfloat16


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_save_pretrained_and_from_pretrained_go_on_with_the_same_bits(kind: str, shard: str, tmp_path: Path) -> None:
    model = trained(tmp_path, kind)
    model.save_pretrained(tmp_path / "saved", max_shard_size=shard)
    again: Any = convert(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved"))
    assert restore_scaling(again, tmp_path / "saved") == 3 * len(layers(model))
    for mine, its in zip(layers(model).values(), layers(again).values(), strict=True):
        for name, state in mine.scaling.items():
            assert all(torch.equal(value, getattr(its.scaling[name], field)) for field, value in vars(state).items())
    train(model), train(again)
    same = zip(model.state_dict().items(), again.state_dict().items(), strict=True)
    assert all(here == there and torch.equal(a, b) for (here, a), (there, b) in same)


def test_our_readers_pass_over_the_states_of_training(tmp_path: Path) -> None:
    model = trained(tmp_path)
    model.save_pretrained(tmp_path / "saved")
    assert "model.layers.0.mlp.up_proj.input.scale" in load_file(tmp_path / "saved" / "model.safetensors")
    loaded = load_trainable(tmp_path / "saved", dtype=torch.bfloat16)
    assert torch.equal(loaded.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)  # type: ignore[union-attr, index]
    load_servable(tmp_path / "saved", recipe=Float8CurrentScaling())


def test_training_goes_on_from_a_served_directory(tmp_path: Path) -> None:
    model = trained(tmp_path)
    fp8serve.export(model, tmp_path / "out", recipe=RECIPE)
    again: Any = convert(make_model("llama", tmp_path / "other"))
    assert restore_scaling(again, tmp_path / "out") == 3 * len(layers(model))
    for mine, its in zip(layers(model).values(), layers(again).values(), strict=True):
        assert torch.equal(mine.scaling["input"].scale, its.scaling["input"].scale)
        assert torch.equal(mine.scaling["grad_output"].amax_history, its.scaling["grad_output"].amax_history)
    write_tokenizer(tmp_path / "other")
    fp8serve.export(again, tmp_path / "at once", recipe=RECIPE)  # as calibrated, without a step in between


def test_states_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    model = trained(tmp_path)
    with pytest.raises(ScalesError, match="holds no scaling state of a layer of this model"):
        restore_scaling(model, tmp_path / "base")
    layers(model)["model.layers.0.mlp.up_proj"].scaling["input"].scale.fill_(float("nan"))
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ScalesError, match=r"model.layers.0.mlp.up_proj.input has the scale nan"):
        restore_scaling(model, tmp_path / "saved")
