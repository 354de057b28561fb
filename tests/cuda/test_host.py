"""The host side of the CUDA kernels, without a GPU: launches, chips, descriptors and the build."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cuda import sass

ROOT = Path(__file__).parents[2]
HERE = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
CMAKE, NVCC = shutil.which("cmake", path=HERE), shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None or CMAKE is None, reason="needs nvcc 12.8 or newer and cmake")


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_the_cpp_checks_of_launches_chips_and_descriptors_pass(tmp_path):
    program = tmp_path / "host_checks"
    source = ROOT / "tests/cuda/host_checks.cpp"
    subprocess.run(["c++", "-std=c++20", "-Wall", "-Werror", f"-I{ROOT}/csrc", source, "-o", program], check=True)
    process = subprocess.run([program], capture_output=True, text=True)
    assert (process.stdout, process.returncode) == ("", 0)


@pytest.mark.skipif(CMAKE is None, reason="needs cmake")
@pytest.mark.parametrize(
    ("version", "message"),
    [((4, 1), "CUTLASS 4.1 is too old, 4.2 is needed"), ((3, 9), "too old"), ((4, 2), ""), ((4, 10), ""), ((5, 0), "")],
)
def test_an_old_cutlass_is_not_used(tmp_path, version, message):
    header = tmp_path / "include/cutlass/version.h"
    header.parent.mkdir(parents=True)
    header.write_text("#pragma once\n#define CUTLASS_MAJOR {}\n#define CUTLASS_MINOR {}\n".format(*version))
    script = ROOT / "csrc/cuda/cutlass.cmake"
    process = subprocess.run(
        [CMAKE, f"-DFP8SERVE_CUTLASS_DIR={tmp_path}", "-P", script], capture_output=True, text=True
    )
    assert process.returncode == 0
    assert bool(process.stderr) == bool(message)
    assert message in " ".join(process.stderr.split())


@needs_nvcc
def test_host_code_is_optimized_and_architectures_are_passed_to_the_products(tmp_path):
    (tmp_path / "include/cutlass").mkdir(parents=True)
    (tmp_path / "include/cutlass/version.h").write_text("#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n")
    settings = ["-DFP8SERVE_CUDA=ON", f"-DFP8SERVE_CUTLASS_DIR={tmp_path}", "-DFP8SERVE_CUDA_ARCHS=90a;100f;120a"]
    settings += ["-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", f"-DPython_EXECUTABLE={sys.executable}"]
    build = tmp_path / "build"
    configured = subprocess.run(
        [CMAKE, "-S", ROOT / "csrc", "-B", build, *settings],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": HERE},
    )
    assert configured.returncode == 0, configured.stderr
    commands = [entry["command"] for entry in json.loads((build / "compile_commands.json").read_text())]
    cutlass = [command for command in commands if "gemm_sm" in command and "gemm_sm89" not in command]
    assert len(cutlass) == 6
    assert [command for command in commands if "-O0" in command] == []
    assert [command for command in cutlass if "-Xcompiler -O2" not in command] == []
    for source in ("gemm.cu", "gemm_grouped.cu"):
        product = next(command for command in commands if f"cuda/{source} " in command)
        for definition in ("FP8SERVE_HAVE_sm90=1", "FP8SERVE_HAVE_sm100=2", "FP8SERVE_HAVE_sm120=1"):
            assert definition in product


def compile_cuda(source, out, *options):
    places = [f"-I{ROOT}/csrc", "-isystem", str(Path(torch.__file__).parent / "include")]
    defines = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DUSE_CUDA"]
    common = ["-std=c++20", "--expt-relaxed-constexpr", "-O3"]
    subprocess.run([NVCC, *common, *options, *places, *defines, ROOT / "tests/cuda" / source, "-o", out], check=True)


@needs_nvcc
@pytest.mark.parametrize(
    "arch", [pytest.param("sm_90a", marks=pytest.mark.slow), "sm_100f", pytest.param("sm_120f", marks=pytest.mark.slow)]
)
def test_functions_that_no_kernel_uses_yet_compile(arch, tmp_path):
    compile_cuda("probe_blocks.cu", tmp_path / "probe.o", f"-arch={arch}", "-c")


@needs_nvcc
@pytest.mark.skipif(sass.cuobjdump() is None, reason="cuobjdump is not installed")
def test_rotary_in_fp32_uses_no_fused_multiply_add(tmp_path):
    """An FFMA would skip the rounding of a product, so the bits would differ from the reference."""
    cubin = tmp_path / "probe.cubin"
    compile_cuda("probe.cu", cubin, "-arch=sm_89", "-cubin")
    counts = sass.fused_in(cubin, sass.cuobjdump(), "probe_rotated")
    assert list(counts.values()) == [0]
