"""Calibration of SmolLM2-135M, whose weights are real: smoothing removes the loss by a planted outlier."""

from pathlib import Path

import pytest

from fp8serve.calibration.reports.findings import findings
from fp8serve.hub import find_model

from .planted import plant
from .test_smoothing import LARGE, kl, run

SIZES = {"samples": 4, "seq_len": 128}
NORM, CHANNEL = "model.layers.15.post_attention_layernorm", 100


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_cache")
def test_smollm2_survives_a_planted_outlier(tmp_path: Path) -> None:
    planted = plant(Path(find_model("smollm2")), tmp_path / "planted", LARGE, NORM, CHANNEL)
    harmed = run(planted, tmp_path / "harmed", **SIZES)
    smooth = run(planted, tmp_path / "smooth", smoothing=0.5, **SIZES)
    assert kl(smooth) < 0.7 * kl(harmed)
    (finding,) = [f for f in findings(harmed) if "--smoothing" in f.text]
    assert f"layer 15 gate/up input (channel {CHANNEL}: " in finding.text
    assert smooth.smoothing is not None
    assert NORM in smooth.smoothing.pairs
