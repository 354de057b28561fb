"""The ops of fp8serve. A module defines a family of ops, each with its schema, reference, fake kernel and test inputs.

`registry.py` registers ops with torch. `libraries.py` loads the compiled kernels and reports which kernel runs each op.
To add an op, call `define` in the module of its family, and write kernels of the same name in csrc/cpu and csrc/cuda.
The benchmark, doctor and the tests that apply to every op read the registry.

Importing this package registers all ops as `torch.ops.fp8serve`.
"""

# ruff: isort: off
# Families in the order in which backends() lists their ops. The libraries come last, because ops must be defined first.
from fp8serve.fp8.ops import casts, gemm, packing, microscaling, grouped, four_bit, delayed  # noqa: F401
from fp8serve.fp8.ops import elementwise, fused_casts, mixture, attention, sampling, monitored_casts  # noqa: F401
from fp8serve.fp8.ops.libraries import (
    LEVELS,
    LIBRARIES,
    backends,
    cpu_isa,
    cpu_kernels,
    reads_packed,
)

# ruff: isort: on
from fp8serve.fp8.ops.arithmetic import DTYPES, blocks
from fp8serve.fp8.ops.public import dequantize, quantize, scaled_mm
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
    "quantize",
    "reads_packed",
    "recipe_ops",
    "reference",
    "scaled_mm",
]
