"""The demonstration, shortened: every stage runs, its figures are real, and nothing is left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8serve.demo import QUESTIONS, Demo
from fp8serve.errors import MachineError
from fp8serve.running import RunningServer
from tests.patience import PATIENCE, until

STAGES = ["train", "calibrate", "serve", "generate", "finetune", "activate", "ask again"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[str]]:
    """(directory, figures, lines said) of one short run."""
    place, said = tmp_path_factory.mktemp("demo"), list[str]()
    return place, Demo(place, say=said.append, effort=0.1).run(), said


def test_every_stage_says_a_line_and_gives_figures(kept: tuple[Path, dict[str, Any], list[str]]) -> None:
    _, figures, said = kept
    assert [line[:10].strip() for line in said] == [*STAGES, "done"]
    assert list(figures) == [*STAGES, "seconds"]


def test_the_figures_are_real(kept: tuple[Path, dict[str, Any], list[str]]) -> None:
    place, figures, _ = kept
    assert figures["train"]["last_loss"] < figures["train"]["first_loss"]
    assert figures["finetune"]["last_loss"] < figures["finetune"]["first_loss"]
    calibrated = figures["calibrate"]
    assert calibrated["perplexity_fp8"] == pytest.approx(calibrated["perplexity_bf16"], rel=0.05)
    assert calibrated["bytes_bf16"] == (place / "untrained" / "model.safetensors").stat().st_size
    assert calibrated["bytes_fp8"] < calibrated["bytes_bf16"]
    assert figures["ask again"]["questions"] == len(QUESTIONS)


def test_what_is_kept_can_be_served_again(kept: tuple[Path, dict[str, Any], list[str]], tmp_path: Path) -> None:
    place, figures, _ = kept
    with RunningServer(place / "calibrated", ["--data-dir", str(tmp_path)], log=tmp_path / "log") as server:
        body = {"inputs": "The expression", "parameters": {"max_new_tokens": 64, "ignore_eos": True}}
        sampled = body | {"parameters": {**body["parameters"], "temperature": 0.7, "seed": 0}}  # type: ignore[dict-item]
        assert server.post("/generate", sampled)["generated_text"] == figures["generate"]["text"]
        with pytest.raises(MachineError, match="422"):
            server.post("/generate", {"inputs": ""})
    assert server.stop() == 0


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with (
        pytest.raises(MachineError, match=r"holds no config\.json"),
        RunningServer(tmp_path / "model", ["--data-dir", str(tmp_path / "data")], log=tmp_path / "log"),
    ):
        pass


SHORT_DEMO = """
import signal, sys
import fp8serve.demo
from fp8serve.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell is started with it ignored
fp8serve.demo.Demo.__init__.__defaults__ = (None, None, 0.02)
sys.exit(main(["demo"]))
"""


def children_of(pid: int) -> set[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(child) for child in listed} | {c for child in listed for c in children_of(int(child))}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("signal_number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_demonstration_leaves_nothing(signal_number: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SHORT_DEMO]
    temporary, of_torch = tmp_path / "temporary", tmp_path / "torch"  # torch leaves an empty cache behind
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(of_torch)}
    demo = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    for line in demo.stdout:
        if line.startswith("serve"):
            break
    family = children_of(demo.pid)
    demo.send_signal(signal_number)
    demo.stdout.read()
    demo.stdout.close()
    assert demo.wait(PATIENCE) == 130
    assert list(temporary.iterdir()) == []
    assert family
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family), f"the end of {family}")
