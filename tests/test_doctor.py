"""doctor says what is true of this machine."""

import json
import os
from pathlib import Path

import pytest
import torch

from fp8serve import doctor
from fp8serve.cli import main
from fp8serve.fp8 import ops


def test_kernels_are_those_of_ops(tmp_path: Path) -> None:
    assert doctor.examine(tmp_path)["kernels"] == ops.backends()


def test_recipes_name_ops_that_exist() -> None:
    assert {op for needed in doctor.RECIPE_OPS.values() for op in needed} <= set(ops.OPS)


def test_a_recipe_is_native_when_all_its_ops_have_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    served = dict.fromkeys(ops.OPS, "cpu kernel (avx2)") | {"quantize_block": "reference"}
    monkeypatch.setattr(ops, "backends", lambda device="cpu": served)
    recipes = doctor.examine(tmp_path)["recipes"]
    assert recipes["delayed"]["runs"] == "natively"
    assert recipes["block"] == {"runs": "on the reference", "why": "no compiled kernel for quantize_block"}


def test_instruction_sets_agree_with_torch() -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        assert "avx512f" in doctor.instruction_sets()
    assert capability != "AVX2" or "avx2" in doctor.instruction_sets()


def test_disk_of_a_directory_that_does_not_exist_yet(tmp_path: Path) -> None:
    disk = doctor.examine(tmp_path / "not" / "yet")["disk"]
    assert disk["free"] > 0
    assert not (tmp_path / "not").exists()


def test_memory_is_what_the_system_says() -> None:
    memory = doctor.examine(Path("/tmp"))["memory"]
    assert 0 < memory["available"] <= memory["total"] <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_compiler_that_does_not_run_is_not_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.examine(tmp_path)["compilers"] == {"c++": None, "nvcc": None}


def test_a_compiler_that_cxx_names_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "my-c++"
    compiler.write_text("#!/bin/sh\necho my C++ 1.0\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert doctor.examine(tmp_path)["compilers"]["c++"] == "my C++ 1.0"


def test_json_is_one_document(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--json", "--data-dir", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["torch"]["version"] == torch.__version__
    assert report["problems"] == []


def test_text_shows_every_op_and_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--data-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for word in [*ops.OPS, *doctor.RECIPE_OPS, "bf16", "memory", "disk"]:
        assert word in shown


def test_a_data_directory_that_cannot_be_written_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    disk = {"path": str(tmp_path), "free": 1 << 40, "writable": False}
    monkeypatch.setattr(doctor, "_disk", lambda path: disk)
    assert main(["doctor", "--data-dir", str(tmp_path)]) == 1
    assert "cannot be written" in capsys.readouterr().out


def test_a_full_disk_is_a_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "_LEAST_DISK", 1 << 60)
    assert main(["doctor"]) == 1
    assert "checkpoints will not fit" in capsys.readouterr().out
