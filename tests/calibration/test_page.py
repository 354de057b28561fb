import dataclasses
import re
from html.parser import HTMLParser

import pytest

from fp8serve.calibration.reports.findings import Finding, evaluation_findings, findings, input_kind
from fp8serve.calibration.reports.page import html_evaluation, html_report
from fp8serve.calibration.reports.sections import by_layer, finding_list, generated_text
from fp8serve.calibration.result import (
    CalibrationReport,
    CastReport,
    ChannelReport,
    EvalReport,
    GeneratedReport,
    HealingReport,
    Quality,
    SmoothingReport,
)

from .reports import cast, make_report


class Balance(HTMLParser):
    """An HTML parser that fails on a closing tag without an opening one."""

    VOID = frozenset({"meta", "line", "circle", "polyline", "path", "rect", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_is_valid_small_and_loads_nothing() -> None:
    page = html_report(make_report(layers=32))
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert not {"script", "link", "img", "iframe"} & set(parser.tags)
    assert not re.search(r"https?://|url\(", page)
    assert len(page) < 1_000_000


def test_inputs_of_all_experts_are_included() -> None:
    report = make_report(layers=1)
    up = next(layer for layer in report.layers if layer.name.endswith("up_proj"))
    experts = [
        dataclasses.replace(up, name=f"model.layers.0.mlp.experts.{i}.{leaf}", saturated=0.01 * (i == 2), input=cast())
        for i in range(4)
        for leaf in ("gate_proj", "up_proj")
    ]
    finding = next(f for f in findings(dataclasses.replace(report, layers=tuple(experts))) if "saturated" in f.text)
    assert finding.is_problem
    assert "1 of 4 inputs" in finding.text
    assert "the largest share is 1 %, of the layer 0 expert 2 gate/up input" in finding.text


def test_the_page_shows_a_dot_for_every_layer_and_the_worst_first() -> None:
    report = make_report()
    page = html_report(report)
    for layer in report.layers:
        assert f"{layer.name}: {layer.sqnr_db:.1f} dB</title>" in page
    table = page[page.index("KL divergence of each layer") :]
    rows = re.findall(r'<tr><td><span title="(model[^"]*)">', table)[:12]
    assert rows == [layer.name for layer in report.worst_layers[:12]]


def whole(page: str) -> str:
    """Asserts that all tags are closed. Returns the page."""
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    return page


def evaluation(report: CalibrationReport, **changes: object) -> EvalReport:
    fields: dict[str, object] = {"quality": report.quality, "layers": report.layers, "against": "models/tiny"} | changes
    fields = {"model": "models/tiny-fp8", "recipe": "stored", "source": ("d",), "samples": 4, "seq_len": 8} | fields
    return EvalReport(**fields, seconds=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "draw", [html_report, lambda report: html_evaluation(evaluation(report, source=(report.model,)))]
)
def test_untrusted_text_is_escaped(draw: object) -> None:
    bad = "<script>alert(1)</script>"
    report = make_report(model=bad)
    generated = tuple(dataclasses.replace(g, prompt=bad, before=bad, after=bad + "x") for g in report.generated)
    report = dataclasses.replace(
        report, notes=(bad,), generated=generated, origin=dataclasses.replace(report.origin, command=bad)
    )  # type: ignore[type-var]
    report = dataclasses.replace(
        report,
        layers=tuple(dataclasses.replace(x, name=f"{bad}.layers.0.{bad}.q_proj") for x in report.layers),
        tensors=tuple(dataclasses.replace(t, name=f"{bad}.layers.0.{bad}.q_proj.input") for t in report.tensors),
    )
    page = whole(draw(report))  # type: ignore[operator]
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_a_report_without_layers_is_still_a_page() -> None:
    without: dict[str, None] = dict.fromkeys(("smoothing", "healing", "origin"))
    bare = dataclasses.replace(make_report(), layers=(), tensors=(), generated=(), **without)
    page = whole(html_report(bare))
    assert re.findall("<h2>(.*?)</h2>", page) == ["How to reproduce this report"]


def test_every_section_has_a_line_that_explains_it() -> None:
    page = whole(html_report(make_report()))
    titles = re.findall("<h2>(.*?)</h2>", page)
    assert titles == ["Text generated before and after calibration", "KL divergence of each layer", "SQNR by layer",
                      "Headroom, saturation and underflow of inputs", "Amax per batch",
                      "Distribution of values over the exponents of E4M3", "Amax by layer", "Smoothing", "Healing",
                      "How to reproduce this report"]  # fmt: skip
    assert len(re.findall('</h2><p class="why">[^<]{20,}</p>', page)) == len(titles)


def test_weights_of_4_bits_are_charted_over_the_exponents_of_e2m1() -> None:
    weight = CastReport(19.0, 0.0, 0.1, (0.2, 0.3, 0.25, 0.15), 0.05)
    report = make_report()
    layers = tuple(dataclasses.replace(x, input=None, weight=weight) for x in report.layers)
    page = whole(html_report(dataclasses.replace(report, layers=layers)))
    assert "Distribution of weights over the exponents of E2M1" in page
    assert "exponents of E4M3" not in page


def test_the_page_contains_the_command() -> None:
    page = html_report(make_report())
    assert "<pre>fp8serve calibrate models/tiny --out out</pre>" in page
    assert "2026-01-02T03:04:05" in page


def test_an_evaluation_is_a_page_with_and_without_a_reference() -> None:
    report = make_report()
    with_reference = whole(html_evaluation(evaluation(report)))
    assert "KL divergence of each layer" in with_reference
    assert "against models/tiny in high precision" in with_reference
    alone = whole(html_evaluation(evaluation(report, against=None, layers=(), quality=Quality(9, 12.5))))
    assert "12.5" in alone
    assert "KL" not in alone


# -- findings ---------------------------------------------------------------------------------------------------------


def inconspicuous_report() -> CalibrationReport:
    """Returns a report without saturation, without loss, without a conspicuous layer and with constant histories."""
    report = make_report()
    layers = (dataclasses.replace(x, sqnr_db=31.0, saturated=0.0, kl=1e-4, input=cast(0.5)) for x in report.layers)
    tensors = (dataclasses.replace(t, amax=1.0, history=(1.0,) * 20) for t in report.tensors)
    return dataclasses.replace(report, layers=tuple(layers), tensors=tuple(tensors))


def changed(report: CalibrationReport, name: str, **changes: object) -> CalibrationReport:
    layers = (dataclasses.replace(x, **changes) if x.name == name else x for x in report.layers)  # type: ignore[arg-type]
    return dataclasses.replace(report, layers=tuple(layers))


DOWN = "model.layers.2.mlp.down_proj"


def test_an_inconspicuous_report_says_so() -> None:
    (finding,) = findings(inconspicuous_report())
    assert finding == Finding(
        "No input value saturated. The largest value relative to its range is in the layer 0 q/k/v input: 71% of the "
        "range."
    )
    assert "No problems were found." in finding_list([finding])
    assert "No problems" not in finding_list([finding, Finding("Much.", is_problem=True)])


@pytest.mark.parametrize(
    ("changes", "words", "trouble"),
    [
        (
            {"saturated": 1e-5, "input": cast(-1.2)},
            "1 of 16 inputs have values that saturated.* or a margin larger by 2,",
            False,
        ),
        ({"saturated": 0.01, "input": cast(-0.2)}, "is 1 %, of the layer 2 down input. .* margin larger by 1,", True),
        ({"sqnr_db": 9.0}, r"SQNR is below 15 dB in the output of 1 layer: layer 2 down_proj \(9.0 dB\)", True),
        ({"underflowed": 0.2}, r"In 1 input more than 5% .*: layer 2 down input \(20 %\)", False),
        (
            {"outlier": ChannelReport(7, 60.0, 2.0)},
            r"In 1 input one channel .*: layer 2 down input \(channel 7: 60",
            False,
        ),
        ({"outlier": ChannelReport(7, 60.0, 0.01)}, "its weights 0.01 times.*--smoothing 0.5", True),
        ({"kl": 1.0}, "100% of the KL divergence comes from 1 of 28 layers: layer 2 down_proj", False),
    ],
)
def test_findings_name_a_layer_that_stands_out(changes: dict[str, object], words: str, trouble: bool) -> None:
    matches = [f for f in findings(changed(inconspicuous_report(), DOWN, **changes)) if re.search(words, f.text)]
    assert [f.is_problem for f in matches] == [trouble]


def test_a_high_cost_comes_first_and_names_untried_options() -> None:
    quality = dataclasses.replace(inconspicuous_report().quality, kl_divergence=0.05)
    healed = HealingReport(10, 1e-5, (0.1,), 0.06, 0.05)
    report = dataclasses.replace(inconspicuous_report(), quality=quality, healing=healed)
    first = findings(report)[0]
    assert first.is_problem
    assert "--rounding gptq`, `--recipe rowwise`." in first.text
    assert "--heal" not in first.text


def test_findings_name_a_weight_with_a_large_rounding_error() -> None:
    report = dataclasses.replace(
        changed(inconspicuous_report(), DOWN, weight=cast(0.0, sqnr_db=6.5)), healing=None, rounding="gptq"
    )
    assert findings(report)[0].text.startswith(
        "Rounding left an SQNR below 15 dB in 1 weight: layer 2 down_proj (6.5 dB). More"
    )
    healed = dataclasses.replace(report, healing=make_report().healing)
    assert not any("Rounding" in f.text for f in findings(healed))


def test_an_evaluation_says_that_the_cost_is_high() -> None:
    dear = dataclasses.replace(inconspicuous_report().quality, kl_divergence=0.05)
    first = evaluation_findings(evaluation(inconspicuous_report(), quality=dear))[0]
    assert first == Finding(
        "The KL divergence of the quantized model is 0.05 nats per token, which is high.", is_problem=True
    )


def test_findings_name_an_input_whose_range_one_batch_decides() -> None:
    report = inconspicuous_report()
    name = f"{DOWN}.input"
    wild = (dataclasses.replace(t, amax=9.0, history=(1.0, 9.0, 1.0)) if t.name == name else t for t in report.tensors)
    texts = [f.text for f in findings(dataclasses.replace(report, tensors=tuple(wild)))]
    assert any("In 1 of 16 inputs the amax" in t and "is 9, of the layer 2 down input" in t for t in texts)


# -- before and after -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "same", "marked"),
    [
        (" a time there was", " a time there were", 4, ["was", "were"]),
        (" it is", " it was good", 1, ["is", "was"]),
        (" it", " it is", 1, [" is"]),
        (" it", " its", 1, ["it", "its"]),
        ("same", "same", 2, []),
    ],
)
def test_the_first_difference_is_marked(before: str, after: str, same: int, marked: list[str]) -> None:
    text = generated_text([GeneratedReport("Once", before, after, 48, same)])
    assert re.findall("<mark>(.*?)</mark>", text) == marked
    assert ("Quantized: the same text<" in text) is (before == after)


def test_the_page_names_the_pairs_that_smoothing_changed() -> None:
    page = html_report(make_report(layers=30))
    assert "in 1 of 120 pairs of a norm" in page
    assert "<td>model.layers.0.input_layernorm</td>" in page
    for none in (SmoothingReport(0.5, (), 120), None):
        assert "<h2>Smoothing" not in html_report(dataclasses.replace(make_report(), smoothing=none))


def test_fused_projections_are_drawn() -> None:
    values = [(f"model.layers.0.{name}", 1.0, "1") for name in ("self_attn.qkv_proj", "mlp.gate_up_proj")]
    assert [by_layer([value]).count("<circle") for value in values] == [1, 1]
    assert [input_kind(name) for name, _, _ in values] == ["q/k/v", "gate/up"]
