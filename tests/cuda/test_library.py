"""The built CUDA library, without a GPU: registrations, symbols and instructions."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fp8serve.fp8 import ops
from tests.csrc.test_library import ALLOWED
from tests.cuda import sass

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "csrc/cuda"
BUILT = [path for path in (ROOT / "build").glob("*/libfp8serve_cuda.so") if path.is_file()]
pytestmark = pytest.mark.smoke
built = pytest.mark.skipif(not BUILT, reason="libfp8serve_cuda.so was not built (make cuda)")


def test_every_op_has_a_cuda_kernel_and_no_kernel_is_without_an_op():
    registered = [re.findall(r'm\.impl\("(\w+)"', path.read_text()) for path in SOURCES.glob("*.cu")]
    expected = sorted(ops.compiled_for("cuda"))
    assert sorted(name for names in registered for name in names) == expected


def test_only_stable_headers_are_included():
    texts = {path.name: path.read_text() for path in SOURCES.iterdir() if path.suffix in {".h", ".cu", ".cpp"}}
    included = {
        (name, line)
        for name, text in texts.items()
        for line in re.findall(r'#include [<"](torch/[^>"]+|ATen/[^>"]+|c10/[^>"]+|Python.h)[>"]', text)
    }
    assert included
    assert [include for include in included if not ALLOWED.match(include[1])] == []


@pytest.mark.skipif(shutil.which("cmake") is None or shutil.which("c++") is None, reason="needs cmake and a compiler")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["-DFP8SERVE_CUDA=ON", "-DCMAKE_CUDA_COMPILER=NOTFOUND"], "nvcc was not found, so no CUDA kernels are built"),
        (["-DFP8SERVE_CUDA=OFF"], ""),
    ],
)
def test_the_cpu_library_is_configured_without_nvcc(tmp_path, settings, message):
    command = [
        "cmake",
        "-S",
        str(ROOT / "csrc"),
        "-B",
        str(tmp_path),
        f"-DPython_EXECUTABLE={sys.executable}",
        *settings,
    ]
    process = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert process.returncode == 0, process.stderr
    assert message in process.stdout + process.stderr
    targets = subprocess.run(
        ["cmake", "--build", str(tmp_path), "--target", "help"], capture_output=True, text=True
    ).stdout
    assert "fp8serve_cpu" in targets
    assert "fp8serve_cuda" not in targets


@built
@pytest.mark.parametrize("library", BUILT, ids=lambda path: path.parent.name)
def test_no_symbol_of_torchs_unstable_abi_is_needed(library):
    listing = subprocess.run(["nm", "-D", "--undefined-only", "--demangle", library], capture_output=True, text=True)
    assert "aoti_torch_get_current_cuda_stream" in listing.stdout
    assert [line for line in listing.stdout.splitlines() if re.search(r"\b(at|c10|torch|caffe2)::", line)] == []
    assert not re.search(r" cu[A-Z]\w+| cuda[A-Z]\w+", listing.stdout), (
        "the driver is loaded at run time, and the runtime is linked statically"
    )


disassembled = pytest.mark.skipif(
    not BUILT or sass.cuobjdump() is None, reason="needs a build (make cuda) and cuobjdump"
)


@disassembled
@pytest.mark.parametrize("library", BUILT, ids=lambda path: path.parent.name)
def test_every_architecture_uses_its_own_tensor_instructions(library):
    tool = sass.cuobjdump()
    architectures = sass.architectures(library, tool)
    assert architectures
    for arch in architectures:
        counts = sass.disassembled(library, tool).tensor_instructions[arch]
        assert all(counts[instruction] > 0 for instruction in sass.EXPECTED[arch]), arch


@disassembled
@pytest.mark.parametrize("library", BUILT, ids=lambda path: path.parent.name)
def test_no_elementwise_kernel_divides_integers_of_64_bits(library):
    """The delayed update divides once for each state, and attention once for each row, for its sink."""
    sources = sass.long_divisions(library, sass.cuobjdump(), "s")
    assert "scaling.cu" in sources, "the search does not recognize divisions"
    assert sources <= {
        "",
        "scaling.cu",
        "attention.cu",
        "attention_mma.cu",
        "attention_tensor.cu",
        "attention_wgmma.cu",
    }
    elementwise = {"activations.cu", "elementwise.cu", "quantize.cu", "sample.cu", "write_kv.cu"}
    assert sass.long_divisions(library, sass.cuobjdump(), "u").isdisjoint(elementwise)


@disassembled
@pytest.mark.parametrize("library", BUILT, ids=lambda path: path.parent.name)
def test_kernels_access_no_memory_before_they_wait_for_earlier_kernels(library):
    """Except the skinny kernel, which copies stored weights to shared memory (test_races.py)."""
    accesses_by_kernel = sass.disassembled(library, sass.cuobjdump()).early_accesses
    assert bool(accesses_by_kernel) == any(arch != "sm_89" for arch in sass.architectures(library, sass.cuobjdump()))
    early = {name: accesses for name, accesses in accesses_by_kernel.items() if accesses}
    assert bool(early) == bool(accesses_by_kernel)
    assert all("gemm_skinny_cu" in name and "gemm_stream" in name for name in early), early.keys()
    assert {access.partition(".")[0] for accesses in early.values() for access in accesses} <= {"LDGSTS"}


LOAD = """
import sys, torch
from fp8serve.fp8 import ops
torch.ops.load_library(sys.argv[1])
has = torch._C._dispatch_has_kernel_for_dispatch_key
expected = ops.compiled_for("cuda")
missing = [op for op in expected if not has(f"fp8serve::{op}", "CUDA")]
dangling = [entry for entry in torch._C._dispatch_find_dangling_impls() if "fp8serve" in entry]
print(missing, dangling)
"""


@built
@pytest.mark.parametrize("library", BUILT, ids=lambda path: path.parent.name)
def test_the_library_loads_and_registers_every_op(library):
    """Loads it into a torch without CUDA, with the stub of libtorch_cuda.so that the library was linked against."""
    stub = library.parent / "stub"
    environment = {"LD_LIBRARY_PATH": str(stub), "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", LOAD, str(library)]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "[] []"
