"""The resident memory of a calibration contains neither freed heap blocks nor the weights of finished layers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fp8serve.calibration.pipeline import calibrate
from fp8serve.train.scratch import write_random_model

MIB = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc, and glibc's heap is trimmed")

FREED = """
import re
import torch
from fp8serve.model.storage.memory import trim

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

retained, freed = [], []
for _ in range(6000):
    freed.append(torch.ones(16 * 1024))  # 64 KiB, which come from the heap
    retained.append(torch.ones(64))
before = anonymous()
del freed
trim()
print(before - anonymous())
"""


@linux
def test_freed_memory_is_returned_to_the_system() -> None:
    process = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert int(process.stdout) > 350 * MIB  # of 375


def resident(folder: Path) -> dict[str, int]:
    """Returns the resident bytes of each memory-mapped file below `folder`, by name."""
    sizes: dict[str, int] = {}
    name = None
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if header := re.match(r"[0-9a-f]+-[0-9a-f]+ .*?(/.*)?$", line):
            path = Path(header[1]) if header[1] else None
            name = path.name if path and folder in path.parents else None
        elif name and line.startswith("Rss:"):
            sizes[name] = sizes.get(name, 0) + 1024 * int(line.split()[1])
    return sizes


@linux
def test_rounded_weights_of_a_finished_layer_are_not_in_memory(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_random_model(
        model, ["A layer is read once."], hidden_size=256, layers=4, heads=4, kv_heads=4, intermediate_size=1024,
        context=64,
    )  # fmt: skip
    mapped_by_stage: dict[str, dict[str, int]] = {}

    def progress(stage: str, completed: int, total: int) -> None:
        mapped_by_stage.setdefault(stage, {}).update(resident(tmp_path / ".out.calibrating"))

    calibrate(model, out=tmp_path / "out", samples=8, seq_len=32, rounding="gptq", progress=progress)
    for stage in ("round", "compare", "rank"):
        rounded = {name: size for name, size in mapped_by_stage[stage].items() if name.startswith("round-")}
        assert len(rounded) == 4
        assert max(rounded.values()) < MIB / 2, stage  # of 1 MiB: reading a page maps its neighbours, too
