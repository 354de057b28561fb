"""Compile `count_zeros.cpp` as a kernel for the op of op.py, and hold it to the reference.

In the library the file lies in csrc/cpu/, and `make setup` compiles it with the others. Here it is compiled by itself,
with the flags of csrc/CMakeLists.txt that matter. docs/extending/kernel.md explains it.

    python examples/extending/kernel.py
"""

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import op  # noqa: E402 - the example beside this one, which defines the op

CSRC = HERE.parents[1] / "csrc"
TORCH = Path(torch.__file__).parent


def compiled(source: Path, into: Path) -> Path:
    """A shared library of one file. torch's stable headers are all that it needs of torch."""
    out = into / "libcount_zeros.so"
    flags = ["-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden"]
    include = [f"-I{CSRC}", "-isystem", str(TORCH / "include"), "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    link = [f"-L{TORCH / 'lib'}", "-ltorch_cpu"]
    subprocess.run(["c++", *flags, *include, str(source), *link, "-o", str(out)], check=True)
    return out


def main() -> None:
    if shutil.which("c++") is None:
        print("there is no C++ compiler here, so the reference answers; install g++ or clang++ to run this example")
        return
    with TemporaryDirectory() as folder:
        torch.ops.load_library(compiled(HERE / "count_zeros.cpp", Path(folder)))
        assert torch._C._dispatch_has_kernel_for_dispatch_key("fp8serve::count_zeros", "CPU")
        print(f"count_zeros: {op.check()} cases, by the kernel")


if __name__ == "__main__":
    main()
