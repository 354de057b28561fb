"""The whole product on a GPU: calibrate, serve, fine-tune, serve again. On the CPU, the tests themselves are tested.

Needs the packages of the product (safetensors, tokenizers); test_decoding.py needs only torch.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
pytest.importorskip("fp8serve.calibration")  # present in an installation, or by a link

from fp8serve.calibration.pipeline import calibrate
from fp8serve.engine.engine import Engine
from fp8serve.engine.output import Completion
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.train.config import TrainConfig
from fp8serve.train.trainer import Trainer
from tests.cuda.conftest import on_both
from tests.tiny import CHATS, SENTENCES, write_tiny_model

RECIPES = ("delayed", "current", "rowwise", "block", "bf16")
NEAR_TIE = 0.05  # nats between the two likeliest tokens; BF16 roundings may exchange closer ones
pytestmark = [on_both, pytest.mark.smoke]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("product") / "base")


@pytest.fixture(scope="module")
def calibrated(base: Path) -> Path:
    """A model calibrated on the CPU, so that both devices serve the same data and scales."""
    out = base.parent / "fp8"
    calibrate(base, out=out, recipe=DelayedScaling(amax_history_len=16), samples=8, seq_len=64, kv_cache=True)
    return out


def serve(model: Path, device: str, **options: Any) -> Engine:
    return Engine(model, device=device, max_num_seqs=3, **options)


def greedy(engine: Engine, prompts: list[str], tokens: int = 12) -> list[Completion]:
    return engine.generate(prompts, temperature=0.0, max_new_tokens=tokens, ignore_eos=True, logprobs=2)


def assert_same_choices(actual: Completion, expected: Completion) -> int:
    """Checks that tokens are equal up to the first near tie in `expected`; returns their number."""
    pairs = zip(actual.token_ids, expected.token_ids, expected.logprobs or (), strict=True)
    for count, (one, other, logprob) in enumerate(pairs):
        (_, first), (_, second) = logprob.top
        if first - second < NEAR_TIE:
            return count
        assert one == other
    return len(expected.token_ids)


@pytest.mark.parametrize(
    "options", [{}, {"kv_cache_dtype": "fp8"}, {"recipe": "rowwise"}, {"recipe": "block"}, {"recipe": "bf16"}], ids=str
)
def test_greedy_tokens_are_those_of_the_cpu(device: str, base: Path, calibrated: Path, options: dict[str, Any]) -> None:
    model = base if "recipe" in options else calibrated
    actual, expected = (greedy(serve(model, place, **options), SENTENCES[:3]) for place in (device, "cpu"))
    assert sum(map(assert_same_choices, actual, expected)) >= 6


def test_replayed_decoding_gives_the_same_bits(device: str, calibrated: Path) -> None:
    """Compares log-probabilities, too, for a batch of 3, and of 2 after the first sequence has ended."""
    plain = serve(calibrated, device, cuda_graphs=False)
    replayed = serve(calibrated, device)
    if device == "cpu":
        replayed.pack_weights()  # packing replaces the weights, so steps captured before would have to run again
        replayed.loaded.runner.capture_steps(replayed.options, 256, lambda run: run)
    else:
        assert replayed.info()["cuda_graphs"].startswith("batches of 1, 2, 3; prompts")
    replayed.loaded.runner.graphed_prompts = None
    prompts, sampling = SENTENCES[:3], {"seed": 5, "max_new_tokens": 20, "ignore_eos": True, "logprobs": 3}
    assert replayed.generate(prompts, **sampling) == plain.generate(prompts, **sampling)
    assert replayed.scales() == plain.scales()


def test_replayed_prompts_choose_the_same_tokens(device: str, calibrated: Path) -> None:
    """On a GPU, other kernels may compute the padded number of rows, so bits may differ."""
    plain, replayed = serve(calibrated, device, cuda_graphs=False), serve(calibrated, device)
    if device == "cpu":
        replayed.pack_weights()
        replayed.loaded.runner.capture_steps(replayed.options, 256, lambda run: run)
    assert replayed.loaded.runner.graphed_prompts is not None
    actual, expected = (greedy(engine, SENTENCES) for engine in (replayed, plain))
    assert sum(map(assert_same_choices, actual, expected)) >= 2 * len(SENTENCES)


@pytest.mark.parametrize("graphs", [True, False])
def test_a_step_in_flight_changes_no_token(device: str, calibrated: Path, graphs: bool) -> None:
    """All requests have the same length, so that both engines run the same batches."""
    overlapping, plain = (serve(calibrated, device, cuda_graphs=None if graphs else False) for _ in range(2))
    assert overlapping.async_scheduling == (device == "cuda")
    for engine in (overlapping, plain):
        engine.async_scheduling = engine is overlapping
        if graphs and device == "cpu":
            engine.pack_weights()
            engine.loaded.runner.capture_steps(engine.options, 256, lambda run: run)
    prompts, common = SENTENCES[:3], dict[str, Any](max_new_tokens=40, ignore_eos=True)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 3, "top_p": 0.9},
        {"seed": 3, "logprobs": 2},
        {"seed": 3, "presence_penalty": 1.0},
    ]
    for kind in kinds:
        assert overlapping.generate(prompts, **common, **kind) == plain.generate(prompts, **common, **kind)
    assert overlapping.stats()["steps_total"] == plain.stats()["steps_total"]


def test_a_seed_gives_the_same_text_in_every_batch(device: str, calibrated: Path) -> None:
    engine = serve(calibrated, device)
    sampling: dict[str, Any] = {"seed": 11, "max_new_tokens": 10, "ignore_eos": True, "top_p": 0.9}
    alone = engine.generate(SENTENCES[:1], **sampling)[0]
    assert engine.generate(SENTENCES[:1], **sampling)[0].token_ids == alone.token_ids
    if device == "cpu":  # on a GPU, more rows may take another kernel
        assert engine.generate(SENTENCES[:3], **sampling)[0].token_ids == alone.token_ids


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_first_training_losses_are_those_of_the_cpu(device: str, base: Path, tmp_path: Path, recipe: str) -> None:
    there, here = (_train(base, tmp_path / name, place, recipe) for name, place in (("a", device), ("b", "cpu")))
    assert len(here) == 2
    assert there == pytest.approx(here, rel=0.02)


def job(model: Path, out: Path, device: str, recipe: str, **more: Any) -> TrainConfig:
    out.mkdir(parents=True)
    (out / "chats.jsonl").write_text(CHATS)
    values = {"model": str(model), "data": [str(out / "chats.jsonl")], "out": str(out / "run"), "recipe": recipe}
    values |= {"device": device, "batch_size": 2, "seq_len": 64, "lr": 1e-3, "log_every": 1, **more}
    return TrainConfig.from_dict(values | ({"amax_history_len": 16} if recipe == "delayed" else {}))


def _train(base: Path, out: Path, device: str, recipe: str) -> list[float]:
    """Trains two steps; returns the loss of each."""
    events: list[dict[str, Any]] = []
    Trainer(job(base, out, device, recipe, max_steps=2)).run(events.append)
    return [event["train_loss"] for event in events if event["type"] == "metrics"]


def test_the_main_job(device: str, base: Path, tmp_path: Path) -> None:
    """Calibrates, serves, fine-tunes the calibrated model with an interruption, and serves again."""
    fp8 = tmp_path / "fp8"
    report = calibrate(
        base, out=fp8, recipe=DelayedScaling(amax_history_len=16), samples=8, seq_len=64, gradients=True, kv_cache=True,
        device=device,
    )  # fmt: skip
    assert report.quality.kl_divergence is not None
    assert json.loads((fp8 / "config.json").read_text())["quantization_config"]
    before = greedy(serve(fp8, device), SENTENCES[:2])

    stops = itertools.chain([False, False], itertools.repeat(True))
    config = job(fp8, tmp_path / "job", device, "delayed", max_steps=4, lr=1e-2)
    Trainer(config).run(stop=lambda: next(stops))
    events: list[dict[str, Any]] = []
    Trainer(config).run(events.append)
    assert any("Resumed from step 2" in str(event) for event in events)
    after = greedy(serve(tmp_path / "job/run/model", device), SENTENCES[:2])
    assert [len(c.token_ids) for c in after] == [12, 12]
    assert [c.token_ids for c in after] != [c.token_ids for c in before]
