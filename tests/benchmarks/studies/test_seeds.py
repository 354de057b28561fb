"""Studies of several seeds combined: means, scatter, the plot, and refusals."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies import seeds
from benchmarks.studies.__main__ import main
from fp8serve.errors import JobError


def study(seed: int, apart: float, **plan: Any) -> dict[str, Any]:
    figures = {f"{kind}_difference_percent": 0.0 for kind in seeds.KINDS}
    curve = {"train": [5.0 - 0.1 * i for i in range(20)], "valid": [], "tokens_per_second": 1.0}
    other = {**curve, "train": [y * (1 + apart / 100) for y in curve["train"]]}
    return {
        "study": "training",
        "made": {"command": "c", "commit": "x"},
        "plan": {"steps": 20, "seed": seed, "recipes": [], **plan},
        "runs": {"bf16": figures, "block": {**figures, "final_difference_percent": apart}},
        "curves": {"bf16": curve, "block": other},
    }


def write_studies(folder: Path, *studies: dict[str, Any]) -> list[Path]:
    paths = [folder / f"{i}.json" for i in range(len(studies))]
    for path, content in zip(paths, studies, strict=True):
        path.write_text(json.dumps(content))
    return paths


def test_mean_scatter_and_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write_studies(tmp_path, study(3, 1.0), study(1, -0.5), study(2, 0.1))
    assert main(["seeds", *map(str, paths), "--out", str(tmp_path / "out")]) == 0
    assert "+1.00 %" in capsys.readouterr().out
    report = json.loads((tmp_path / "out/seeds.json").read_text())
    assert report["seeds"] == [1, 2, 3]
    summary = report["recipes"]["block"]["final"]
    assert summary["apart"] == [-0.5, 0.1, 1.0]
    assert summary["mean"] == pytest.approx(0.2)
    assert summary["deviation"] == pytest.approx(0.754983)
    assert summary["error"] == pytest.approx(summary["deviation"] / math.sqrt(3), rel=1e-5)
    assert summary["largest"] == 1.0
    assert (tmp_path / "out/seeds-curves.svg").read_text().count("<polyline") == 2


@pytest.mark.parametrize(
    ("studies", "sentence"),
    [
        ([study(0, 0.0)], "at least two studies"),
        ([study(0, 0.0), study(1, 0.0, steps=40)], "the same steps"),
        ([study(0, 0.0), study(0, 0.0)], "the same seed"),
        ([study(0, 0.0), {"study": "numerics"}], "is not a result of the training study"),
    ],
)
def test_studies_that_cannot_be_compared_are_refused(
    studies: list[dict[str, Any]], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=sentence):
        seeds.read(write_studies(tmp_path, *studies))
    with pytest.raises(JobError, match="cannot be read"):
        seeds.read([tmp_path / "none.json"])
