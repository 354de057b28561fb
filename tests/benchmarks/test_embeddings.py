"""The benchmark of embeddings: programs take turns on the same texts, and the best round of each counts."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.model.encoders import BERT, make, pooled

PATH = Path(__file__).parents[2] / "benchmarks/embeddings.py"
BENCH: dict[str, Any] = runpy.run_path(str(PATH))


def test_texts_have_the_requested_lengths() -> None:
    texts_of_kind = BENCH["make_texts"](
        lambda text: [0, *map(len, text.split()), 0], [f"w{i}" for i in range(900)], 200
    )
    assert list(texts_of_kind) == ["short", "128 tokens", "256 tokens", "mixed"]
    lengths = {kind: [len(text.split()) + 2 for text in texts.texts] for kind, texts in texts_of_kind.items()}
    assert min(lengths["short"]) >= 8
    assert max(lengths["short"]) <= 24
    assert set(lengths["128 tokens"]) == {128}
    assert set(lengths["256 tokens"]) == {200}  # no longer than the model reads
    assert texts_of_kind["mixed"].tokens == sum(lengths["mixed"])
    assert len(set(texts_of_kind["128 tokens"].texts)) == 64


def test_the_best_round_counts() -> None:
    times = {"ours": iter([2.0, 1.0]), BENCH["BF16"]: iter([3.0, 4.0]), BENCH["FP32"]: iter([8.0, 6.0])}
    programs = [
        BENCH["Program"](name, lambda texts, t=t: next(t), lambda texts: [[1.0, 1.0]]) for name, t in times.items()
    ]
    work, lines = {"short": BENCH["Texts"](["a", "b"], 10)}, list[str]()
    measured = BENCH["measure"](programs, work, 2, lines.append)
    ours = BENCH["rows_of"](measured, work)[0]
    assert (ours["texts_per_second"], ours["worst"], ours["tokens_per_second"]) == (2.0, 1.0, 10.0)
    assert ours["times"] == {BENCH["BF16"]: 3.0, BENCH["FP32"]: 6.0}
    assert measured.cosine["ours"] == pytest.approx(1.0)
    assert [line.split(", ")[2].split(":")[0] for line in lines] == [*times, *times]
    assert "| short | ours | 2.0 (1.0) | 10 | 3.00 | 6.00 |" in BENCH["table"](BENCH["rows_of"](measured, work))


@pytest.mark.slow
def test_fp8serve_is_measured_end_to_end(tmp_path: Path) -> None:
    make(tmp_path / "tiny", BERT)
    pooled(tmp_path / "tiny", "mean_tokens", normalize=True, max_length=24)
    command = [sys.executable, str(PATH), "tiny", "--rounds", "1", "--threads", "1", "--out", "out"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (file,) = (tmp_path / "out").iterdir()
    report = json.loads(file.read_text())
    assert {row["program"] for row in report["rows"]} == {BENCH["ENGINE"], BENCH["SERVER"], BENCH["CLIENT"]}
    assert all(row["texts_per_second"] > 0 for row in report["rows"])
