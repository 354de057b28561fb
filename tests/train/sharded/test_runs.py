"""Sharded training (`--fsdp`): several processes write the same bytes as one."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fp8serve.errors import JobError
from fp8serve.ranks import Ranks
from fp8serve.train.config import TrainConfig
from fp8serve.train.scratch import write_random_model
from fp8serve.train.trainer import Trainer
from tests.fp8.distributed.ranks import on_ranks
from tests.train.conftest import TEXTS, Configure, write_lines
from tests.train.test_experts import write_mixture
from tests.train.test_processes import SHARED, hashes_of, metrics_of, train_on

pytestmark = pytest.mark.distributed

CASES: dict[str, dict[str, Any]] = {
    "delayed": {},
    "delayed, masters in the optimizer, recomputed": {"master_weights": "optimizer", "recompute": True},
    "most recent, in FP8 attention, dgrad in high precision": {
        "recipe_options": {
            "amax_compute_algo": "most_recent",
            "fp8_dpa": True,
            "override_linear_precision": [False, True, False],
        }
    },
    "current, one microbatch each": {"recipe": "current", "accumulate": 2},
    "rowwise, masters in the optimizer": {"recipe": "rowwise", "master_weights": "optimizer"},
    "block": {"recipe": "block"},
    "nvfp4": {"recipe": "nvfp4"},
    "bf16, clipped": {"clip": 0.01, "recipe": "bf16"},
}


def assert_trains_as_one(configure: Configure, tmp_path: Path, worlds: tuple[int, ...] = (2,), **options: Any) -> None:
    """Asserts that sharded runs on `worlds` processes write the same files and metrics as an unsharded run."""
    expected_events = train_on(1, configure(**{**SHARED, **options}, out=str(tmp_path / "one")))
    for world in worlds:
        config = configure(**{**SHARED, **options}, fsdp=True, out=str(tmp_path / str(world)))
        events_of_rank_0, *other_events = train_on(world, config)
        assert other_events == [[]] * (world - 1)
        assert len(events_of_rank_0) == len(expected_events[0]) + 1  # one more event says how weights are sharded
        assert "model/training.json" in hashes_of(tmp_path / "one")
        assert hashes_of(tmp_path / "one") == hashes_of(tmp_path / str(world))
        assert metrics_of(tmp_path / "one") == metrics_of(tmp_path / str(world))


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.smoke if c == "delayed" else ()) for c in CASES])
def test_two_processes_write_the_bytes_of_one(case: str, configure: Configure, tmp_path: Path, data: Path) -> None:
    """The last step of an epoch has three microbatches, so that ranks get unequal shares."""
    options: dict[str, Any] = {"eval_data": [str(data)], "eval_every": 2, "save_every": 2}
    worlds = (2, 4) if case == "delayed" else (2,)
    assert_trains_as_one(configure, tmp_path, worlds, **options, **CASES[case])


def test_an_fp8_base_model(configure: Configure, tmp_path: Path, fp8_dir: Path) -> None:
    assert_trains_as_one(configure, tmp_path, model=str(fp8_dir), recipe_options={"reduce_amax": False})


def test_three_processes_with_uneven_shards_have_the_losses_of_one(configure: Configure, tmp_path: Path) -> None:
    """Shards have 22, 22 and 20 of 64 rows. AdamW rounds the elements after the last 16 of a tensor differently."""
    options = {**SHARED, "recipe": "bf16"}
    train_on(1, configure(**options, out=str(tmp_path / "1")))
    train_on(3, configure(**options, fsdp=True, out=str(tmp_path / "3")))
    one, three = (metrics_of(tmp_path / name)["metrics"] for name in ("1", "3"))
    assert one == pytest.approx(three, rel=1e-6)


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_experts_without_tokens_are_not_changed(
    kind: str, configure: Configure, tmp_path: Path, model_dir: Path
) -> None:
    """Rows are so short that the ranks use different experts."""
    mixture = write_mixture(tmp_path / "mixture", model_dir, kind)
    rows = write_lines(tmp_path / "short.jsonl", [{"text": text[i : i + 4]} for i, text in enumerate(TEXTS)])
    options = {"model": str(mixture), "data": [str(rows)], "batch_size": 1, "accumulate": 3, "max_steps": 3}
    assert_trains_as_one(configure, tmp_path, **options)


def test_dpo_reference_scores_are_shared_among_processes(configure: Configure, tmp_path: Path) -> None:
    pairs = [{"prompt": t[:20], "chosen": t[20:40], "rejected": t[40:60]} for t in TEXTS[:9]]
    assert_trains_as_one(
        configure, tmp_path, method="dpo", data=[str(write_lines(tmp_path / "pairs.jsonl", pairs))], max_steps=2
    )


def test_a_run_that_ends_early_exports_its_best_checkpoint(configure: Configure, tmp_path: Path) -> None:
    held_out = write_lines(
        tmp_path / "held-out.jsonl", [{"text": f"What nobody learns {i} {i * i}."} for i in range(5)]
    )
    options = {"lr": 0.02, "max_steps": 12, "eval_data": [str(held_out)], "eval_every": 1, "patience": 2}
    assert_trains_as_one(configure, tmp_path, result="best", on_divergence="keep", warmup_steps=1, **options)
    best = metrics_of(tmp_path / "2")["held_out"]["best_step"]
    assert 1 <= best < metrics_of(tmp_path / "2")["step"] < 12
    assert json.loads((tmp_path / "2" / "model" / "training.json").read_text())["step"] == best


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_8_bit_moments_equal_those_of_one_process(configure: Configure, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 320, "hidden_size": 128, "layers": 1, "heads": 4, "kv_heads": 2}
    model = write_random_model(tmp_path / "wide", TEXTS, **sizes, context=128)
    options: dict[str, Any] = {**SHARED, "model": str(model), "optimizer_states": "8bit", "max_steps": 6}
    train_on(1, configure(**options, out=str(tmp_path / "one")))
    config = configure(**options, fsdp=True, out=str(tmp_path / "two"))
    train_on(2, config, 3)
    train_on(2, config)
    one, two = ({n: h for n, h in hashes_of(tmp_path / run).items() if "step-6" in n} for run in ("one", "two"))
    assert any(name.endswith("optimizer.safetensors") for name in one)
    assert one == two


def _refused(rank: int, config: str) -> str:
    with pytest.raises(JobError) as refusal:
        Trainer(TrainConfig.from_json(config), Ranks(rank, 2)).run()
    return str(refusal.value)


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_shards_that_split_a_block_of_8_bit_moments_are_refused(configure: Configure) -> None:
    """Half of a 64 x 64 matrix has 2048 elements."""
    messages = on_ranks(2, _refused, configure(accumulate=2, optimizer_states="8bit", fsdp=True).to_json())
    assert messages[0] == messages[1]
    assert "2 processes divide model.layers.0" in messages[0]
    assert "use fp32, another number of processes, or no fsdp" in messages[0]


def test_fsdp_is_refused_on_one_process(configure: Configure) -> None:
    events: list[dict[str, Any]] = []
    result = Trainer(configure(fsdp=True)).run(events.append)
    assert result.status == "succeeded"
    assert "There is one process, so fsdp shards nothing" in [e["message"] for e in events if e["type"] == "message"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_rank": 4, "recipe": "rowwise"}, "an adapter has few of them; leave fsdp or lora_rank out"),
        ({"method": "grpo", "reward": "reward.py"}, "fsdp shards a model over several processes, and grpo uses one"),
    ],
)
def test_unsupported_options_are_refused_at_once(configure: Configure, options: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        configure(fsdp=True, **options)
