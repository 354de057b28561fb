"""Records parity vectors: python -m tests.cuda.record_vectors, on a CPU with the CPU library.

vectors.safetensors has inputs and the results of CPU kernels. CPU and GPU kernels are tested against it, so that data
and scales do not depend on the machine that runs the tests. It is recorded again only if docs/numerics.md changes.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from tests.csrc.helpers import FORMATS, hostile, tame

PATH = Path(__file__).parent / "vectors.safetensors"
NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
HIGH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CASTS = {  # name: (op, arguments after x and dtype)
    "current": ("quantize_current", (False,)),
    "current_power2": ("quantize_current", (True,)),
    "row": ("quantize_rowwise", (False,)),
    "block1x128": ("quantize_block", (1, False)),
    "block128x128": ("quantize_block", (128, False)),
}


KINDS = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def load() -> dict[str, Tensor]:
    """Reads PATH without the safetensors package, since a machine with a GPU may have only torch."""
    content = PATH.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header, tensors = json.loads(content[8:begin]), {}
    for name, tensor in header.items():
        if name != "__metadata__":
            first, last = tensor["data_offsets"]
            raw = torch.tensor(list(content[begin + first : begin + last]), dtype=torch.uint8)
            tensors[name] = raw.view(KINDS[tensor["dtype"]]).reshape(tensor["shape"])
    return tensors


def casts() -> dict[str, Tensor]:
    tensors = {}
    for kind, high in HIGH.items():
        tensors[f"{kind}.x"] = x = hostile(33, 272, high, seed=5)
        for dtype in FORMATS:
            for name, (op, rest) in CASTS.items():
                q, scale_inv = getattr(torch.ops.fp8serve, op)(x, dtype, *rest)
                tensors |= {f"{kind}.{NAMES[dtype]}.{name}.q": q, f"{kind}.{NAMES[dtype]}.{name}.scale_inv": scale_inv}
            q, amax = torch.ops.fp8serve.quantize(x, torch.tensor(0.37), dtype)
            tensors |= {f"{kind}.{NAMES[dtype]}.given.q": q, f"{kind}.{NAMES[dtype]}.given.amax": amax}
    return tensors


def products() -> dict[str, Tensor]:
    """Returns quantized operands, scales and the FP32 product of one GEMM for each granularity."""
    tensors = {}
    ops = torch.ops.fp8serve
    a, b, dtype = tame(21, 272, seed=6), tame(40, 272, seed=7), FORMATS[0]
    pairs = {
        "tensor": (ops.quantize_current(a, dtype, False), ops.quantize_current(b, dtype, False)),
        "row": (ops.quantize_rowwise(a, dtype, False), ops.quantize_rowwise(b, dtype, False)),
        "block": (ops.quantize_block(a, dtype, 1, False), ops.quantize_block(b, dtype, 128, False)),
    }
    for name, ((a_q, a_scale), (b_q, b_scale)) in pairs.items():
        out = ops.scaled_mm(a_q, b_q, a_scale, b_scale, None, torch.float32)
        parts = {"a": a_q, "b": b_q, "a_scale": a_scale, "b_scale": b_scale, "out": out}
        tensors |= {f"mm.{name}.{part}": t for part, t in parts.items()}
    return tensors


if __name__ == "__main__":
    from safetensors.torch import save_file

    from fp8serve.fp8 import ops

    if ops.cpu_isa() is None:
        raise SystemExit("The CPU library is not built, and the vectors are what its kernels compute: make setup")
    metadata = {"torch": torch.__version__, "cpu": str(ops.cpu_isa())}
    save_file({name: t.contiguous() for name, t in (casts() | products()).items()}, PATH, metadata=metadata)
    print(f"{PATH}: {PATH.stat().st_size} bytes")
