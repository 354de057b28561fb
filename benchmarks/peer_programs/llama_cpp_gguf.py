"""llama.cpp as a peer of `python -m benchmarks.studies quality`: a GGUF file, quantized again if a type is named.

    python -m benchmarks.studies quality MODEL --out DIR \\
        --peer "Q8_0=PYTHON benchmarks/peer_programs/llama_cpp_gguf.py FILE Q8_0"

PYTHON: the interpreter of an environment with `llama-cpp-python`. FILE should hold the weights that MODEL has, in F16,
BF16 or F32. The protocol is that of fp8serve/bench/quality_peers.py.
"""

import ctypes
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

CONTEXT = 2048


def quantized(file: Path, kind: str, folder: str) -> Path:
    """Returns the file in another type; output and embedding as llama.cpp chooses for it."""
    out = Path(folder) / f"{kind}.gguf"
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    parameters.allow_requantize = True
    if llama_cpp.llama_model_quantize(str(file).encode(), str(out).encode(), ctypes.byref(parameters)):
        raise SystemExit(f"{file} cannot be quantized to {kind}.")
    return out


def logits(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    model.reset()
    model.eval(request["ids"])
    np.save(request["logits"], np.asarray(model.scores[: len(request["ids"])], dtype=np.float32))
    return {}


def speed(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Returns the median step of greedy decoding."""
    model.reset()
    model.eval(request["prompt"])
    steps = []
    for _ in range(request["new"]):
        began = time.perf_counter()
        token = int(np.argmax(model.scores[model.n_tokens - 1]))
        model.eval([token])
        steps.append(time.perf_counter() - began)
    return {"tokens_per_second": 1 / sorted(steps)[len(steps) // 2]}


def main() -> None:
    file, kind = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    with tempfile.TemporaryDirectory() as folder:
        file = quantized(file, kind, folder) if kind else file
        threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
        model = llama_cpp.Llama(
            str(file), n_ctx=CONTEXT, n_batch=CONTEXT, logits_all=True, verbose=False,
            n_threads=threads, n_threads_batch=threads,
        )  # fmt: skip
        about = f"llama.cpp {kind or file.name}, llama-cpp-python {llama_cpp.__version__}"
        print(json.dumps({"bytes": file.stat().st_size, "name": about}), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            print(json.dumps((logits if "logits" in request else speed)(model, request)), flush=True)


if __name__ == "__main__":
    main()
