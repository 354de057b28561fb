"""What a process of ours must not load before it serves."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["fp8serve.engine.worker", "fp8serve.train.trainer", "fp8serve.calibration.pipeline"]
)
def test_no_compiler_and_no_transformers_is_imported(module: str) -> None:
    unwanted = ("torch._dynamo", "torch._inductor", "sympy", "transformers")
    code = f"import sys, {module}; print([m for m in {unwanted} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
