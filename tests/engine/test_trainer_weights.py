"""Weights from a trainer: after an exchange the engine has the bits of one that loaded the same weights from a
directory; tensors that do not suit the model change nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8serve.engine import packing
from fp8serve.engine.engine import Engine
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import Fp8ServeError, IncompleteError
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.model.checkpoint import ScalingCheckpoint, TensorScale, load_scales, load_servable
from fp8serve.model.export import write_calibrated

from .test_load_weights import answers, models, write_fp8_model
from .tiny import write_model, write_scales
from .trainer import send, tensors_in, update

__all__ = ["models"]  # a fixture
State = dict[str, Tensor]
FP8 = torch.float8_e4m3fn


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("packs", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mixtral", "qwen3_moe", "gpt_oss"])
def test_fp8_weights_give_the_bits_of_their_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, packs: bool
) -> None:
    monkeypatch.setattr(packing, "worth_packing", lambda: packs)
    one, other = write_fp8_model(tmp_path / "one", 0, kind), write_fp8_model(tmp_path / "other", 1, kind)
    engine, expected = Engine(one), answers(Engine(other))
    engine.pack_weights()
    assert answers(engine) != expected
    update(engine, tensors_in(other))
    assert answers(engine) == expected
    assert engine.info()["weights_version"] == 1


@pytest.mark.parametrize(
    "recipe", ["bf16", "rowwise", "block", "current", "mxfp8", "nvfp4", "w8a16", "nvfp4-w4a16", "mxfp4-w4a16"]
)
def test_weights_in_bf16_are_quantized_with_the_recipe_of_the_engine(tmp_path: Path, recipe: str) -> None:
    one, other = (write_model(tmp_path / f"{seed}", seed=seed) for seed in (0, 1))
    engine, expected = Engine(one, recipe=recipe), answers(Engine(other, recipe=recipe))
    update(engine, tensors_in(other))
    assert answers(engine) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_type_in_which_weights_arrive_may_be_another(tmp_path: Path, dtype: torch.dtype) -> None:
    one, other = (write_model(tmp_path / f"{seed}", seed=seed) for seed in (0, 1))
    engine, expected = Engine(one, recipe="rowwise"), answers(Engine(other, recipe="rowwise"))
    update(engine, {name: tensor.to(dtype) for name, tensor in tensors_in(other).items()})
    assert answers(engine) == expected  # every BF16 number of these weights is a number of both types


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_an_fp8_head_is_cast_again(tmp_path: Path, kind: str) -> None:
    one, other = (write_model(tmp_path / f"{seed}", kind, seed=seed) for seed in (0, 1))
    options = {"recipe": "rowwise", "head_dtype": "fp8"}
    engine, expected = Engine(one, **options), answers(Engine(other, **options))
    update(engine, tensors_in(other))
    assert answers(engine) == expected


def calibrated(path: Path, base: Path, recipe: DelayedScaling, weight_scales: dict[str, float]) -> Path:
    """Writes an FP8 directory of `base` with the input scale 20 and these weight scales."""
    scales = load_scales(write_scales(base, path.with_suffix(".scales")), base)
    tensors = {key: TensorScale(torch.tensor(weight_scales.get(key, 20.0))) for key in scales.tensors}
    write_calibrated(path, base, ScalingCheckpoint(recipe, tensors, scales.model))
    return path


@pytest.mark.parametrize(
    "recipe", [DelayedScaling(), DelayedScaling(margin=2), DelayedScaling(weight_granularity="row")]
)
def test_weights_in_bf16_follow_the_rule_of_the_calibrated_directory(tmp_path: Path, recipe: DelayedScaling) -> None:
    """The scale of a weight is `(448 / 2^margin) / amax`, one for q, k and v, and one for gate and up. The scale of an
    input stays."""
    one, other = (write_model(tmp_path / f"{seed}", seed=seed) for seed in (0, 1))
    engine = Engine(calibrated(tmp_path / "one", one, recipe, {}))
    weights = tensors_in(other)
    amaxes = {name: float(t.abs().max()) for name, t in weights.items() if t.dim() == 2 and ".layers." in name}
    joined = [("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")]
    for layer in range(2):
        for group in joined:
            names = [f"model.layers.{layer}.{part}.weight" for part in group]
            amaxes |= dict.fromkeys(names, max(amaxes[name] for name in names))
    scales = {name: float(torch.tensor(448 / 2**recipe.margin) / torch.tensor(amax)) for name, amax in amaxes.items()}
    expected = answers(Engine(calibrated(tmp_path / "expected", other, recipe, scales)))
    update(engine, weights)
    assert answers(engine) == expected


def test_an_input_scale_that_does_not_arrive_stays(models: tuple[Path, Path]) -> None:
    engine, weights = Engine(models[0]), tensors_in(models[1])
    update(engine, {name: tensor for name, tensor in weights.items() if not name.endswith("input_scale")})
    assert answers(engine) == answers(Engine(models[1]))  # both have the input scale 20
    doubled = {name: 2 * t if name.endswith("input_scale") else t for name, t in weights.items()}
    update(engine, doubled)
    layer = engine.loaded.frozen["model.layers.0.self_attn.q_proj"]
    assert layer.input_scale is not None
    assert float(layer.input_scale) == 10
    update(engine, {name: tensor for name, tensor in weights.items() if not name.endswith("input_scale")})
    assert float(engine.loaded.frozen["model.layers.0.self_attn.q_proj"].input_scale) == 10  # type: ignore[arg-type]


def test_our_own_trainer_sends_the_tensors_of_the_served_model(models: tuple[Path, Path]) -> None:
    engine = Engine(models[0])
    update(engine, load_servable(models[1]).state_dict())
    assert answers(engine) == answers(Engine(models[1]))


def of_our_own_trainer(directory: Path) -> State:
    return load_servable(directory).state_dict()


@pytest.mark.parametrize(
    ("kind", "tensors_of"),
    [("llama", tensors_in), ("qwen3_moe", tensors_in), ("gpt_oss", tensors_in), ("llama", of_our_own_trainer)],
)
def test_weights_arrive_in_parts(tmp_path: Path, kind: str, tensors_of: Callable[[Path], State]) -> None:
    one, other = (write_fp8_model(tmp_path / f"{seed}", seed, kind) for seed in (0, 1))
    engine, before = Engine(one), answers(Engine(one))
    weights = list(tensors_of(other).items())
    send(engine, dict(weights[:5]))
    with pytest.raises(IncompleteError, match=r"lacks? .* and \d+ more;|hold only 5 tensors"):
        engine.stage_received_weights()
    for start in range(0, len(weights), 7):
        assert engine.stage_received_weights(allow_incomplete=True) is None
        send(engine, dict(weights[start : start + 7]))
        assert answers(engine) == before
    assert engine.stage_received_weights(allow_incomplete=True) is not None
    engine.swap_weights()
    assert answers(engine) == answers(Engine(other))


def test_weights_of_two_updates_are_never_mixed(models: tuple[Path, Path]) -> None:
    """A name that arrives a second time begins another update."""
    engine = Engine(models[0])
    first, second = (list(tensors_in(model).items()) for model in models)
    send(engine, dict(first[:20]))
    send(engine, dict(second[:5]))
    send(engine, dict(second[20:]))
    with pytest.raises(IncompleteError):
        engine.stage_received_weights()


def test_the_digest_depends_on_the_weights(models: tuple[Path, Path]) -> None:
    digests = []
    for model in (models[0], models[1], models[0]):
        engine = Engine(models[0])
        send(engine, tensors_in(model))
        digests.append(engine.stage_received_weights())
    assert digests[0] == digests[2] != digests[1]


def test_the_scales_of_an_fp8_cache_stay(tmp_path: Path) -> None:
    models = []
    for seed in (0, 1):
        base = write_model(tmp_path / f"base-{seed}", seed=seed)
        scales = load_scales(write_scales(base, tmp_path / f"{seed}.scales", kv=True), base)
        write_calibrated(tmp_path / f"{seed}", base, scales)
        models.append(tmp_path / f"{seed}")
    engine, expected = Engine(models[0], kv_cache_dtype="fp8"), answers(Engine(models[1], kv_cache_dtype="fp8"))
    weights = {name: t for name, t in tensors_in(models[1]).items() if not name.endswith(("k_scale", "v_scale"))}
    update(engine, weights)
    assert answers(engine) == expected


QUERY = "model.layers.0.self_attn.q_proj"


def with_nan(state: State) -> None:
    state["model.norm.weight"][3] = torch.nan


def with_fp8_nan(state: State) -> None:
    state[f"{QUERY}.weight"].view(torch.uint8)[0, 0] = 0x7F


def with_zero_scale(state: State) -> None:
    state[f"{QUERY}.weight_scale"].zero_()


def with_negative_input_scale(state: State) -> None:
    state[f"{QUERY}.input_scale"].neg_()


def without_scale(state: State) -> None:
    del state[f"{QUERY}.weight_scale"]


def without_key_projection(state: State) -> None:
    for part in ("weight", "weight_scale", "input_scale"):
        del state[f"model.layers.0.self_attn.k_proj.{part}"]


def with_another_shape(state: State) -> None:
    state["model.norm.weight"] = torch.ones(65, dtype=torch.bfloat16)


def with_an_unknown_tensor(state: State) -> None:
    state["model.extra.weight"] = torch.ones(2, dtype=torch.bfloat16)


def with_another_type(state: State) -> None:
    state["model.norm.weight"] = torch.ones(64, dtype=torch.int32)


def with_infinity_in_bf16(state: State) -> None:
    weight = torch.full((64, 64), 0.1, dtype=torch.bfloat16)
    weight[2, 2] = torch.inf
    state[f"{QUERY}.weight"] = weight
    del state[f"{QUERY}.weight_scale"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (with_nan, "model.norm.weight holds NaN or an infinity"),
        (with_fp8_nan, f"{QUERY}.weight_q holds NaN"),
        (with_zero_scale, "weight_scale"),
        (with_negative_input_scale, "input_scale"),
        (without_scale, "has no weight_scale"),
        (without_key_projection, "lacks the tensor model.layers.0.self_attn.k_proj.weight"),
        (with_another_shape, "requires"),
        (with_an_unknown_tensor, "does not have"),
        (with_another_type, "which is not supported"),
        (with_infinity_in_bf16, f"{QUERY}.weight holds NaN or an infinity"),
    ],
)
def test_tensors_that_do_not_suit_change_nothing(
    models: tuple[Path, Path], spoil: Callable[[State], None], message: str
) -> None:
    engine, state = Engine(models[0]), tensors_in(models[1])
    before = answers(engine)
    spoil(state)
    send(engine, state)
    with pytest.raises(Fp8ServeError, match=message) as error:
        engine.stage_received_weights()
    assert str(models[0]) not in str(error.value)
    assert answers(engine) == before
    update(engine, tensors_in(models[1]))
    assert answers(engine) == answers(Engine(models[1]))


# -- suspended requests ------------------------------------------------------------------------------------------------


def request(name: str, tokens: int = 24, group: str = "client", **params: Any) -> Request:
    options = SamplingParams(max_new_tokens=tokens, ignore_eos=True, **params)
    return Request(name, tuple(range(40)), options, group=group)


def finish(engine: Engine, tokens: dict[str, list[int]]) -> None:
    while engine.has_work():
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)


@pytest.mark.parametrize("options", [{}, {"speculative_tokens": 3}, {"max_num_seqs": 1}], ids=str)
def test_suspended_requests_continue_with_the_same_tokens(models: tuple[Path, Path], options: Any) -> None:
    expected: dict[str, list[int]] = {}
    engine = Engine(models[0], **options)
    for name in "abc":
        engine.add_request(request(name, seed=5))
    finish(engine, expected)
    engine, tokens = Engine(models[0], **options), dict[str, list[int]]()
    for name in "ab":
        engine.add_request(request(name, seed=5))
    for _ in range(6):
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    engine.suspend()
    engine.suspend()  # changes nothing
    engine.add_request(request("c", seed=5))
    assert not engine.has_work()
    assert engine.stats()["waiting"] == 3
    engine.resume()
    finish(engine, tokens)
    assert tokens == expected


def test_suspended_requests_continue_with_new_weights(models: tuple[Path, Path]) -> None:
    engine, tokens = Engine(models[0]), list[int]()
    engine.add_request(request("a", temperature=0.0))
    for _ in range(6):
        tokens += [token for output in engine.step() for token in output.token_ids]
    engine.suspend()
    update(engine, tensors_in(models[1]))
    engine.add_request(request("canary", tokens=2, group="", temperature=0.0))  # the server's own runs meanwhile
    own: dict[str, list[int]] = {}
    finish(engine, own)
    assert list(own) == ["canary"]
    engine.resume()
    rest: dict[str, list[int]] = {}
    finish(engine, rest)
    prompt = [*range(40), *tokens]
    (expected,) = Engine(models[1]).generate(
        [prompt], max_new_tokens=24 - len(tokens), temperature=0.0, ignore_eos=True
    )
    assert rest["a"] == expected.token_ids


def test_weights_are_not_exchanged_while_requests_run(models: tuple[Path, Path]) -> None:
    engine = Engine(models[0])
    engine.add_request(request("a"))
    engine.step()
    send(engine, tensors_in(models[1]))
    engine.stage_received_weights()
    with pytest.raises(Fp8ServeError, match="1 requests are running"):
        engine.swap_weights()
    with pytest.raises(Fp8ServeError, match="1 requests are running"):
        engine.reset_prefix_cache()
    engine.suspend()
    engine.swap_weights()
    assert [output.finish_reason for output in engine.abort_requests_of_clients()] == ["abort"]
    assert engine.stats()["waiting"] == 0
    engine.resume()
    assert answers(engine) == answers(Engine(models[1]))
