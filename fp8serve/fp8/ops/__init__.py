"""The ops, one module a family: schema, reference, fake kernel and cases of an op side by side.

`registry.py` makes an op known, `libraries.py` loads the compiled kernels and says who serves what. A new op is a
`define` in its family's module and a kernel under the same name in csrc/cpu and csrc/cuda; the benchmark, doctor and
the tests that hold every op to the same rules find it in the registry.

Importing this package registers all of them with torch, as `torch.ops.fp8serve`.
"""

# ruff: isort: off
# Families in the order in which backends() lists their ops; then the libraries, whose kernels are for defined ops.
from fp8serve.fp8.ops import casts, gemm, packing, joined, grouped, mixture, delayed  # noqa: F401
from fp8serve.fp8.ops import norm, activation, strips, grouped_mlp, attention, rotary  # noqa: F401
from fp8serve.fp8.ops import sampling, saturation  # noqa: F401
from fp8serve.fp8.ops.libraries import (
    LEVELS,
    LIBRARIES,
    backends,
    cpu_isa,
    cpu_kernels,
    library_path,
    reads_packed,
)

# ruff: isort: on
from fp8serve.fp8.ops.arithmetic import DTYPES, blocks
from fp8serve.fp8.ops.checked import dequantize, quantize, scaled_mm
from fp8serve.fp8.ops.registry import OPS, Case, cases, compiled_for, implement, recipe_ops, reference

__all__ = [
    "DTYPES",
    "LEVELS",
    "LIBRARIES",
    "OPS",
    "Case",
    "backends",
    "blocks",
    "cases",
    "compiled_for",
    "cpu_isa",
    "cpu_kernels",
    "dequantize",
    "implement",
    "library_path",
    "quantize",
    "reads_packed",
    "recipe_ops",
    "reference",
    "scaled_mm",
]
