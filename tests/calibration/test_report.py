import dataclasses
import json
import re
from html.parser import HTMLParser
from io import StringIO

import pytest
from rich.console import Console

from fp8serve.calibration.report import eval_table, html_report, summary_table, verdict
from fp8serve.calibration.result import CalibrationReport, EvalReport, LayerReport
from fp8serve.errors import DataError

from .reports import make_report


class Balance(HTMLParser):
    """Fails on a tag that is closed but not open."""

    VOID = frozenset({"meta", "line", "circle", "polyline", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_is_whole_small_and_needs_no_network() -> None:
    page = html_report(make_report(layers=32))
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert not {"script", "link", "img", "iframe"} & set(parser.seen)
    assert not re.search(r"https?://|url\(", page)
    assert len(page) < 1_000_000


def test_the_page_shows_a_dot_for_every_layer_and_the_worst_first() -> None:
    report = make_report()
    page = html_report(report)
    for layer in report.layers:
        assert f"{layer.name}: {layer.sqnr_db:.1f} dB</title>" in page
    table = page[page.index("Worst layers first") :]
    rows = re.findall(r"<tr><td>(model[^<]*)</td>", table)[:12]
    assert rows == [layer.name for layer in report.worst_layers[:12]]


def test_names_from_outside_are_escaped() -> None:
    page = html_report(make_report(model="<script>alert(1)</script>"))
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_a_report_without_layers_is_still_a_page() -> None:
    bare = dataclasses.replace(make_report(), layers=(), tensors=())
    parser = Balance()
    parser.feed(html_report(bare))
    assert parser.open == []


def test_json_reads_back_equal() -> None:
    report = make_report()
    assert CalibrationReport.from_json(report.to_json()) == report
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
    assert "c at 20.0 dB" in verdict(report)


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
