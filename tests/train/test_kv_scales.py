"""Training carries the scales of an FP8 KV cache from a calibrated base model to the result."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8serve.calibration.data import Sample, make_batches
from fp8serve.calibration.observe import make_observer, observe
from fp8serve.calibration.pipeline import calibrate
from fp8serve.engine.engine import Engine
from fp8serve.engine.loading import derive_kv_cache_dtype
from fp8serve.engine.options import EngineOptions
from fp8serve.errors import RecipeError
from fp8serve.fp8 import dpa
from fp8serve.fp8.conversion import convert
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.recipe import DelayedScaling, from_name
from fp8serve.model.adapter_merge import merge
from fp8serve.model.checkpoint import kv_scales, load_scales, load_trainable
from fp8serve.train import state
from fp8serve.train.config import TrainConfig
from fp8serve.train.forward import Forward, collate, mean_loss
from fp8serve.train.scratch import write_random_model
from fp8serve.train.trainer import Trainer, TrainResult
from tests.compatibility.cases import KINDS
from tests.model.oracle import make_model

from .conftest import TEXTS, Configure, write_lines
from .test_forward import row
from .test_processes import SHARED, hashes_of, metrics_of, train_on
from .test_trainer import after, history, of_type, same_scales

NAMES = [f"model.layers.{layer}.self_attn.{part}" for layer in range(2) for part in "kv"]
LENGTH = 16  # of amax histories, with the staging slot


@pytest.fixture(scope="session")
def kv_dir(model_dir: Path) -> Path:
    """The tiny model, calibrated with scales of keys and values."""
    out = model_dir.parent / "kv"
    calibrate(model_dir, out=out, samples=4, seq_len=16, kv_cache=True)
    return out


@pytest.fixture
def with_kv(configure: Configure, kv_dir: Path) -> Configure:
    return partial(configure, model=str(kv_dir), amax_history_len=LENGTH)


def train(config: TrainConfig) -> tuple[TrainResult, list[dict[str, Any]]]:
    """Trains to the end. Returns the result and the metrics of the steps, without times."""
    events: list[dict[str, Any]] = []
    result = Trainer(config).run(events.append)
    times = ("time", "tokens_per_second")
    return result, [{k: v for k, v in e.items() if k not in times} for e in of_type(events, "metrics")]


def histories(model: str | Path | None) -> dict[str, Tensor]:
    """Returns the amax histories of keys and values in a result, oldest first, without the staging slot."""
    assert model is not None
    tensors = load_scales(Path(model) / "scales.safetensors", model).tensors
    return {name: history(tensors[name])[1:] for name in NAMES}


def initial_history(base: Path, name: str, steps: int) -> Tensor:
    """Returns the history with which a run from a calibrated base starts, without the slots that `steps` replace."""
    entry = load_scales(base / "scales.safetensors", base).tensors[name]
    assert entry.amax_history is None  # calibration stores none
    return torch.cat([torch.zeros(LENGTH - 2 - steps), (448 / entry.scale).view(1)])


@pytest.fixture
def amaxes(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Tensor]]:
    """The amaxes of keys and values in each forward pass with gradients, by tensor name."""
    amaxes: dict[str, list[Tensor]] = {name: [] for name in NAMES}
    served_attention, calls = dpa.served_attention, [0]

    def attention(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
        if torch.is_grad_enabled():
            layer = calls[0] % 2
            calls[0] += 1
            for part, x in (("k", k), ("v", v)):
                amaxes[f"model.layers.{layer}.self_attn.{part}"].append(x.detach().float().abs().max())
        return served_attention(q, k, v, *options)

    monkeypatch.setattr(dpa, "served_attention", attention)
    return amaxes


@pytest.mark.parametrize("format_", ["compressed-tensors", "modelopt", "fp8"])
def test_the_result_has_the_scales_of_keys_and_values(
    with_kv: Configure, kv_dir: Path, amaxes: dict[str, list[Tensor]], format_: str
) -> None:
    result, _ = train(with_kv(format=format_, max_steps=3, accumulate=2))
    assert result.model is not None
    trained_histories, scales = histories(result.model), kv_scales(result.model)
    for name, (layer, part) in zip(NAMES, [(0, 0), (0, 1), (1, 0), (1, 1)], strict=True):
        observed, *microbatches = amaxes[name]  # the first pass observes gradients in high precision
        assert len(microbatches) == 3 * 2
        steps = [torch.maximum(*microbatches[i : i + 2]) for i in (0, 2, 4)]
        newest = torch.stack([observed, *steps])
        assert torch.equal(trained_histories[name], torch.cat([initial_history(kv_dir, name, 4), newest]))
        assert scales[layer][part] == 448 / trained_histories[name].max()
    options = EngineOptions(device="cuda")
    declared = derive_kv_cache_dtype(Path(result.model), options, has_stored_weights=True)
    assert declared == ("bf16" if format_ == "fp8" else "fp8")  # the format "fp8" has no field for a cache
    engine = Engine(result.model, kv_cache_dtype="fp8")
    [done] = engine.generate(["the red fox"], max_new_tokens=4, temperature=0.0, ignore_eos=True)
    assert len(done.token_ids) == 4


def test_an_engine_with_an_fp8_cache_takes_the_result_in_place(with_kv: Configure, kv_dir: Path) -> None:
    result, _ = train(with_kv(max_steps=2, lr=0.05))
    assert result.model is not None
    engine = Engine(kv_dir, kv_cache_dtype="fp8")
    before, expected = answers(engine), answers(Engine(result.model, kv_cache_dtype="fp8"))
    engine.stage_weights(result.model)
    engine.swap_weights()
    assert answers(engine) == expected != before


def answers(engine: Engine) -> list[list[int]]:
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    return [done.token_ids for done in engine.generate(["the red fox", "two cats"], **options)]


def write_prompts(folder: Path) -> dict[str, Any]:
    reward = folder / "reward.py"
    reward.write_text("def reward(prompt, completion, row):\n    return completion.count('e') / 9\n")
    prompts = write_lines(folder / "prompts.jsonl", [{"prompt": text[:20]} for text in TEXTS[:6]])
    sizes = {"batch_size": 2, "num_generations": 3, "seq_len": 32, "max_completion_length": 8}
    return {"method": "grpo", "data": [str(prompts)], "reward": str(reward), **sizes}


def write_pairs(folder: Path) -> dict[str, Any]:
    pairs = [{"prompt": t[:20], "chosen": t[20:40], "rejected": t[40:60]} for t in TEXTS[:9]]
    return {"method": "dpo", "data": [str(write_lines(folder / "pairs.jsonl", pairs))]}


def calibrate_gradients(folder: Path) -> dict[str, Any]:
    """Returns a base with histories of gradients, too, so that no pass observes amaxes before the first step."""
    base = write_random_model(folder / "high-precision", TEXTS, vocab_size=320, hidden_size=64, layers=2, heads=4)
    calibrate(base, out=folder / "base", samples=4, seq_len=16, kv_cache=True, gradients=True)
    return {"model": str(folder / "base")}


RUNS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "gradients": calibrate_gradients,
    "sft": lambda folder: {"accumulate": 2, "eval_data": [str(folder / "data.jsonl")], "eval_every": 1},
    "recomputed": lambda folder: {"recompute": True, "accumulate": 2},
    "most recent": lambda folder: {"recipe_options": {"amax_compute_algo": "most_recent", "interval": 2, "margin": 1}},
    "dpo": write_pairs,
    "grpo": write_prompts,
}


@pytest.mark.parametrize("run", RUNS)
def test_weights_and_losses_are_those_of_a_run_without_these_scales(
    with_kv: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    options = {"max_steps": 3, **RUNS[run](tmp_path)}
    recording, metrics = train(with_kv(**options, out=str(tmp_path / "recording")))
    monkeypatch.setattr(state, "records_kv", lambda config, source: False)
    plain, plain_metrics = train(with_kv(**options, out=str(tmp_path / "plain")))
    assert len(metrics) == 3
    assert metrics == plain_metrics
    assert kv_scales(str(recording.model)).keys() == {0, 1}
    assert kv_scales(str(plain.model)) == {}
    for name in ("model", "optimizer"):
        files = [Path(str(result.checkpoint)) / f"{name}.safetensors" for result in (recording, plain)]
        assert files[0].read_bytes() == files[1].read_bytes()
    tensors, plain_tensors = (
        load_scales(Path(str(result.model)) / "scales.safetensors").tensors for result in (recording, plain)
    )
    assert tensors.keys() == plain_tensors.keys() | set(NAMES)
    for name, entry in plain_tensors.items():
        assert torch.equal(tensors[name].scale, entry.scale)
        assert torch.equal(history(tensors[name]), history(entry))


def test_a_resumed_run_has_the_scales_of_one_run(with_kv: Configure, kv_dir: Path, tmp_path: Path) -> None:
    through, _ = train(with_kv(out=str(tmp_path / "through")))
    base = tmp_path / "base"
    shutil.copytree(kv_dir, base)
    config = with_kv(model=str(base), out=str(tmp_path / "resumed"))
    Trainer(config).run(stop=after(3))
    shutil.rmtree(base)  # a resumed run needs no base model
    resumed, _ = train(config)
    assert kv_scales(str(resumed.model)).keys() == {0, 1}
    assert same_scales(Path(str(resumed.model)), Path(str(through.model)))


def test_a_result_can_be_trained_further(with_kv: Configure, tmp_path: Path) -> None:
    first, _ = train(with_kv(max_steps=2, out=str(tmp_path / "first")))
    second, _ = train(with_kv(model=str(first.model), max_steps=2, out=str(tmp_path / "second")))
    for name, amax_history in histories(second.model).items():
        assert torch.equal(amax_history[:-2], histories(first.model)[name][2:])


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": "current", "amax_history_len": None},
        {"recipe": "bf16", "amax_history_len": None},
        {"recipe_options": {"override_linear_precision": [True, False, False]}},
    ],
)
def test_runs_without_delayed_scaling_of_the_forward_pass_have_none(
    with_kv: Configure, options: dict[str, Any]
) -> None:
    result, _ = train(with_kv(max_steps=1, **options))
    assert kv_scales(str(result.model)) == {}


def test_a_base_of_another_tool_has_the_scales_among_its_tensors(
    with_kv: Configure, kv_dir: Path, tmp_path: Path
) -> None:
    base = shutil.copytree(kv_dir, tmp_path / "base")
    (base / "scales.safetensors").unlink()
    scales = kv_scales(base)
    assert scales == kv_scales(kv_dir)
    result, _ = train(with_kv(model=str(base), max_steps=1))
    for name, amax_history in histories(result.model).items():
        assert 448 / scales[int(name.split(".")[2])]["kv".index(name[-1])] in amax_history


def test_a_base_without_these_scales_gives_a_result_without(configure: Configure, fp8_dir: Path) -> None:
    for number, model in enumerate(({}, {"model": str(fp8_dir)})):
        config = configure(max_steps=1, **model)
        result, _ = train(configure(max_steps=1, **model, out=f"{config.out}-{number}"))
        assert kv_scales(str(result.model)) == {}
        quantization = json.loads((Path(str(result.model)) / "config.json").read_text())["quantization_config"]
        assert quantization["kv_cache_scheme"] is None


def test_an_adapter_keeps_the_scales_of_its_base(with_kv: Configure, kv_dir: Path, tmp_path: Path) -> None:
    """Neither input scales nor these are updated under an adapter, because the base model is frozen."""
    result, _ = train(with_kv(amax_history_len=None, lora_rank=4, lr=0.05, max_steps=2))
    merge(kv_dir, str(result.model), tmp_path / "merged", max_lost_fraction=1.0)
    assert kv_scales(tmp_path / "merged") == kv_scales(kv_dir)


@pytest.mark.distributed
@pytest.mark.parametrize("fsdp", [False, True])
def test_several_processes_have_the_scales_of_one(with_kv: Configure, tmp_path: Path, fsdp: bool) -> None:
    """The last step of an epoch has three microbatches, which two processes cannot share equally."""
    for count in (1, 2):
        train_on(count, with_kv(**SHARED, save_every=2, fsdp=fsdp and count > 1, out=str(tmp_path / str(count))))
    assert kv_scales(tmp_path / "1" / "model").keys() == {0, 1}
    assert hashes_of(tmp_path / "1") == hashes_of(tmp_path / "2")
    assert metrics_of(tmp_path / "1") == metrics_of(tmp_path / "2")


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gemma2"])
def test_the_amaxes_are_those_of_calibration(tmp_path: Path, family: str) -> None:
    make_model(KINDS[family], tmp_path)
    recipe, decoder = DelayedScaling(amax_history_len=4), load_trainable(tmp_path)
    convert(decoder)
    rows = [row(1, 20), row(2, 9)]
    forward = Forward(decoder, recipe, records_kv=True)
    forward.observe(mean_loss(collate(rows, "cpu")))
    amaxes = {
        name: float(s.amax_history[-1]) for name, s in state.scaling_states(forward) if name.endswith((".k", ".v"))
    }

    samples = [Sample(tuple(item.ids[:-1].tolist()), (True,) * item.tokens) for item in rows]
    calibrated = load_trainable(tmp_path, dtype=torch.bfloat16)
    linears = {name: m for name, m in convert(calibrated).named_modules() if isinstance(m, Linear)}
    observer = observe(
        calibrated,
        make_observer(calibrated, linears, recipe, kv_cache=True),
        make_batches(samples, 2),
        all_experts=True,
    )
    assert len(amaxes) == 2 * decoder.config.num_layers
    assert amaxes == {name: observer.records[name].amax for name in amaxes}


@pytest.mark.parametrize("recipe", [None, from_name("current"), DelayedScaling(fp8_dpa=True)])
def test_recording_needs_a_delayed_recipe_and_attention_in_high_precision(model_dir: Path, recipe: Any) -> None:
    with pytest.raises(RecipeError, match="records_kv needs a delayed recipe"):
        Forward(load_trainable(model_dir), recipe, records_kv=True)
