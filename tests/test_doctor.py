"""`fp8serve doctor` reports the kernels, hardware, disk and problems of this machine."""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fp8serve import doctor
from fp8serve.cli import main
from fp8serve.commands.doctor import _same_bits
from fp8serve.fp8 import cuda_support, ops, selfcheck
from fp8serve.fp8.cuda_support import Gpu
from fp8serve.fp8.numerics_classes import LEVELS, REFERENCE, ROWS, describe_column, same_bits
from fp8serve.fp8.ops import registry
from fp8serve.model import device
from tests.tiny import write_tiny_model


def test_kernels_are_those_of_ops(tmp_path: Path) -> None:
    assert doctor.examine(tmp_path)["kernels"] == ops.backends()


def test_the_classes_are_those_of_the_level_in_force(tmp_path: Path) -> None:
    level = ops.cpu_isa() or REFERENCE
    (column, rows), *gpus = doctor.examine(tmp_path)["numerics_classes"].items()
    assert (column, len(gpus)) == (level, min(torch.cuda.device_count(), 1))
    assert [row["class"] for row in rows] == [row.cells[level] for row in ROWS]
    gpu = doctor._numerics_classes(ops.backends(), [{"architecture": f"sm_{chip}"} for chip in (86, 90, 103, 121)])
    assert list(gpu) == [level, "sm_89", "sm_90a", "sm_100f", "sm_120f"]


def test_an_op_on_the_reference_has_the_class_of_the_reference() -> None:
    kernels = dict.fromkeys(ops.OPS, "cpu kernel (avx2)") | {"mm": "reference; its cpu kernel is switched off"}
    (rows,) = doctor._numerics_classes(kernels, []).values()
    classes = {(row["operation"], row["format"]): row["class"] for row in rows}
    assert classes["product (mm)", "BF16 x BF16"] == "torch"
    assert classes["product (packed_mm)", "BF16 x BF16"] != "torch"
    assert classes["update of delayed scales", "FP32"] == "exact"


def test_the_processors_with_the_same_bits_are_named_in_few_words() -> None:
    by_format = {row.format: row for row in ROWS if row.operation in {"cast", "product", "attention"}}
    described = {row["format"]: _same_bits(row) for row in describe_column("avx512bf16", set())}
    assert described["MXFP8"] == "every processor"
    assert described["FP8 x FP8, scales by block"] == "every CPU"
    assert described["BF16 x BF16"] == "every CPU, subnormals apart"
    assert described["BF16 queries, BF16 keys"] == "avx512bf16 amx"
    assert same_bits(by_format["BF16 x BF16"], "avx2") == [level for level in LEVELS if level != "avx512bf16"]
    assert same_bits(by_format["BF16 x BF16"], "sm_89") == ["sm_89"]


def test_recipes_need_the_ops_of_their_linear_layers() -> None:
    assert ops.recipe_ops() == {
        "delayed": ("quantize", "scaled_mm", "quantize_delayed", "delayed_update"),
        "current": ("quantize_current", "scaled_mm"),
        "rowwise": ("quantize_rowwise", "scaled_mm"),
        "block": ("quantize_block", "scaled_mm"),
        "mxfp8": ("quantize_mx", "mx_mm"),
        "nvfp4": ("cast_nvfp4", "rotate", "nvfp4_mm"),
    }


@pytest.mark.parametrize(
    ("recipe", "served", "on_gpu"),
    [
        ("mxfp8", "quantize_mx, mx_mm", "torch widens both operands to BF16"),
        ("nvfp4", "cast_nvfp4, rotate, nvfp4_mm", "torch casts to values in BF16"),
    ],
)
def test_products_without_a_kernel_on_a_gpu_are_named(recipe: str, served: str, on_gpu: str) -> None:
    kernels = dict.fromkeys(ops.OPS, "cpu kernel (avx2)")
    why = [doctor._recipes(ops.recipe_ops(), kernels, has_gpu=has_gpu)[recipe]["why"] for has_gpu in (False, True)]
    assert why[0] == f"compiled kernels serve {served}"
    assert why[1] == f"{why[0]}; on a GPU {on_gpu}, and mm multiplies them"


def test_a_recipe_is_native_when_all_its_ops_have_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    served = dict.fromkeys(ops.OPS, "cpu kernel (avx2)") | {"quantize_block": "reference"}
    monkeypatch.setattr(ops, "backends", lambda device="cpu": served)
    recipes = doctor.examine(tmp_path)["recipes"]
    assert recipes["delayed"]["runs"] == "natively"
    assert recipes["block"] == {"runs": "on the reference", "why": "no compiled kernel for quantize_block"}


def test_a_model_of_an_unknown_type_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobodys"}')
    report = doctor.examine(tmp_path, str(tmp_path))
    assert report["model"] is None
    assert any("'nobodys'" in problem for problem in report["problems"])
    assert main(["doctor", str(tmp_path), "--data-dir", str(tmp_path)]) == 1


def test_instruction_sets_agree_with_torch() -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        assert "avx512f" in doctor.instruction_sets()
    assert capability != "AVX2" or "avx2" in doctor.instruction_sets()


def test_disk_of_a_directory_that_does_not_exist_yet(tmp_path: Path) -> None:
    disk = doctor.examine(tmp_path / "not" / "yet")["disk"]
    assert disk["free"] > 0
    assert not (tmp_path / "not").exists()


def test_memory_is_within_what_the_system_reports() -> None:
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
    output = capsys.readouterr().out
    for word in [*(row.format for row in ROWS), *ops.OPS, *ops.recipe_ops(), "bf16", "memory", "disk"]:
        assert word in output


def test_a_data_directory_that_cannot_be_written_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    disk = {"path": str(tmp_path), "free": 1 << 40, "writable": False}
    monkeypatch.setattr(doctor, "_disk", lambda path: disk)
    assert main(["doctor", "--data-dir", str(tmp_path)]) == 1
    assert "cannot be written" in capsys.readouterr().out


def test_a_full_disk_is_a_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "_MIN_FREE_DISK_BYTES", 1 << 60)
    assert main(["doctor"]) == 1
    assert "checkpoints will not fit" in capsys.readouterr().out


def test_the_architectures_are_read_from_the_cuda_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "libfp8serve_cuda.so"
    library.write_bytes(b"\x7fELF" + bytes(5000) + b"fp8serve-cuda-architectures=sm_89+sm_90a;\0" + bytes(99))
    monkeypatch.setattr(cuda_support, "library_path", lambda stem: library)
    monkeypatch.setattr(torch.version, "cuda", None)
    report = doctor.cuda_library()
    assert report["architectures"] == ["sm_89", "sm_90a"]
    assert report["state"] == "built, but this torch is built without CUDA and cannot load it"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert doctor.cuda_library()["state"] == "loaded"
    library.write_bytes(b"of an older build")
    assert doctor.cuda_library()["architectures"] == []


@pytest.mark.parametrize(
    ("nvcc", "torch_cuda", "why"),
    [
        (None, "13.0", "nvcc is not on the PATH"),
        ("echo Cuda compilation tools, release 12.4, V12.4.131", "13.0", "is CUDA 12.4, and 12.8 or newer is needed"),
        ("exit 1", "13.0", "does not say its version"),
        ("echo Cuda compilation tools, release 13.0, V13.0.88", None, "this torch is built without CUDA"),
        ("echo Cuda compilation tools, release 13.0, V13.0.88", "13.0", "fp8serve was installed without it"),
    ],
)
def test_why_there_are_no_cuda_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nvcc: str | None, torch_cuda: str | None, why: str
) -> None:
    if nvcc is not None:
        (tmp_path / "nvcc").write_text(f"#!/bin/sh\n{nvcc}\n")
        (tmp_path / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cuda_support, "library_path", lambda stem: None)
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    library = doctor.cuda_library()
    assert library["path"] is None
    assert library["state"].startswith("not built: ")
    assert why in library["state"]


def test_gpus_that_the_kernels_cannot_run_on_are_problems_and_slow_ones_are_noted() -> None:
    gpus = [{"name": n, "architecture": f"sm_{c}"} for n, c in (("A", 80), ("B", 90), ("C", 103))]
    problems, notes = doctor.about_gpus(gpus, {"architectures": ["sm_89", "sm_90a", "sm_100a"]})
    assert [p[:63] for p in problems] == ["the CUDA kernels were built for sm_89 sm_90a sm_100a and not fo"]
    assert [n[:46] for n in notes] == ["the CUDA kernels have no code for C (sm_103), "]
    assert doctor.about_gpus(gpus, {"architectures": []}) == ([], [])
    assert doctor.about_gpus(gpus[1:2], {"architectures": ["sm_90a"]}) == ([], [])


def test_a_model_is_served_on_the_device_that_it_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "model")
    assert main(["doctor", str(model), "--data-dir", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "serving  device auto: cpu, because the CUDA driver finds no GPU" in output
    assert (
        "up to 16 sequences and 512 tokens a step, 128 prompt tokens while others decode, a KV cache in bf16" in output
    )
    gpu = Gpu("NVIDIA H100", 90, 79 << 30)
    monkeypatch.setattr(cuda_support, "visible_gpus", lambda: [gpu])
    monkeypatch.setattr(device, "visible_gpus", lambda: [gpu])
    monkeypatch.setattr(device, "gpu_obstacle", lambda gpu: None)
    assert main(["doctor", str(model), "--data-dir", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "serving  device auto: cuda, because NVIDIA H100 has 79.0 GiB and the model needs about 1.0 GiB" in output
    assert "up to 256 sequences and 8192 tokens a step, as many prompt tokens as take 25 ms while others" in output
    assert "92% of the memory" in output


def test_notes_are_shown_and_are_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "about_gpus", lambda gpus, library: ([], ["C is slow."]))
    assert main(["doctor", "--data-dir", str(tmp_path)]) == 0
    assert "note: C is slow." in capsys.readouterr().out


def test_the_command_shows_the_state_of_the_cuda_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    state = doctor.cuda_library()["state"]
    assert f"CUDA     kernels {state}" in capsys.readouterr().out


def replace_check(
    monkeypatch: pytest.MonkeyPatch, *findings: tuple[str, selfcheck.KernelResult], unfinished: str = ""
) -> None:
    """Replaces the check of the kernels by one that returns these results."""

    def check(device: torch.device, machine: selfcheck.Machine, progress: Callable[[str], None]) -> selfcheck.Verdict:
        progress("the kernel being checked")
        return selfcheck.Verdict(machine, "2026-11-25T01:02:03+00:00", dict(findings), unfinished)

    monkeypatch.setattr(selfcheck, "run_check", check)


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    registry.restore_library_kernels("cpu")
    if ops.LIBRARIES["cpu"]:
        torch.ops.fp8serve.cpu_isa("best")


needs_kernels = pytest.mark.skipif(ops.LIBRARIES["cpu"] is None, reason="the CPU library was not built")


@needs_kernels
def test_kernels_are_checked_on_demand_and_the_verdict_is_kept(
    own_cache: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    where = ["--data-dir", str(tmp_path)]
    assert main(["doctor", *where]) == 0
    assert (
        "check    cpu: the kernels have not been checked on this machine; run doctor --check" in capsys.readouterr().out
    )
    replace_check(
        monkeypatch, ("quantize.avx2", selfcheck.KernelResult("agrees")), ("mm.avx2", selfcheck.KernelResult("agrees"))
    )
    assert main(["doctor", "--check", *where]) == 0
    assert "check    cpu: 2 of 2 kernels agree with the reference, 2026-11-25" in capsys.readouterr().out
    assert main(["doctor", "--json", *where]) == 0
    (verdict,) = json.loads(capsys.readouterr().out)["kernel_checks"]
    assert verdict["kernels"] == {"quantize.avx2": "agrees", "mm.avx2": "agrees"}


@needs_kernels
def test_a_kernel_that_fails_its_check_is_named_and_fails_only_doctor_check(
    own_cache: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    where = ["--data-dir", str(tmp_path)]
    bad = selfcheck.KernelResult("disagrees", "3 of 4 values")
    replace_check(monkeypatch, ("look_up.portable", bad), ("quantize.avx2", selfcheck.KernelResult("agrees")))
    assert main(["doctor", "--check", *where]) == 1
    output = capsys.readouterr().out
    assert "problem: 1 kernel is switched off" in output
    assert re.search(r"cpu +look_up\.portable +disagrees: 3 of 4 values", output)
    assert re.search(r"look_up +reference; its cpu kernel is switched off", output)
    assert main(["doctor", *where]) == 0
    output = capsys.readouterr().out
    assert "note: 1 kernel is switched off" in output
    assert "1 of 2 kernels agree" in output


@needs_kernels
def test_a_check_that_could_not_run_is_a_problem(
    own_cache: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    replace_check(monkeypatch, unfinished="its process cannot be started (no memory)")
    assert main(["doctor", "--check", "--data-dir", str(tmp_path)]) == 1
    assert "did not finish: its process cannot be started (no memory)." in capsys.readouterr().out
