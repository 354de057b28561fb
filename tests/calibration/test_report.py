import dataclasses
import json
from io import StringIO

import pytest
from rich.console import Console

from fp8serve.calibration.reports.tables import eval_table, summary, summary_table
from fp8serve.calibration.result import CalibrationReport, EvalReport, LayerReport
from fp8serve.errors import DataError

from .reports import make_report


def test_json_reads_back_equal() -> None:
    report = make_report()
    assert CalibrationReport.from_json(report.to_json()) == report
    old = {
        k: v
        for k, v in json.loads(report.to_json()).items()
        if k not in ("generated", "origin", "healing", "smoothing")
    }
    old["layers"] = [
        {k: v for k, v in layer.items() if k not in ("input", "weight", "outlier")} for layer in old["layers"]
    ]
    assert (
        CalibrationReport.from_json(json.dumps(old)).layers[0].name == report.layers[0].name
    )  # a report of an earlier version
    assert report.origin is not None
    renamed = report.to_json().replace('"in_bf16":', '"kept":').replace('"origin":', '"made":')
    assert CalibrationReport.from_json(renamed) == report
    with pytest.raises(DataError, match="not a calibration report"):
        CalibrationReport.from_json('{"model": 1}')


def test_json_has_no_nan() -> None:
    broken = dataclasses.replace(make_report(), seconds={"total": float("nan")})
    with pytest.raises(ValueError, match="not JSON compliant"):
        broken.to_json()


def test_layers_without_error_come_last() -> None:
    layers = (LayerReport("a", None, 0), LayerReport("b", 30.0, 0), LayerReport("c", 20.0, 0))
    report = dataclasses.replace(make_report(), layers=layers)
    assert [layer.name for layer in report.worst_layers] == ["c", "b", "a"]
    assert "c: SQNR 20.0 dB" in summary(report)


def printed(table: object) -> str:
    out = StringIO()
    Console(file=out, width=120).print(table)
    return out.getvalue()


def test_tables_name_quality_size_and_worst_layers() -> None:
    report = make_report()
    text = printed(summary_table(report))
    for part in (
        "128 samples from 40 documents",
        "16 samples from 9 documents",
        "12.5 -> 12.6",
        "98 %",
        "1.907 MiB -> 1.049 MiB",
        report.worst_layers[0].name,
    ):
        assert part in text


def test_the_eval_table_shows_reference_figures_only_with_a_reference() -> None:
    quality = make_report().quality
    alone = dataclasses.replace(quality, reference_perplexity=None, kl_divergence=None, top1_agreement=None)
    common = {
        "model": "m",
        "recipe": "stored",
        "source": ("d",),
        "samples": 4,
        "seq_len": 8,
        "seconds": 1.0,
        "documents": 3,
        "tokens": 99,
    }
    with_reference = EvalReport(**common, against="r", quality=quality, layers=make_report().layers)  # type: ignore[arg-type]
    without = EvalReport(**common, against=None, quality=alone, layers=())  # type: ignore[arg-type]
    assert "KL" in printed(eval_table(with_reference))
    assert "KL" not in printed(eval_table(without))
    assert "99 tokens of d (4 samples from 3 documents)" in " ".join(printed(eval_table(without)).split())
    assert json.loads(without.to_json())["quality"]["perplexity"] == 12.6
