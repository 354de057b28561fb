"""A small training study: every recipe, a resumed run with the same bytes, and continuing where it stopped."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies import corpus, training
from benchmarks.studies.__main__ import main
from benchmarks.studies.training import StudyPlan
from fp8serve.bench.figures import commit
from fp8serve.bench.options import Shape
from fp8serve.errors import JobError
from fp8serve.train.scratch import write_random_model

TEXTS = [f"The number {i} is followed by the number {i + 1}, and that by {i + 2}." for i in range(60)]
SHAPE = Shape(hidden_size=64, layers=1, heads=1, kv_heads=1, intermediate_size=128, vocab_size=300)
PLAN = StudyPlan(recipes=("bf16", "delayed"), steps=4, batch_size=2, seq_len=16, shape=SHAPE)


@pytest.fixture(autouse=True)
def small_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "corpus", lambda: (TEXTS[1:], TEXTS[:1]))


def quiet(name: str, step: int, total: int) -> None:
    pass


def test_a_study_continues_where_it_stopped(tmp_path: Path) -> None:
    steps: list[tuple[str, int]] = []
    first = training.study(tmp_path, PLAN, lambda name, step, total: steps.append((name, step)))
    assert steps == [(n, s) for n in ("bf16", "delayed") for s in (1, 2, 3, 4)] + [
        ("delayed-resumed", 3),
        ("delayed-resumed", 4),
    ]
    assert first["resumed"] == {"recipe": "delayed", "from_step": 2, "identical": True, "differing_files": []}
    assert {first["runs"]["bf16"][f"{kind}_difference_percent"] for kind in ("final", "running", "valid")} == {0}
    final = json.loads((tmp_path / "delayed-final.json").read_text())
    assert 59 <= final["rows"] <= training.FINAL_ROWS
    assert first["runs"]["delayed"]["final_loss"] == final["loss"] == first["curves"]["delayed"]["final"]
    assert abs(final["loss"] / first["runs"]["delayed"]["valid_loss"] - 1) < 0.05  # the texts are all alike
    assert abs(first["runs"]["delayed"]["valid_difference_percent"]) < 1
    assert [len(c["train"]) for c in first["curves"].values()] == [4, 4]
    steps.clear()
    again = training.study(tmp_path, replace(PLAN, recipes=("bf16", "delayed", "block")), quiet)
    assert again["curves"]["bf16"] == first["curves"]["bf16"]
    assert set(again["runs"]) == {"bf16", "delayed", "block"}
    assert training.chart(again).count("<polyline") == 6


def test_a_directory_of_another_study_is_refused(tmp_path: Path) -> None:
    training.study(tmp_path, replace(PLAN, recipes=("bf16",)), quiet)
    with pytest.raises(JobError, match="other settings"):
        training.study(tmp_path, replace(PLAN, lr=2e-3), quiet)


def test_a_plan_that_knows_fewer_settings_is_the_plan_with_their_defaults(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"steps": 4, "seed": 1}))
    training._same_plan(tmp_path / "plan.json", StudyPlan(steps=4, seed=1))
    with pytest.raises(JobError, match="other settings"):
        training._same_plan(tmp_path / "plan.json", StudyPlan(steps=4, seed=1, final_lr=0.0))
    config = training._config(tmp_path, StudyPlan(steps=4, final_lr=0.0, warmup_steps=2), "bf16", "bf16")
    assert (config.min_lr_ratio, config.warmup_steps) == (0.0, 2)


def test_other_bytes_would_be_noticed(tmp_path: Path) -> None:
    for name, content in (("a", b"1"), ("b", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
        (tmp_path / name / "random.safetensors").write_bytes(b"0")
    assert training._differing(tmp_path / "a", tmp_path / "b") == ["model.safetensors"]


@pytest.mark.parametrize(
    ("change", "sentence"), [({"recipes": ("fp4",)}, "no recipe 'fp4'"), ({"steps": 5}, "even number")]
)
def test_plans_that_cannot_be_run_are_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        replace(PLAN, **change)


def events(*steps: int) -> str:
    return "".join(
        json.dumps({"step": s, "train_loss": float(i), "tokens_per_second": 1.0}) + "\n" for i, s in enumerate(steps)
    )


def test_steps_taken_twice_count_once(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text(events(1, 2, 3, 2, 3, 4))
    assert training.read_curve(tmp_path / "c.jsonl", 4).train == [0.0, 3.0, 4.0, 5.0]
    with pytest.raises(JobError, match="lacks step 5"):
        training.read_curve(tmp_path / "c.jsonl", 5)


def test_smoothing_is_a_mean_over_a_window() -> None:
    assert training.smoothed([1.0, 3.0, 5.0, 7.0], 2) == [(1.0, 2.0), (2.0, 4.0), (3.0, 6.0)]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["training", "--out", str(tmp_path), "--steps", "4", "--hidden-size", "64", "--layers", "1"]
    assert main([*args, "--recipe", "bf16", "--recipe", "current", "--seq-len", "16"]) == 0
    assert "current" in capsys.readouterr().out
    assert json.loads((tmp_path / "training.json").read_text())["resumed"] is None
    assert (tmp_path / "training-curves.svg").read_text().startswith("<svg")


def test_a_study_of_trained_weights_and_what_chance_is_worth(tmp_path: Path) -> None:
    write_random_model(tmp_path / "given", TEXTS, context=32, seed=5, **asdict(SHAPE))
    plan = replace(PLAN, recipes=("bf16", "twin"), lr=1e-2, model=str(tmp_path / "given"))
    figures = training.study(tmp_path / "study", plan, quiet)
    assert not (tmp_path / "study" / "model").exists()
    assert figures["curves"]["bf16"]["train"][0] == figures["curves"]["twin"]["train"][0]
    assert 0 < abs(figures["runs"]["twin"]["final_difference_percent"]) < 1
    other = training.study(tmp_path / "other", replace(PLAN, recipes=("bf16",)), quiet)
    assert other["curves"]["bf16"]["train"] != figures["curves"]["bf16"]["train"]


def test_a_model_has_a_shape_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["training", str(tmp_path), "--out", str(tmp_path / "out"), "--layers", "2"]) == 1
    assert "MODEL has its own width and layers" in capsys.readouterr().err


def test_a_width_that_makes_no_heads_is_refused() -> None:
    assert Shape.of(384, 6) == Shape()
    with pytest.raises(JobError, match="multiple of 64"):
        Shape.of(100, 1)


@pytest.mark.parametrize("name", ["numerics", "training"])
def test_help_has_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"python -m benchmarks.studies {name}" in capsys.readouterr().out.partition("Examples:")[2]


def test_the_corpus_is_real_text_and_holds_some_out() -> None:
    train, held_out = corpus.corpus(docstrings_too=False)
    assert not set(train) & set(held_out)
    assert len(held_out) == -(-(len(train) + len(held_out)) // corpus.HELD_OUT_EVERY)
    assert corpus.digest(train) == corpus.digest(list(train)) != corpus.digest(train[1:])


def test_docstrings_come_without_the_code(tmp_path: Path) -> None:
    source = tmp_path / "m.py"
    source.write_text('"""Top."""\n\ndef f():\n    """Of f."""\n    return "\\d"\n')
    assert corpus._docstrings_of(source) == "Top.\n\nOf f."
    source.write_bytes(b"\xff\xfe not python")
    assert corpus._docstrings_of(source) == ""


def test_no_commit_outside_a_checkout(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
