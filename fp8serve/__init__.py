"""Calibrates language models to FP8, serves them, fine-tunes them in FP8, and serves the result with its scales.

Public names are imported on first use, so that `fp8serve --help` does not import torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "DelayedScaling": "fp8serve.fp8.recipe",
    "Float8BlockScaling": "fp8serve.fp8.recipe",
    "MXFP8BlockScaling": "fp8serve.fp8.recipe",
    "NVFP4BlockScaling": "fp8serve.fp8.recipe",
    "Float8CurrentScaling": "fp8serve.fp8.recipe",
    "Float8WeightOnly": "fp8serve.fp8.recipe",
    "Float4WeightOnly": "fp8serve.fp8.recipe",
    "Format": "fp8serve.fp8.recipe",
    "quantize": "fp8serve.fp8.ops",
    "dequantize": "fp8serve.fp8.ops",
    "scaled_mm": "fp8serve.fp8.ops",
    "backends": "fp8serve.fp8.ops",
    "autocast": "fp8serve.fp8.autocast",
    "Linear": "fp8serve.fp8.linear",
    "convert": "fp8serve.fp8.conversion",
    "scaling_state": "fp8serve.fp8.stateful",
    "Session": "fp8serve.fp8.session",
    "NormLinear": "fp8serve.fp8.fused",
    "SiluMulLinear": "fp8serve.fp8.fused",
    "DotProductAttention": "fp8serve.fp8.dpa",
    "Monitor": "fp8serve.fp8.monitor",
    "Engine": "fp8serve.engine.engine",
    "calibrate": "fp8serve.calibration.pipeline",
    "finetune": "fp8serve.train.trainer",
    "log_probs": "fp8serve.train.log_probs",
    "export": "fp8serve.model.transformers_export",
    "restore_scaling": "fp8serve.model.transformers_export",
}

__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'fp8serve' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
