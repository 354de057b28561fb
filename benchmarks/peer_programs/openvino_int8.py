"""OpenVINO with INT8 weights as a peer of `python -m benchmarks.studies quality`.

    python -m benchmarks.studies quality MODEL --out DIR \\
        --peer "OpenVINO INT8=PYTHON benchmarks/peer_programs/openvino_int8.py MODEL"

PYTHON is the interpreter of an environment with `optimum-intel[openvino]`, and MODEL a Hugging Face directory. Weights
are INT8 per channel, as optimum-intel's `load_in_8bit` makes them. The protocol is that of
fp8serve/bench/quality_peers.py.
"""

import json
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from optimum.intel import OVModelForCausalLM


def logits(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    output = model(input_ids=(ids := torch.tensor([request["ids"]])), attention_mask=torch.ones_like(ids)).logits
    np.save(request["logits"], output[0].float().numpy())
    return {}


def speed(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Returns the median step of greedy decoding."""
    ids = torch.tensor([request["prompt"]])
    past, steps = None, []
    for _ in range(request["new"] + 1):
        began = time.perf_counter()
        mask = torch.ones(1, len(request["prompt"]) + len(steps), dtype=torch.int64)
        out = model(input_ids=ids, attention_mask=mask, past_key_values=past)
        past, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
        steps.append(time.perf_counter() - began)
    decoding = sorted(steps[1:])
    return {"tokens_per_second": 1 / decoding[len(decoding) // 2]}


def main() -> None:
    threads = os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)
    model = OVModelForCausalLM.from_pretrained(
        sys.argv[1], export=True, load_in_8bit=True, ov_config={"INFERENCE_NUM_THREADS": str(threads)}
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        size = sum(file.stat().st_size for file in Path(folder).glob("*.bin"))
    print(json.dumps({"bytes": size, "name": f"OpenVINO INT8, {version('openvino')}"}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps((logits if "logits" in request else speed)(model, request)), flush=True)


if __name__ == "__main__":
    main()
