"""The resident memory of a loaded engine holds its FP8 weights once, and neither the file nor freed heap memory."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8serve.model.storage import memory

from .tiny import write_model

MIB = 2**20
SIZES = {"hidden_size": 512, "num_attention_heads": 4, "num_hidden_layers": 6, "intermediate_size": 512}
WIDE: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 12, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 512},
}
LOAD = """
import re, sys
from fp8serve.engine.engine import Engine
from fp8serve.model.storage import memory

def resident():
    return 1024 * int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1])

def load(path):
    return Engine(path, recipe="rowwise", max_model_len=64, max_num_seqs=1)

load(sys.argv[1]).pack_weights()  # what the libraries take on their first use
memory.RETAINED_BYTES = 0
memory.trim()
before = resident()
memory.RETAINED_BYTES = int(sys.argv[3])
engine = load(sys.argv[2])
loaded = resident()
engine.pack_weights()
print(engine.info()["weight_bytes"], loaded - before, resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc, and glibc's heap is trimmed")
@pytest.mark.parametrize("kind", WIDE)
def test_the_weights_of_experts_are_in_memory_once(kind: str, tmp_path: Path) -> None:
    """They are quantized from BF16 as they are loaded, then stacked, and packed if this machine packs weights."""
    models = write_model(tmp_path / "small", kind), write_model(tmp_path / "model", kind, **SIZES, **WIDE[kind])
    process = subprocess.run([sys.executable, "-c", LOAD, *models, "0"], capture_output=True, text=True, check=True)
    weights, *sizes = map(int, process.stdout.split())
    assert weights > 50 * MIB
    assert max(sizes) < 1.6 * weights, [size / weights for size in sizes]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc, and glibc's heap is trimmed")
def test_memory_of_the_unpacked_weights_is_returned(tmp_path: Path) -> None:
    """Casts made while loading are returned to the system, although they are less than `memory.RETAINED_BYTES`."""
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "num_hidden_layers": 30, "intermediate_size": 1024}
    models = write_model(tmp_path / "small"), write_model(tmp_path / "model", **sizes)
    command = [sys.executable, "-c", LOAD, *models, str(memory.RETAINED_BYTES)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    weights, _, packed = map(int, process.stdout.split())
    assert weights > 50 * MIB
    assert packed < 1.4 * weights, packed / weights
