"""A calibration shown to people: one HTML page that stands alone, and a table for the terminal.

The page has no script, font or address in it: it can be mailed, archived and opened on a phone or without a network. It
leads with what FP8 cost (perplexity, agreement), then where (SQNR per layer, worst first), then why (amax per layer and
batch). Everything that came from outside (names, paths) is escaped.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from html import escape

from rich.table import Table

from .charts import Dot, dots, sparkline
from .result import (
    CalibrationReport,
    DataReport,
    EvalReport,
    KeptReport,
    LayerReport,
    Quality,
    TensorReport,
    worst_first,
)

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WORST = 12  # rows of the table of worst layers


def html_report(report: CalibrationReport) -> str:
    """The whole page as text, some tens of kilobytes."""
    title = f"Calibration of {report.model.rstrip('/').rpartition('/')[2] or report.model}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(verdict(report))}</p>",
        *(f"<p>{escape(note)}</p>" for note in report.notes),
        _cards(report),
        _charts(report),
        "<h2>Worst layers first</h2>",
        _layer_table(report, report.worst_layers[:WORST]),
        _details(f"All {len(report.layers)} layers", _layer_table(report, report.worst_layers)),
        _details(f"All {len(report.tensors)} scales", _tensor_table(report.tensors)),
        *([_details(f"Stays in BF16: {_kept_bytes(report)}", _kept_table(report))] if report.kept else []),
        _details("Recipe, data, versions", _facts(report)),
    ]
    head = f"{_META}<title>{escape(title)}</title><style>{_STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def verdict(report: CalibrationReport) -> str:
    """One sentence: what changed on the held-out samples, and the weakest layer."""
    quality = report.quality
    where = f"{report.data.held_out_tokens:,} tokens that no scale has seen ({', '.join(report.data.held_out_source)})"
    before, after = _num(quality.reference_perplexity), _num(quality.perplexity)
    weakest = "".join(
        f" What costs most is {w.name} at {_db(w.sqnr_db)}{_cost(w, quality)}." for w in report.worst_layers[:1]
    )
    return f"Perplexity on {where} went from {before} to {after}{_change(quality)}.{weakest}"


def _cost(layer: LayerReport, quality: Quality) -> str:
    """What the layer's FP8 adds to the KL divergence, and which part of the whole that is."""
    if layer.kl is None:
        return ""
    part = f", {_percent(layer.kl / quality.kl_divergence)} of the model's" if quality.kl_divergence else ""
    return f" (KL {layer.kl:.2g} nats{part})"


def _counts(samples: int, documents: int) -> str:
    return " from ".join(f"{n:,} {what}{'s' * (n != 1)}" for n, what in ((samples, "sample"), (documents, "document")))


def _excluded(data: DataReport) -> str:
    return f", without {data.excluded} examples that are held out" if data.excluded else ""


def _change(quality: Quality) -> str:
    if not quality.reference_perplexity:
        return ""
    return f" ({100 * (quality.perplexity / quality.reference_perplexity - 1):+.2f} %)"


def _cards(report: CalibrationReport) -> str:
    quality, ratio = report.quality, report.bytes_after / max(1, report.bytes_before)
    worst = min((layer.sqnr_db for layer in report.layers if layer.sqnr_db is not None), default=None)
    cards = {
        "Perplexity": (f"{_num(quality.reference_perplexity)} → {_num(quality.perplexity)}", _change(quality)),
        "Same top token": (_percent(quality.top1_agreement), f"KL {_num(quality.kl_divergence)} nats"),
        "Lowest SQNR": (_db(worst), f"{len(report.layers)} FP8 layers"),
        "Weights": (_bytes(report.bytes_after), f"{_percent(ratio)} of {_bytes(report.bytes_before)}"),
        "Calibrated on": (f"{report.data.tokens:,} tokens", _counts(report.data.samples, report.data.documents)),
        "Time": (f"{report.seconds.get('total', 0):.1f} s", report.device),
    }
    return f'<section class="cards">{"".join(_card(name, *texts) for name, texts in cards.items())}</section>'


def _card(name: str, value: str, note: str) -> str:
    return f"<div><b>{escape(name)}</b><strong>{escape(value)}</strong><small>{escape(note)}</small></div>"


def _charts(report: CalibrationReport) -> str:
    sqnr = [(layer.name, layer.sqnr_db, _db(layer.sqnr_db)) for layer in report.layers if layer.sqnr_db is not None]
    charts = {"Signal to quantization noise of each layer's output (dB)": dots(_series(sqnr), "decoder layer")}
    titles = {"input": "Largest absolute input of each layer", "weight": "Largest absolute weight of each layer",
              "grad_output": "Largest absolute output gradient of each layer"}  # fmt: skip
    for role, title in titles.items():
        charts[title] = dots(_series(_amaxes(report.tensors, role)), "decoder layer", log=True)
    cached = [(t.name, t.amax, f"amax {t.amax:.4g}") for t in report.tensors if t.name.endswith((".k", ".v"))]
    charts["Largest absolute key and value of each layer"] = dots(
        _series(cached, ("k", "v")), "decoder layer", log=True
    )
    for field, title in (("saturated", "cut off"), ("underflowed", "lost to zero")):
        lost = [(layer.name, 100 * getattr(layer, field), _percent(getattr(layer, field))) for layer in report.layers]
        if any(y > 0 for _, y, _ in lost):
            charts[f"Input elements {title} (%)"] = dots(_series(lost), "decoder layer")
    shown = (f"<figure><figcaption>{escape(t)}</figcaption>{svg}</figure>" for t, svg in charts.items() if svg)
    return f'<section class="charts">{"".join(shown)}</section>'


def _amaxes(tensors: Iterable[TensorReport], role: str) -> list[tuple[str, float, str]]:
    chosen = (t for t in tensors if t.name.endswith(f".{role}") and t.amax > 0)
    return [(t.name.removesuffix(f".{role}"), t.amax, f"amax {t.amax:.4g}") for t in chosen]


def _series(values: Iterable[tuple[str, float, str]], names: Sequence[str] = PROJECTIONS) -> dict[str, list[Dot]]:
    """(tensor name, y, shown as) grouped by the last part of the name; others are left to the tables."""
    series: dict[str, list[Dot]] = {name: [] for name in names}
    for name, y, shown in values:
        layer, last = re.search(r"layers\.(\d+)\.", name), name.rpartition(".")[2]
        if layer and last in series:
            series[last].append(Dot(int(layer[1]), y, f"{name}: {shown}"))
    return {name.removesuffix("_proj"): row for name, row in series.items() if row}


def _layer_table(report: CalibrationReport, layers: Sequence[LayerReport]) -> str:
    rows = []
    tensors = {t.name: t for t in report.tensors}
    for layer in layers:
        seen = tensors.get(f"{layer.name}.input")
        amax, scale, spark = (_num(seen.amax), _num(seen.scale), sparkline(seen.history)) if seen else ("–", "–", "")
        lost = (_percent(f) for f in (layer.saturated, layer.rounded_to_top, layer.underflowed))
        rows.append([escape(layer.name), _num(layer.kl), _db(layer.sqnr_db), *lost, amax, scale, spark])
    head = ("layer", "KL, nats", "SQNR", "cut off", "at the top", "underflowed", "input amax", "input scale")
    return _table((*head, "amax per batch"), rows)


def _tensor_table(tensors: Sequence[TensorReport]) -> str:
    rows = [[escape(t.name), _num(t.amax), _num(t.scale), str(t.observations), sparkline(t.history)] for t in tensors]
    return _table(("tensor", "amax", "scale", "batches seen", "amax per batch"), rows)


def _kept_table(report: CalibrationReport) -> str:
    rows = [[escape(", ".join(k.names)), _bytes(k.bytes), _num(k.kl)] for k in report.kept]
    return _table(("linear layers", "more than in FP8", "KL that their FP8 would add (nats)"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells of `rows` are HTML already."""
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _facts(report: CalibrationReport) -> str:
    shown = ("model", "out", "format", "recipe", "rounding", "device", "data", "seconds", "versions")
    facts = {key: value for key, value in asdict(report).items() if key in shown}
    return f"<pre>{escape(json.dumps(facts, indent=2, ensure_ascii=False))}</pre>"


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def summary_table(report: CalibrationReport, worst: int = 5) -> Table:
    """What the terminal shows after `fp8serve calibrate`: quality and size, then the `worst` layers."""
    quality, data = report.quality, report.data
    table = Table(title=f"Calibrated {report.model}", title_justify="left", show_header=False)
    table.add_row("perplexity", f"{_num(quality.reference_perplexity)} -> {_num(quality.perplexity)}{_change(quality)}")
    table.add_row("same top token", f"{_percent(quality.top1_agreement)} (KL {_num(quality.kl_divergence)} nats)")
    table.add_row("weights", f"{_bytes(report.bytes_before)} -> {_bytes(report.bytes_after)}")
    table.add_row("calibrated on", f"{data.tokens:,} tokens of {', '.join(data.source)}{_excluded(data)}")
    table.add_row("", _counts(data.samples, data.documents))
    table.add_row("measured on", f"{data.held_out_tokens:,} other tokens, of {', '.join(data.held_out_source)}")
    table.add_row("", _counts(data.held_out_samples, data.held_out_documents))
    saturated = max((layer.saturated for layer in report.layers), default=0.0)
    underflowed = max((layer.underflowed for layer in report.layers), default=0.0)
    table.add_row("inputs cut off, lost to zero", f"{_percent(saturated)}, {_percent(underflowed)} at most")
    if report.kept:
        table.add_row("stays in BF16", f"{sum(len(k.names) for k in report.kept)} linear layers, {_kept_bytes(report)}")
    table.add_row("time", f"{report.seconds.get('total', 0):.1f} s on {report.device}", end_section=True)
    for layer in report.worst_layers[:worst]:
        table.add_row(layer.name, f"SQNR {_db(layer.sqnr_db)}{_cost(layer, quality)}")
    for kept in report.kept:
        table.add_row(" ".join(kept.names), f"stays in BF16{_kept_cost(kept)}")
    table.add_row("written to", report.out)
    return table


def _kept_bytes(report: CalibrationReport) -> str:
    return f"{_bytes(sum(k.bytes for k in report.kept))} more than in FP8"


def _kept_cost(kept: KeptReport) -> str:
    return f", {_bytes(kept.bytes)}" + ("" if kept.kl is None else f" (FP8: KL {kept.kl:.2g} nats)")


def eval_table(report: EvalReport, worst: int = 5) -> Table:
    """What the terminal shows after `fp8serve eval`."""
    quality = report.quality
    table = Table(title=f"{report.model} ({report.recipe})", title_justify="left", show_header=False)
    table.add_row("perplexity", _num(quality.perplexity) + f" over {quality.tokens:,} tokens")
    read = f"{report.tokens:,} tokens of {', '.join(report.source)}"
    table.add_row("read", f"{read} ({_counts(report.samples, report.documents)})")
    if report.against is not None:
        table.add_row("reference", report.against)
        table.add_row("reference perplexity", _num(quality.reference_perplexity) + _change(quality))
        table.add_row("KL to the reference", f"{_num(quality.kl_divergence)} nats per token")
        table.add_row("same top token", _percent(quality.top1_agreement), end_section=True)
    for layer in worst_first(report.layers)[:worst]:
        table.add_row(layer.name, f"SQNR {_db(layer.sqnr_db)}{_cost(layer, quality)}")
    return table


def _num(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _db(value: float | None) -> str:
    return "exact" if value is None else f"{value:.1f} dB"


def _percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{100 * fraction:.3g} %"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


_META = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
_STYLE = """
:root{--ink:#1b1f24;--soft:#5a6472;--line:#d9dee5;--page:#fff;--card:#f5f7f9}
@media(prefers-color-scheme:dark){:root{--ink:#e8ebef;--soft:#9aa5b3;--line:#333b45;--page:#14171b;--card:#1d2228}}
*{box-sizing:border-box}body{margin:0 auto;padding:1rem;max-width:72rem;background:var(--page);color:var(--ink);
font:16px/1.45 system-ui,sans-serif}h1{font-size:1.5rem;overflow-wrap:anywhere}h2{font-size:1.15rem;margin-top:2rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(10rem,1fr));gap:.6rem}
.cards div{background:var(--card);border-radius:.5rem;padding:.6rem .8rem}
.cards b,.cards small{display:block;font-weight:400;font-size:.85rem;color:var(--soft)}.cards strong{font-size:1.15rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem;margin-top:1rem}
figure{margin:0}figcaption{font-weight:600;margin:.4rem 0}figure svg{width:100%;height:auto}
svg text{font-size:11px;fill:var(--soft)}.end{text-anchor:end}.mid{text-anchor:middle}.grid{stroke:var(--line)}
.legend{margin:.2rem 0;font-size:.85rem;color:var(--soft)}.legend span{margin-right:.9rem;white-space:nowrap}
.legend i{display:inline-block;width:.7em;height:.7em;border-radius:50%;margin-right:.3em}
.s0{fill:#0072b2;background:#0072b2}.s1{fill:#e69f00;background:#e69f00}.s2{fill:#009e73;background:#009e73}
.s3{fill:#cc79a7;background:#cc79a7}.s4{fill:#56b4e9;background:#56b4e9}.s5{fill:#d55e00;background:#d55e00}
.s6{fill:#8c7ae6;background:#8c7ae6}.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem;width:100%}th,td{text-align:right;padding:.3rem .6rem;
border-bottom:1px solid var(--line);white-space:nowrap;font-variant-numeric:tabular-nums}
th:first-child,td:first-child{text-align:left}
.spark{width:96px;height:22px;vertical-align:middle}.spark polyline{fill:none;stroke:#0072b2;stroke-width:1.5}
details{margin:1rem 0;border-top:1px solid var(--line);padding-top:.6rem}summary{cursor:pointer;font-weight:600}
pre{overflow-x:auto;background:var(--card);padding:.8rem;border-radius:.5rem;font-size:.85rem}
"""
