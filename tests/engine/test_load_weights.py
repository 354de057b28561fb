"""`Engine.load_weights`: the engine then has the bits of a freshly loaded model; a failure changes nothing; no cached
prefix of the old weights is used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8serve.engine import packing, weights
from fp8serve.engine.engine import Engine
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import Fp8ServeError, ModelError, RequestError, ScalesError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.model.checkpoint import load_scales, load_servable
from fp8serve.model.export import write_calibrated

from .tiny import write_model, write_scales

PROMPTS = [list(range(60)), [5, 250, 7, 7, 9, 100, 3], list(range(40, 80))]
State = dict[str, Tensor]


def write_fp8_model(path: Path, seed: int, kind: str = "llama", **overrides: Any) -> Path:
    """Writes an FP8 model directory to `path` and returns it."""
    base = write_model(path / "base", kind, seed, **overrides)
    scales = load_scales(write_scales(base, path / "scales.safetensors"), base)
    write_calibrated(path / "fp8", base, scales)
    return path / "fp8"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("weights")
    return write_fp8_model(root / "one", 0), write_fp8_model(root / "other", 1)


def answers(engine: Engine) -> list[Any]:
    completions = engine.generate(PROMPTS, max_new_tokens=8, temperature=1.0, seed=3, logprobs=0, ignore_eos=True)
    return [(one.token_ids, [item.logprob for item in one.logprobs or ()]) for one in completions]


def state_dict_of(path: Path, recipe: Any = "stored") -> State:
    return load_servable(path, recipe).state_dict()


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("packs", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mixtral", "qwen3_moe"])
def test_loaded_weights_give_the_bits_of_a_new_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, packs: bool
) -> None:
    monkeypatch.setattr(packing, "worth_packing", lambda: packs)
    one, other = write_fp8_model(tmp_path / "one", 0, kind), write_fp8_model(tmp_path / "other", 1, kind)
    engine, expected = Engine(one), answers(Engine(other))
    engine.pack_weights()
    first = answers(engine)
    assert first != expected
    assert engine.load_weights(state_dict_of(other)) == 1
    assert answers(engine) == expected
    assert engine.load_weights(one) == 2
    assert answers(engine) == first
    assert engine.info()["weights_version"] == 2


@pytest.mark.parametrize(
    "recipe", ["bf16", "rowwise", "block", "current", "mxfp8", "nvfp4", "w8a16", "nvfp4-w4a16", "mxfp4-w4a16"]
)
def test_a_directory_is_loaded_with_the_engines_recipe(tmp_path: Path, recipe: str) -> None:
    one, other = (write_model(tmp_path / f"{seed}", seed=seed) for seed in (0, 1))
    engine, expected = Engine(one, recipe=recipe), answers(Engine(other, recipe=recipe))
    assert answers(engine) != expected
    engine.load_weights(other)
    assert answers(engine) == expected


def test_input_scales_may_differ_within_a_joined_group(models: tuple[Path, Path]) -> None:
    """q, k and v share the scale of their input until different scales are loaded."""
    state = state_dict_of(models[1])
    state["model.layers.0.self_attn.k_proj.input_scale"] *= 64
    engine = Engine(models[0])
    engine.load_weights(state)
    result = answers(engine)
    reference = Engine(models[1])
    reference.loaded.runner.model.load_state_dict(state)
    assert result == answers(reference) != answers(Engine(models[1]))
    engine.load_weights(models[1])
    assert answers(engine) == answers(Engine(models[1]))


def qkv_of(engine: Engine) -> list[FrozenLinear]:
    return [engine.loaded.frozen[f"model.layers.0.self_attn.{part}_proj"] for part in "qkv"]


def test_a_shared_weight_scale_is_written_in_place(models: tuple[Path, Path]) -> None:
    """A CUDA graph reads it at its old address."""
    engine = Engine(models[0])
    shared = [layer.weight_scale_inv for layer in qkv_of(engine)]
    state = {name: 2 * t if name.endswith("weight_scale_inv") else t for name, t in state_dict_of(models[1]).items()}
    engine.load_weights(state)
    for layer, scale in zip(qkv_of(engine), shared, strict=True):
        assert layer.weight_scale_inv is scale
        assert layer.shares_weight_scale
        assert torch.equal(scale, state["model.layers.0.self_attn.k_proj.weight_scale_inv"])
    assert answers(engine) != answers(Engine(models[1]))


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("by_engine", [False, True])
def test_weight_scales_may_differ_within_a_joined_group(
    models: tuple[Path, Path], by_row: bool, by_engine: bool
) -> None:
    """q, k and v share one weight scale until different scales are loaded."""
    engine, reference, state = Engine(models[0]), Engine(models[1]), state_dict_of(models[1])
    name = "model.layers.0.self_attn.k_proj.weight_scale_inv"
    scale = state[name] * 64
    state[name] = scale.expand(qkv_of(engine)[1].out_features, 1).clone() if by_row else scale
    qkv_of(reference)[1].weight_scale_inv = scale.clone()
    (engine.load_weights if by_engine else engine.loaded.runner.model.load_state_dict)(state)
    assert answers(engine) == answers(reference) != answers(Engine(models[1]))
    assert not any(layer.shares_weight_scale for layer in qkv_of(engine))
    engine.load_weights(models[1])
    assert answers(engine) == answers(Engine(models[1]))


@pytest.mark.parametrize("factors", [(2.0, 2.0, 2.0), (1.0, 64.0, 1.0)], ids=["shared", "different"])
def test_a_failed_load_restores_weight_scales_of_a_joined_group(
    models: tuple[Path, Path], factors: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, state = Engine(models[0]), state_dict_of(models[1])
    before, expected = answers(engine), {name: t.clone() for name, t in state_dict_of(models[0]).items()}
    for part, factor in zip("qkv", factors, strict=True):
        state[f"model.layers.0.self_attn.{part}_proj.weight_scale_inv"].mul_(factor)
    write, failures = weights._write_tensor, ["no memory"]

    def fail_once(model: Any, name: str, tensor: torch.Tensor) -> None:
        if name.endswith("weight_q") and failures:
            raise RuntimeError(failures.pop())
        write(model, name, tensor)

    monkeypatch.setattr(weights, "_write_tensor", fail_once)
    with pytest.raises(RuntimeError, match="no memory"):
        weights.exchange_weights(engine.loaded.runner.model, state)
    for part, layer in zip("qkv", qkv_of(engine), strict=True):
        scale = expected[f"model.layers.0.self_attn.{part}_proj.weight_scale_inv"]
        assert torch.equal(layer.weight_scale_inv, scale.reshape(()).expand(layer.weight_scale_inv.shape))
    assert answers(engine) == before


def test_an_fp8_head_is_replaced(models: tuple[Path, Path]) -> None:
    engine = Engine(models[0], head_dtype="fp8")
    engine.load_weights(models[1])
    assert answers(engine) == answers(Engine(models[1], head_dtype="fp8"))
    with pytest.raises(ModelError, match=r"lack lm_head\.weight_q"):
        engine.load_weights(state_dict_of(models[0]))


def test_no_prefix_of_the_old_weights_is_used_or_saved(models: tuple[Path, Path], tmp_path: Path) -> None:
    engine = Engine(models[0], cache_dir=str(tmp_path))
    first = answers(engine)
    answers(engine)
    hits = engine.stats()["prefix_hit_tokens_total"]
    assert hits > 0
    engine.save_prefixes()
    contents = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    engine.load_weights(models[1])
    assert answers(engine) == answers(Engine(models[1]))
    assert engine.stats()["prefix_hit_tokens_total"] == hits
    engine.save_prefixes()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == contents
    restarted = Engine(models[0], cache_dir=str(tmp_path))
    assert answers(restarted) == first
    assert restarted.stats()["prefix_restored_hit_tokens_total"] > 0


def test_a_draft_model_stays_loaded(models: tuple[Path, Path]) -> None:
    engine = Engine(models[0], draft_model=str(models[0]))
    answers(engine)
    engine.load_weights(models[1])
    assert answers(engine) == answers(Engine(models[1]))


def test_input_statistics_are_reset(models: tuple[Path, Path]) -> None:
    engine = Engine(models[0])
    answers(engine)
    state = {name: t * 2 if name.endswith("input_scale") else t for name, t in state_dict_of(models[1]).items()}
    engine.load_weights(state)
    records = engine.scales()
    assert all(record["amax"] == 0 for record in records)
    assert {record["scale"] for record in records} == {40.0}
    assert {record["calibrated_amax"] for record in records} == {448 / 40}


Q = "model.layers.0.self_attn.q_proj"


def without(name: str) -> Callable[[State], Any]:
    return lambda state: {key: tensor for key, tensor in state.items() if key != name}


def changed(name: str, tensor: Tensor) -> Callable[[State], Any]:
    return lambda state: {**state, name: tensor}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (without(f"{Q}.weight_q"), ModelError, f"The new weights lack {Q}.weight_q; provide all weights"),
        (without("model.norm.weight"), ModelError, "lack model.norm.weight"),
        (changed("model.layers.2.x", torch.ones(1)), ModelError, "has no model.layers.2.x"),
        (changed(f"{Q}.weight_q", torch.ones(64, 64)), ModelError, "float8_e4m3fn [64, 64] in this model, found"),
        (
            changed(f"{Q}.weight_q", torch.ones(32, 64).to(torch.float8_e4m3fn)),
            ModelError,
            "[64, 64] in this model, found float8_e4m3fn [32, 64]",
        ),
        (changed("model.norm.weight", torch.ones(64)), ModelError, "bfloat16 [64] in this model, found float32 [64]"),
        (
            changed("model.norm.weight", torch.full((64,), torch.nan, dtype=torch.bfloat16)),
            ModelError,
            "model.norm.weight holds NaN",
        ),
        (
            changed(f"{Q}.weight_q", torch.full((64, 64), torch.nan).to(torch.float8_e4m3fn)),
            ModelError,
            "weight_q holds NaN",
        ),
        (changed(f"{Q}.input_scale", torch.tensor(0.0)), ScalesError, "input_scale holds a scale that is not a"),
        (changed(f"{Q}.weight_scale_inv", torch.tensor(torch.inf)), ScalesError, "weight_scale_inv holds a scale"),
        (changed(f"{Q}.weight_scale_inv", torch.ones(3)), ModelError, "found float32 [3]"),
        (
            changed("lm_head.weight", torch.zeros(260, 64, dtype=torch.bfloat16)),
            ModelError,
            "lm_head.weight is model.embed_tokens.weight in this model, and the new",
        ),
    ],
)  # fmt: skip
def test_invalid_weights_are_refused_and_change_nothing(
    models: tuple[Path, Path], change: Callable[[State], Any], error: type[Fp8ServeError], message: str
) -> None:
    engine = Engine(models[0])
    before = answers(engine)
    with pytest.raises(error) as caught:
        engine.load_weights(change(state_dict_of(models[1])))
    assert message in str(caught.value)
    assert answers(engine) == before
    assert engine.weights_version == 0


def test_directories_of_other_models_are_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    engine = Engine(models[0])
    before = answers(engine)
    for other in (
        write_fp8_model(tmp_path / "longer", 0, num_hidden_layers=3),
        write_fp8_model(tmp_path / "rope", 0, rope_theta=5e5),
    ):
        with pytest.raises(ModelError, match="has another configuration than"):
            engine.load_weights(other)
    with pytest.raises(ModelError):
        engine.load_weights(tmp_path / "nothing")
    assert answers(engine) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"roll_history": True}, "with roll_history"),
        ({"kv_cache_dtype": "fp8"}, "with an FP8 cache"),
    ],
)
def test_loading_is_refused_with_options_that_add_scales(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    base = write_model(tmp_path / "model")
    write_scales(base, base / "scales.safetensors", kv=True)
    engine = Engine(base, recipe=DelayedScaling(), **options)
    with pytest.raises(RequestError, match=message):
        engine.load_weights(base)


def test_loading_is_refused_while_a_request_runs(models: tuple[Path, Path]) -> None:
    engine = Engine(models[0])
    engine.add_request(Request("one", (1, 2, 3), SamplingParams(max_new_tokens=4)))
    engine.step()
    with pytest.raises(RequestError, match="1 requests are running"):
        engine.load_weights(models[1])
    engine.abort_all()
    engine.load_weights(models[1])
