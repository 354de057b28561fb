"""The build works without a compiler, and the installed package is importable from every directory."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_without_a_compiler_cmake_warns_and_builds_nothing(tmp_path: Path) -> None:
    cmake = shutil.which("cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if cmake is None:
        pytest.skip("cmake is not installed")
    environment = os.environ | {"CXX": "/nonexistent/c++"}
    configure = [cmake, "-S", str(ROOT / "csrc"), "-B", str(tmp_path), f"-DPython_EXECUTABLE={sys.executable}"]
    process = subprocess.run(configure, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "no C++ compiler was found" in " ".join(process.stderr.split())
    subprocess.run([cmake, "--build", str(tmp_path)], check=True, capture_output=True)
    assert not list(tmp_path.rglob("*.so"))


def test_the_package_and_calibration_are_found_from_another_directory(tmp_path: Path) -> None:
    code = (
        "import fp8serve, fp8serve.calibration.pipeline as p, fp8serve.calibration.data as d; "
        "assert d.PASSAGES.is_file(); print(p.__name__, fp8serve.backends()['scaled_mm'])"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert process.stdout.startswith("fp8serve.calibration.pipeline ")


def test_a_calibrate_py_in_the_working_directory_does_not_shadow_the_package(tmp_path: Path) -> None:
    (tmp_path / "calibrate.py").write_text("raise SystemExit('the wrong one')\n")
    code = "import fp8serve.calibration.data as d; print(d.__name__)"
    process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert process.stdout == "fp8serve.calibration.data\n"


def test_every_requirement_is_pinned() -> None:
    import re
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    required = project["build-system"]["requires"] + project["project"]["dependencies"]
    required += project["project"]["optional-dependencies"]["dev"]
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), flags=re.M)

    def plain(name: str) -> str:
        return re.split(r"[<>=!\[; ]", name)[0].lower().replace("_", "-")

    assert {plain(r) for r in required} <= {plain(p) for p in pinned}
