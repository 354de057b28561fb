"""make gpu, as far as a machine without a GPU can run it: limits, failures, and what is written."""

import argparse
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import gpu
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]


def options(**given: object) -> argparse.Namespace:
    return argparse.Namespace(**{"cutlass": None, "skip": "", "out": Path("."), **given})


def test_a_command_that_takes_too_long_is_ended_with_what_it_started() -> None:
    result = gpu.run(["sh", "-c", "sleep 3600 & echo begun; wait"], 3.0)
    assert result["status"] == 124
    assert result["tail"] == "begun\n"
    assert result["seconds"] < PATIENCE


def test_a_command_that_is_not_there_is_a_result() -> None:
    assert gpu.run(["/nonexistent/tool"], 1.0)["status"] == 127


def test_a_failing_part_does_not_hide_the_others() -> None:
    parts = {"a": {"status": 0, "seconds": 1.0}, "b": {"status": 124, "seconds": 2.0}, "c": {"status": 1, "seconds": 3}}
    assert gpu.together(parts) == {"status": 124, "seconds": 6.0, "parts": parts}

    def broken(_: argparse.Namespace) -> gpu.Result:
        raise OSError("the disk is full")

    assert gpu.attempted(broken, options()) == {"status": 1, "seconds": 0, "tail": "OSError: the disk is full"}


def test_cutlass_comes_out_of_its_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "BUILD", tmp_path / "build")
    wheel = tmp_path / "nvidia_cutlass-4.2.0.0-py3-none-any.whl"
    wanted = ["cutlass_library/source/include/cutlass/cutlass.h", "cutlass_library/source/tools/util/include/a.h"]
    with zipfile.ZipFile(wheel, "w") as file:
        for name in [*wanted, "cutlass_library/source/examples/big.cu"]:
            file.writestr(name, "")
    folder = gpu.cutlass(wheel)
    assert folder is not None
    assert (folder / "include/cutlass/cutlass.h").is_file()
    assert (folder / "tools/util/include/a.h").is_file()
    assert not (folder / "examples").exists()


def test_a_wheel_in_the_repository_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "BUILD", tmp_path / "build/gpu")
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    assert gpu.cutlass(None) is None
    (tmp_path / "build").mkdir()
    with zipfile.ZipFile(tmp_path / "build/nvidia_cutlass-4.2.0.0-py3-none-any.whl", "w") as file:
        file.writestr("cutlass_library/source/include/cutlass/cutlass.h", "")
    assert gpu.cutlass(None) == tmp_path / "build/gpu/cutlass/cutlass_library/source"
    assert gpu.cutlass(tmp_path / "given") == tmp_path / "given"


def test_without_cutlass_it_is_built_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler error in CUTLASS must not cost the whole loan."""
    asked: list[list[str]] = []

    def compiled(settings: list[str]) -> gpu.Result:
        asked.append(settings)
        return {"status": 0 if "-DFP8SERVE_CUTLASS_DIR=none" in settings else 1, "seconds": 1.0}

    monkeypatch.setattr(gpu, "BUILD", tmp_path)
    monkeypatch.setattr(gpu, "compiled", compiled)
    monkeypatch.setattr(gpu, "present_architecture", lambda: "90a")
    result = gpu.build(options(cutlass=tmp_path))
    assert result["status"] == 1
    assert result["parts"]["build without CUTLASS"]["status"] == 0
    assert asked[0] == ["-DFP8SERVE_CUDA_ARCHS=90a", f"-DFP8SERVE_CUTLASS_DIR={tmp_path}"]


ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"fastapi", "starlette", "pydantic", "uvicorn", "safetensors", "tokenizers",
            "transformers", "jinja2", "typer", "rich", "hypothesis", "httpx", "yaml", "llguidance"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
sys.argv = ["pytest", *sys.argv[1:]]
import pytest
sys.exit(pytest.main())
"""


def test_gpu_tests_are_collected_with_nothing_but_torch_and_pytest() -> None:
    """And with none of the plugins and options of this repository's development."""
    flags = [flag for flag in gpu.PYTEST[3:] if flag not in ("-m", "gpu")]
    absent = [f"-pno:{plugin}" for plugin in ("timeout", "hypothesispytest", "schemathesis", "anyio", "xdist")]
    folder = ["tests/cuda", "--collect-only", *absent]
    done = subprocess.run([sys.executable, "-c", ABSENT, *flags, *folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "error" not in done.stdout.splitlines()[-1]


def test_files_with_tests_for_a_gpu() -> None:
    names = {path.name for path in gpu.test_files()}
    assert {"test_gemm.py", "test_quantize.py", "test_attention.py", "test_vectors.py"} <= names
    assert "test_recipe.py" not in names


def test_an_unknown_part_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--skip", "tests"])
    with pytest.raises(SystemExit):
        gpu.arguments()
    assert "there is no part tests" in capsys.readouterr().err


def test_everything_is_written_whatever_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def build(_: argparse.Namespace) -> gpu.Result:
        raise OSError("no nvcc")

    def measure(_: argparse.Namespace) -> gpu.Result:
        rows = [{"what": "a", "goal": 1.0, "predicted": 0.5, "measured": 2.0}]
        return gpu.together({"gemm": {"status": 0, "seconds": 1.0, "measured": {"rows": rows}}})

    monkeypatch.setattr(gpu, "PARTS", (build, measure))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "machine", lambda: {"gpu": "NVIDIA Test 1", "date": "2026-11-21T00:00:00"})
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path)])
    assert gpu.main() == 1
    found = json.loads((tmp_path / "test-1-2026-11-21.json").read_text())
    assert found["build"]["tail"] == "OSError: no nvcc"
    assert gpu.measured_rows(found)[0]["measured"] == 2.0
