"""`make gpu`, as far as it runs without a GPU: time limits, failures, and the written files."""

import argparse
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import gpu
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]


def options(**overrides: object) -> argparse.Namespace:
    return argparse.Namespace(
        **{"cutlass": None, "library": None, "skip": "", "out": Path("."), "dry_run": False, **overrides}
    )


def test_a_command_beyond_its_time_limit_is_killed_with_its_children() -> None:
    result = gpu.run(["sh", "-c", "sleep 3600 & echo begun; wait"], 3.0)
    assert result["status"] == 124
    assert result["tail"] == "begun\n"
    assert result["seconds"] < PATIENCE


def test_a_missing_command_is_a_result_with_a_status() -> None:
    assert gpu.run(["/nonexistent/tool"], 1.0)["status"] == 127


def test_a_failing_part_does_not_hide_the_others() -> None:
    parts = {"a": {"status": 0, "seconds": 1.0}, "b": {"status": 124, "seconds": 2.0}, "c": {"status": 1, "seconds": 3}}
    assert gpu.together(parts) == {"status": 124, "seconds": 6.0, "parts": parts}

    def broken(_: argparse.Namespace) -> gpu.Result:
        raise OSError("the disk is full")

    assert gpu.attempted(broken, options()) == {"status": 1, "seconds": 0, "tail": "OSError: the disk is full"}


def test_cutlass_is_unpacked_from_its_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "BUILD", tmp_path / "build")
    wheel = tmp_path / "nvidia_cutlass-4.2.0.0-py3-none-any.whl"
    members = ["cutlass_library/source/include/cutlass/cutlass.h", "cutlass_library/source/tools/util/include/a.h"]
    with zipfile.ZipFile(wheel, "w") as file:
        for name in [*members, "cutlass_library/source/examples/big.cu"]:
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


def test_if_the_build_with_cutlass_fails_one_without_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler error in CUTLASS must not use up the whole device time."""
    builds: list[list[str]] = []

    def compiled(settings: list[str]) -> gpu.Result:
        builds.append(settings)
        return {"status": 0 if "-DFP8SERVE_CUTLASS_DIR=none" in settings else 1, "seconds": 1.0}

    monkeypatch.setattr(gpu, "BUILD", tmp_path)
    monkeypatch.setattr(gpu, "compiled", compiled)
    monkeypatch.setattr(gpu, "present_architecture", lambda: "90a")
    result = gpu.build(options(cutlass=tmp_path))
    assert result["status"] == 1
    assert result["parts"]["build without CUTLASS"]["status"] == 0
    assert builds[0] == ["-DFP8SERVE_CUDA_ARCHS=90a", f"-DFP8SERVE_CUTLASS_DIR={tmp_path}"]


ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"fastapi", "starlette", "pydantic", "annotated_types", "uvicorn", "safetensors",
            "tokenizers", "transformers", "jinja2", "typer", "rich", "hypothesis", "httpx", "yaml", "llguidance"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
sys.argv = ["pytest", *sys.argv[1:]]
import pytest
sys.exit(pytest.main())
"""


@pytest.mark.slow
def test_gpu_tests_are_collected_with_only_torch_and_pytest() -> None:
    """They do not need the plugins and options of this repository's development environment."""
    flags = [flag for flag in gpu.PYTEST[3:] if flag not in ("-m", "gpu")]
    absent = [f"-pno:{plugin}" for plugin in ("timeout", "hypothesispytest", "schemathesis", "anyio", "xdist")]
    folder = ["tests/cuda", "--collect-only", *absent]
    process = subprocess.run([sys.executable, "-c", ABSENT, *flags, *folder], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    assert "error" not in process.stdout.splitlines()[-1]


@pytest.mark.smoke
def test_files_with_tests_for_a_gpu() -> None:
    names = {Path(path).name for path in gpu.test_files()}
    assert {"test_gemm.py", "test_quantize.py", "test_attention.py", "test_vectors.py"} <= names
    assert "test_recipe.py" not in names


def test_functions_are_listed_once() -> None:
    printed = "tests/cuda/test_a.py::test_one[cuda-1]\ntests/cuda/test_a.py::test_one[cuda-a::b]\n"
    printed += "tests/cuda/test_b.py::test_two\n\n3/9 tests collected (6 deselected) in 0.5s\n"
    assert gpu.test_functions(printed) == ["tests/cuda/test_a.py::test_one", "tests/cuda/test_b.py::test_two"]


def run_tests_with(monkeypatch: pytest.MonkeyPatch, collected: str, results: dict[str, tuple[int, str]]) -> gpu.Result:
    """Runs `gpu.test` with a simulated pytest, which prints `collected` and gives the status and output in `results`,
    or 0."""

    def run(command: list[str], limit: float, keep: int = 2000, **environment: str) -> gpu.Result:
        default = (2, collected) if "--collect-only" in command else (0, "1 passed")
        status, tail = results.get(command[-1], default)
        return {"status": status, "seconds": 1.0, "tail": tail}

    monkeypatch.setattr(gpu, "run", run)
    return gpu.test(options())


def test_a_file_that_cannot_be_collected_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens if the machine lacks a package that one file imports."""
    result = run_tests_with(monkeypatch, "tests/cuda/test_a.py::test_one[cuda]\n", {})
    assert result["status"] == 2
    assert {name: part["status"] for name, part in result["parts"].items()} == {"collect": 2, "tests/cuda/test_a.py": 0}


@pytest.mark.parametrize(
    ("status", "output"), [(124, ""), (-11, ""), (1, "RuntimeError: CUDA error: an illegal memory access")]
)
def test_functions_of_a_file_that_crashes_run_by_themselves(
    status: int, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = "tests/cuda/test_a.py", "tests/cuda/test_b.py"
    collected = f"{a}::test_one[cuda]\n{a}::test_two\n{b}::test_one\n"
    results = {a: (status, output), f"{a}::test_two": (status, output), b: (1, "1 failed")}
    parts = run_tests_with(monkeypatch, collected, results)["parts"]
    statuses = {name: part["status"] for name, part in parts.items() if name != "collect"}
    assert statuses == {f"{a}::test_one": 0, f"{a}::test_two": status, b: 1}


def test_a_prebuilt_library_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    (tmp_path / "fp8serve").mkdir()
    assert gpu.build(options(library=tmp_path / "nowhere"))["status"] == 1
    (tmp_path / "libfp8serve_cuda.so").write_text("new")
    (tmp_path / "fp8serve/libfp8serve_cuda.so").write_text("old")
    assert gpu.build(options(library=tmp_path))["status"] == 0
    assert (tmp_path / "fp8serve/libfp8serve_cuda.so").read_text() == "new"


def test_an_unknown_part_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--skip", "tests"])
    with pytest.raises(SystemExit):
        gpu.arguments()
    assert "there is no part tests" in capsys.readouterr().err


def test_results_are_written_whatever_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def build(_: argparse.Namespace) -> gpu.Result:
        raise OSError("no nvcc")

    def measure(_: argparse.Namespace) -> gpu.Result:
        rows = [{"what": "a", "goal": 1.0, "predicted": 0.5, "measured": 2.0}]
        return gpu.together({"gemm": {"status": 0, "seconds": 1.0, "measured": {"rows": rows}}})

    monkeypatch.setattr(gpu, "PARTS", (build, measure))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "machine", lambda dry_run: {"gpu": "NVIDIA Test 1", "date": "2026-11-21T00:00:00"})
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path)])
    assert gpu.main() == 1
    report = json.loads((tmp_path / "test-1-2026-11-21.json").read_text())
    assert report["build"]["tail"] == "OSError: no nvcc"
    assert gpu.measured_rows(report)[0]["measured"] == 2.0
    page = (tmp_path / "test-1-2026-11-21.md").read_text()
    assert page.startswith("# NVIDIA Test 1, 2026-11-21\n")
    assert "| build | failed with status 1 | 0 |" in page
    assert "| a | 1 | 0.5 | 2 | reached |" in page


def test_the_page_has_a_table_for_each_group_and_names_failures() -> None:
    rows = [{"what": "x", "us": 12.3456}, {"what": "y", "by": "cuBLASLt", "refused": "no"}]
    groups = {
        "gemm": {"status": 0, "seconds": 2.0, "measured": {"rows": rows}},
        "casts": {"status": 124, "seconds": 45.0},
    }
    about = {"gpu": "Test 1", "date": "2026-11-21T00:00:00", "driver": "1.2"}
    page = gpu.page(about, {"measure": gpu.together(groups), "sanitize": {"status": None, "seconds": 0}})
    assert "* driver: 1.2" in page
    assert "| measure: casts | took too long | 45.0 |" in page
    assert "| sanitize | not run | 0 |" in page
    assert (
        "## gemm\n\n| what | us | by | refused |\n|---|---|---|---|\n| x | 12.3 |  |  |\n| y |  | cuBLASLt | no |"
        in page
    )
    assert "## casts\n\nNothing was measured." in page


def test_the_sanitizers_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], limit: float, **environment: str) -> gpu.Result:
        commands.append(command)
        return {"status": 9 if "racecheck" in command else 0, "seconds": 1.0}

    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(gpu.shutil, "which", lambda name: f"/usr/bin/{name}")
    result = gpu.sanitize(options())
    assert [command[:3] for command in commands] == [
        ["/usr/bin/compute-sanitizer", "--tool", name] for name in ("memcheck", "racecheck", "synccheck")
    ]
    assert result["status"] == 9
    assert result["parts"]["synccheck"]["status"] == 0
    selected = commands[0][commands[0].index("-k") + 1]
    assert any(f"def {selected}" in path.read_text() for path in (ROOT / "tests/cuda").glob("test_*.py"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cmake") is None or shutil.which("ninja") is None, reason="needs cmake and ninja")
def test_a_rehearsal_runs_every_part_without_a_gpu(tmp_path: Path) -> None:
    """Except the sanitizers, whose rehearsal collects tests that the part `test` collects, too."""
    command = [sys.executable, "benchmarks/gpu.py", "--dry-run", "--skip", "sanitize", "--out", str(tmp_path)]
    table = (ROOT / "csrc/cuda/gemm_tiles.h").read_text()
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    (report_file,) = tmp_path.glob("dry-run-*.json")
    report = json.loads(report_file.read_text())
    states = {part: report[part]["status"] for part in ("build", "test", "measure", "tune")}
    assert states == dict.fromkeys(states, 0), process.stdout[-5000:]
    assert process.returncode == 0
    assert set(report["measure"]["parts"]) == {*gpu.KERNELS, *gpu.PROGRAMS} - {"job"}
    assert report_file.with_suffix(".md").read_text().startswith("# dry run, ")
    assert (ROOT / "csrc/cuda/gemm_tiles.h").read_text() == table
