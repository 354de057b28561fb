"""The job description: what it refuses, and its JSON, which holds everything."""

import json
import subprocess
import sys
from typing import Any

import pytest

from fp8serve.errors import JobError, RecipeError
from fp8serve.fp8.recipe import DelayedScaling, Format
from fp8serve.train.config import TrainConfig

REQUIRED: dict[str, Any] = {"model": "m", "data": ["d.jsonl"], "out": "o"}


def test_json_round_trip_keeps_every_field() -> None:
    config = TrainConfig.from_dict(
        {
            **REQUIRED,
            "recipe_options": {"margin": 1},
            "amax_history_len": 16,
            "max_steps": 7,
            "betas": [0.8, 0.9],
            "clip": None,
        }
    )
    assert TrainConfig.from_json(config.to_json()) == config
    assert config.betas == (0.8, 0.9)
    assert config.data == ("d.jsonl",)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0), ("lr", float("nan")), ("lr", "1e-4"), ("lr", True), ("batch_size", 0), ("batch_size", 2.0),
        ("epochs", None), ("max_steps", 0), ("clip", -1.0), ("betas", [0.9]), ("betas", [0.9, 1.0]), ("data", []),
        ("data", "d.jsonl"), ("data", [3]), ("packing", "pad"), ("format", "gguf"), ("master_weights", "disk"),
        ("seed", -1), ("min_lr_ratio", 1.5), ("model", ""), ("recipe_options", []), ("eval_every", 5),
        ("warmup_steps", -1),
    ],
)  # fmt: skip
def test_the_error_names_the_option_whose_value_cannot_be_used(field: str, value: Any) -> None:
    with pytest.raises(JobError, match=field.split("_")[0]):
        TrainConfig.from_dict({**REQUIRED, field: value})


def test_a_removed_option_is_read_at_its_default_only() -> None:
    """A server queues or pauses a job with every option in its job.json, and a later version runs it."""
    stored = json.loads(TrainConfig(**REQUIRED).to_json()) | {"ld_alpha": None, "reference_free": False}
    assert TrainConfig.from_json(json.dumps(stored)) == TrainConfig.from_dict(REQUIRED)
    for name, value in (("ld_alpha", 0.5), ("reference_free", True)):
        with pytest.raises(JobError, match=f"Unknown training option '{name}'"):
            TrainConfig.from_dict(stored | {name: value})


def test_history_length_needs_the_recipe_that_has_one() -> None:
    with pytest.raises(JobError, match="'block' has no amax history"):
        TrainConfig.from_dict({**REQUIRED, "recipe": "block", "amax_history_len": 16})


@pytest.mark.parametrize(
    ("recipe", "options", "says"),
    [
        ("int4", {}, "no recipe 'int4'"),
        ("delayed", {"margins": 1}, "no parameter 'margins'"),
        ("bf16", {"margin": 1}, "no parameters"),
        ("current", {"granularity": "row"}, "change the recipe 'current' into another one"),
        ("current", {"power_2_scale": True}, "leave power_2_scale off"),
        ("nvfp4", {"row_scaled_activation": False}, "leave row_scaled_activation on"),
        ("block", {"fp8_dpa": True}, "no parameter 'fp8_dpa'"),
    ],
)
def test_a_recipe_that_training_does_not_run_is_refused(recipe: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        TrainConfig.from_dict({**REQUIRED, "recipe": recipe, "recipe_options": options})


def test_recipe_options_make_the_recipe() -> None:
    options = {"fp8_format": "E4M3", "override_linear_precision": [False, True, True]}
    config = TrainConfig.from_dict({**REQUIRED, "recipe_options": options, "amax_history_len": 16})
    assert config.fp8_recipe == DelayedScaling(
        fp8_format=Format.E4M3, override_linear_precision=(False, True, True), amax_history_len=16
    )
    assert TrainConfig.from_dict({**REQUIRED, "recipe": "bf16"}).fp8_recipe is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid JSON"),
        ("[]", "JSON object"),
        (json.dumps({**REQUIRED, "learning_rate": 1}), "'learning_rate'"),
        ('{"model": "m"}', "'data'"),
        (json.dumps({**REQUIRED, "data": ["-"]}), r"standard input \('-'\) cannot be used; name a file"),
        (json.dumps({**REQUIRED, "eval_data": ["a.txt", "-"]}), r"standard input \('-'\) cannot be used"),
    ],
)
def test_json_that_is_no_job_is_refused(text: str, says: str) -> None:
    with pytest.raises(JobError, match=says):
        TrainConfig.from_json(text)


def test_what_decides_the_bits_is_compared_on_resume_and_nothing_else() -> None:
    base = TrainConfig.from_dict(REQUIRED).identity()
    assert TrainConfig.from_dict({**REQUIRED, "save_every": 3, "out": "elsewhere", "keep_last": 9}).identity() == base
    assert TrainConfig.from_dict({**REQUIRED, "lr": 1e-3}).identity() != base


def test_a_job_is_checked_without_torch() -> None:
    code = "import sys, fp8serve.train.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
