"""The CPU library uses only torch's stable ABI, and registers a kernel for every op that should have one."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from fp8serve.fp8 import ops
from fp8serve.fp8.ops import LEVELS

CSRC = Path(__file__).parents[2] / "csrc"
ALLOWED = re.compile(r"torch/(csrc/stable|headeronly|csrc/inductor/aoti_torch/c)/")


@pytest.mark.smoke
def test_every_op_compiled_for_the_cpu_has_a_kernel():
    registered = {op for op in ops.OPS if torch._C._dispatch_has_kernel_for_dispatch_key(f"fp8serve::{op}", "CPU")}
    assert registered == ops.compiled_for("cpu")


@pytest.mark.smoke
def test_no_kernel_is_registered_without_an_op():
    dangling = torch._C._dispatch_find_dangling_impls()
    assert [entry for entry in dangling if "fp8serve" in entry] == []


def test_only_stable_headers_are_included():
    includes = [
        (path.name, line)
        for path in CSRC.rglob("*")
        if path.suffix in {".h", ".cpp"}
        for line in re.findall(r'#include [<"](torch/[^>"]+|ATen/[^>"]+|c10/[^>"]+|Python.h)[>"]', path.read_text())
    ]
    assert includes
    assert [include for include in includes if not ALLOWED.match(include[1])] == []


@pytest.mark.skipif(shutil.which("nm") is None, reason="binutils is not installed")
def test_no_symbol_of_torchs_unstable_abi_is_needed():
    listing = subprocess.run(
        ["nm", "-D", "--undefined-only", "--demangle", str(ops.LIBRARIES["cpu"])], capture_output=True, text=True
    )
    assert "aoti_torch_" in listing.stdout
    assert [line for line in listing.stdout.splitlines() if re.search(r"\b(at|c10|torch|caffe2)::", line)] == []


@pytest.mark.skipif(shutil.which("nm") is None, reason="binutils is not installed")
def test_no_symbol_of_fp8serve_is_exported():
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", "--demangle", str(ops.LIBRARIES["cpu"])], capture_output=True, text=True
    )
    assert [line for line in listing.stdout.splitlines() if "fp8serve::" in line] == []


def test_the_level_can_only_be_lowered():
    best = torch.ops.fp8serve.cpu_isa("best")
    assert best in LEVELS
    assert torch.ops.fp8serve.cpu_isa("portable") == "portable"
    assert torch.ops.fp8serve.cpu_isa("") == "portable"
    assert torch.ops.fp8serve.cpu_isa("avx512bf16") == best
    assert torch.ops.fp8serve.cpu_isa("best") == best


def test_an_unknown_level_is_refused():
    with pytest.raises(RuntimeError, match="is 'sse9', must be portable, avx2"):
        torch.ops.fp8serve.cpu_isa("sse9")
