"""The demonstration on the real weights of SmolLM2, with half of its facts and an eighth of its epochs: it reads well
in FP8, learns, and answers the same after a restart."""

import shutil
from pathlib import Path

import pytest

from fp8serve.demos import runs
from fp8serve.demos.runs import OnSmolLM2

STAGES = ["model", "calibrate", "serve", "ask", "finetune", "activate", "ask again", "restart", "same", "done"]


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_cache")
def test_the_main_job_on_real_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.disk_usage(tmp_path).free < OnSmolLM2.disk_bytes:
        pytest.skip(f"needs {OnSmolLM2.disk_bytes >> 30} GiB of free disk")
    monkeypatch.setattr(runs, "GENERAL_QUESTIONS", runs.GENERAL_QUESTIONS[:1])
    monkeypatch.setattr(runs, "FACTS", dict([*runs.FACTS.items()][:4]))  # one batch
    printed = list[str]()
    results = OnSmolLM2("a test", tmp_path, printed.append, effort=0.125).run()
    assert [line[:10].strip() for line in printed if line[0] != " "] == STAGES
    calibrated = results["calibrate"]
    assert calibrated["perplexity_fp8"] == pytest.approx(calibrated["perplexity_bf16"], rel=0.2)  # of 8 samples
    assert 0 < calibrated["kl_divergence"] < 0.1
    assert results["finetune"]["last_loss"] < results["finetune"]["first_loss"]
    assert results["ask again"]["answers"] != results["ask"]["answers"]
    assert results["same"]["same"] == 1 + 4
