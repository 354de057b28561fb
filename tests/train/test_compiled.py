"""`--compile`: the bits of a run without it, one graph for all layers and lengths, and what a run says of it.

Most tests use a backend that runs the traced graphs without inductor, which takes much longer than the runs.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8serve.errors import JobError
from fp8serve.train import compiled
from fp8serve.train.scratch import write_random_model
from fp8serve.train.trainer import Trainer, check_processes

from .conftest import TEXTS, Configure, write_lines
from .test_grpo import LETTERS
from .test_trainer import after, hashes

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it imports its compiler
Events = list[dict[str, Any]]
GRAPHS = 3  # of three functions


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    monkeypatch.setattr(compiled, "OPTIONS", None)


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("deep") / "model"
    return write_random_model(out, TEXTS, vocab_size=320, hidden_size=64, layers=4, heads=4, kv_heads=2, context=128)


def train(
    configure: Configure, out: Path, stop: Callable[[], bool] = lambda: False, **options: Any
) -> tuple[Any, Events]:
    """Returns the files of the last checkpoint and the events of a run."""
    events: Events = []
    result = Trainer(configure(out=str(out), **options)).run(events.append, stop)
    files = hashes(Path(str(result.checkpoint)))
    del files["trainer.json"]  # it records the option itself
    return files, events


def of_code(events: Events, code: str) -> Events:
    return [event for event in events if event.get("code") == code]


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.usefixtures("traced")
def test_layers_and_lengths_share_graphs_with_the_bits_of_an_eager_run(
    configure: Configure, deep_model: Path, tmp_path: Path
) -> None:
    """Rows of several lengths in microbatches of several sizes: one step compiles, the first in which the
    monitor of the run counts no values."""
    options: dict[str, Any] = {"model": str(deep_model), "batch_size": 3, "accumulate": 2, "max_steps": 4}
    expected, _ = train(configure, tmp_path / "eager", **options)
    result, events = train(configure, tmp_path / "compiled", compile=True, **options)
    assert result == expected
    (event,) = of_code(events, "compiled")
    assert (event["step"], event["graphs"]) == (2, GRAPHS)
    assert event["seconds"] > 0
    assert event["message"] == f"torch.compile took {event['seconds']:.1f} s of step 2, for {GRAPHS} graphs"
    assert not [event for event in events if event.get("level") == "warn"]  # of the monitor, either


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("recipe", ["current", "rowwise", "block", "bf16"])
def test_every_recipe_has_the_bits_of_an_eager_run(configure: Configure, tmp_path: Path, recipe: str) -> None:
    runs = [train(configure, tmp_path / str(on), recipe=recipe, max_steps=2, compile=on) for on in (False, True)]
    assert runs[0][0] == runs[1][0]
    assert of_code(runs[1][1], "compiled")


def method_options(method: str, tmp_path: Path, fp8_dir: Path) -> dict[str, Any]:
    if method == "lora":
        adapter = {"lora_rank": 4, "dora": True, "lora_dropout": 0.2}
        return {"model": str(fp8_dir), "amax_history_len": None, **adapter}
    if method == "dpo":
        pairs = [{"prompt": t[:30], "chosen": t[30:60], "rejected": t[50:90]} for t in TEXTS[:8]]
        return {"method": "dpo", "data": [str(write_lines(tmp_path / "pairs.jsonl", pairs))]}
    (tmp_path / "letters.py").write_text(LETTERS)
    rows = write_lines(tmp_path / "prompts.jsonl", [{"prompt": t[:20], "letter": "e"} for t in TEXTS[:8]])
    small = {"batch_size": 2, "num_generations": 3, "seq_len": 32, "max_completion_length": 8}
    return {"method": "grpo", "data": [str(rows)], "reward": str(tmp_path / "letters.py"), **small}


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("method", ["lora", "dpo", "grpo"])
def test_every_method_has_the_bits_of_an_eager_run(
    configure: Configure, tmp_path: Path, fp8_dir: Path, method: str
) -> None:
    options = {**method_options(method, tmp_path, fp8_dir), "max_steps": 2}
    runs = [train(configure, tmp_path / str(on), compile=on, **options) for on in (False, True)]
    assert runs[0][0] == runs[1][0]
    assert of_code(runs[1][1], "compiled")


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_a_run_may_be_resumed_with_or_without_compile(configure: Configure, tmp_path: Path) -> None:
    expected, _ = train(configure, tmp_path / "eager", max_steps=4)
    train(configure, tmp_path / "resumed", after(2), max_steps=4)
    result, events = train(configure, tmp_path / "resumed", max_steps=4, compile=True)
    assert result == expected
    (event,) = of_code(events, "machine_changed")
    assert event["message"].startswith("compile changed since the checkpoint was written")


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_too_many_graphs_are_announced_and_the_run_continues(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "MAX_GRAPHS", 1)
    expected, _ = train(configure, tmp_path / "eager", max_steps=2)
    result, events = train(configure, tmp_path / "compiled", max_steps=2, compile=True)
    assert result == expected
    (event,) = of_code(events, "compile_stopped")
    assert (event["level"], event["step"]) == ("warn", 2)
    assert event["message"].startswith("The layers were compiled 1 times, because their inputs keep changing")


def test_an_error_of_the_compiler_is_reported_in_one_sentence(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no such instruction\nline 2")

    monkeypatch.setattr(compiled, "BACKEND", fail)
    monkeypatch.setattr(compiled, "OPTIONS", None)
    with pytest.raises(
        JobError, match=r"^torch\.compile cannot compile the model's layers: .*no such instr.*; leave"
    ) as e:
        Trainer(configure(compile=True)).run()
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("option", ["recompute", "fsdp", "invariant"])
def test_options_that_run_layers_otherwise_are_refused(configure: Configure, option: str) -> None:
    with pytest.raises(JobError, match=f"leave compile or {option} out"):
        configure(compile=True, **{option: True})


def test_several_processes_are_refused(configure: Configure) -> None:
    with pytest.raises(JobError, match="compile works in one process, and this run has 2"):
        check_processes(configure(compile=True, accumulate=2), 2)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++")
def test_inductor_gives_the_bits_of_an_eager_run(configure: Configure, tmp_path: Path) -> None:
    expected, _ = train(configure, tmp_path / "eager", max_steps=3)
    result, events = train(configure, tmp_path / "compiled", max_steps=3, compile=True)
    assert result == expected
    assert of_code(events, "compiled")
