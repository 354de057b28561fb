"""The GPU measurements, run on a CPU: every group runs to its end, and every promise of the documentation has a row."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_measure, gpu_tiles
from benchmarks.gpu_measure import Bench


def rows_of(group: str, folder: Path) -> list[dict[str, Any]]:
    gpu_measure.main([group, "--out", str(folder / "out.json"), "--dry-run"])
    rows: list[dict[str, Any]] = json.loads((folder / "out.json").read_text())["rows"]
    return rows


GOALS = {
    "casts": ["quantize with amax 8192x8192, of copy bandwidth"],
    "skinny": [f"gemm 16x{n}x{k} tensor, weight bytes over copy bandwidth" for n, k in ((28672, 8192), (8192, 28672))],
    "attention": [
        f"paged prefill 8192 {cache}, {what}"
        for cache in (torch.bfloat16, torch.float8_e4m3fn)
        for what in ("TFLOP/s", "warpgroups over warps")
    ],
    "gemm": [
        "gemm 4096x4096x4096 tensor, over cuBLASLt",
        "gemm 8192x8192x8192 tensor, over cuBLASLt",
        "gemm 8192x8192x8192 tensor, TFLOP/s",
        "gemm 8192x8192x28672 tensor, over cuBLASLt",
    ],
    "experts": [],
    "linear": ["linears of Llama 8B, delayed over BF16", "linears of Llama 8B, delayed over current"],
    "decode": ["decode 1.1B batch 1"],
    "invariant": [],
}


@pytest.mark.parametrize("group", gpu.KERNELS)
def test_a_group_runs_and_has_its_promises(group: str, tmp_path: Path) -> None:
    rows = rows_of(group, tmp_path)
    assert [row for row in rows if row["what"] == "failed"] == []
    names = [row["what"] for row in rows if "goal" in row]
    assert len(names) == len(GOALS[group])
    assert all(name.startswith(prefix) for name, prefix in zip(names, GOALS[group], strict=True))
    for row in rows:
        values = [value for value in row.values() if isinstance(value, float)]
        assert "refused" in row or (values and all(value > 0 for value in values)), row
    if group == "gemm":  # torch has FP8 products on the CPU; fp8serve's tiles exist on GPUs only
        assert not any("refused" in row for row in rows if row.get("by") in ("fp8serve", "cuBLASLt"))
        assert any("refused" in row for row in rows if row.get("by") == "fp8serve medium/4")


def test_every_promise_is_in_the_table_of_the_documentation(tmp_path: Path) -> None:
    rows = rows_of("linear", tmp_path)
    table = gpu.goals_table(rows).splitlines()
    assert table[0] == "| work | goal | predicted | measured | |"
    assert [line.split(" | ")[0] for line in table[2:]] == [f"| {goal}" for goal in GOALS["linear"]]
    assert gpu.goals_table([gpu_measure.goal("x", 1.0, 0.5, 1.2)]).endswith("| x | 1 | 0.5 | 1.2 | reached |")
    assert gpu.goals_table([gpu_measure.goal("x", 1.0, 0.5, 0.9)]).endswith("| short |")


def test_a_failure_does_not_lose_rows_that_were_measured_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def updating(bench: Bench) -> Iterator[dict[str, Any]]:
        yield {"what": "one", "us": 1.0}
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(gpu_measure, "updating", updating)
    rows = rows_of("casts", tmp_path)
    assert rows[-2:] == [{"what": "one", "us": 1.0}, {"what": "failed", "error": "ZeroDivisionError: division by zero"}]
    assert rows[0]["what"] == "quantize given scale 8192x8192"


def test_tiles_are_measured_into_a_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tile(choice: gpu_tiles.TileChoice, a: torch.Tensor, *rest: Any) -> torch.Tensor:
        if choice != gpu_tiles.TileChoice("small", 2):
            raise RuntimeError("not here")
        return a

    monkeypatch.setattr(gpu_measure, "rehearsed_tile", tile)
    monkeypatch.setattr(gpu_tiles, "SHAPES", [(64, 4096, 4096)])
    monkeypatch.setattr(gpu_tiles, "JOINED_SHAPES", [(32, 4096, 4096), (64, 4096, 4096)])
    header = tmp_path / "tiles.h"
    header.write_text(gpu_tiles.HEADER.read_text())
    before = gpu_tiles.parsed(header.read_text())
    out = tmp_path / "out.json"
    words = ["tiles", "--tune", "--kinds", "mixed,tensor", "--out", str(out), "--dry-run", "--header", str(header)]
    gpu_measure.main(words)
    tables = gpu_tiles.parsed(header.read_text())
    assert {key for key in tables if tables[key] != before.get(key)} == {(90, "mixed"), (90, "tensor")}
    for scales in ("mixed", "tensor"):
        assert tables[90, scales].origin.startswith("measured on a dry run, 20")
        assert [entry.choice for entry in tables[90, scales].entries] == [gpu_tiles.TileChoice("small", 2)]
    result = json.loads(out.read_text())
    assert result["table"] == [line for s in ("mixed", "tensor") for line in gpu_tiles.lines(90, s, tables[90, s])]
    assert [row["what"] for row in result["rows"]] == [
        "gemm 32x4096x4096 mixed",
        "gemm 64x4096x4096 mixed",
        "gemm 64x4096x4096 tensor",
    ]
    assert all(set(row["us"]) == {"fp8serve", "small/2"} for row in result["rows"])
    with pytest.raises(SystemExit):
        gpu_measure.main([*words[:3], "mixed,columns", *words[4:]])


def test_tune_and_tiles_belong_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["casts", "--tune"], ["tiles"]):
        with pytest.raises(SystemExit):
            gpu_measure.main([*words, "--out", str(tmp_path / "x")])
        assert "--tune and the group tiles belong together" in capsys.readouterr().err


def test_events_give_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a GPU that reports 2 ms every time."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None: ...

        def elapsed_time(self, end: "Event") -> float:
            return 2.0

    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert Bench(dry=False).seconds(calls.append, sets=3, repeats=5, replayed=False) == pytest.approx(2e-3)
    assert calls == [0, 1, 2, 0, 1, 2, 0, 1]
    replays: list[str] = []

    class Graph:
        def replay(self) -> None:
            replays.append("replay")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    calls.clear()
    assert Bench(dry=False).seconds(calls.append, sets=4, repeats=20) == pytest.approx(0.5e-3)
    assert calls == [0, 1, 2, 0, 1, 2, 3], "three to warm up, then one for each input, captured"
    assert len(replays) == 6

    def refuses(graph: Graph) -> nullcontext[None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", refuses)
    assert Bench(dry=False).seconds(calls.append, sets=4, repeats=20) == pytest.approx(2e-3)
