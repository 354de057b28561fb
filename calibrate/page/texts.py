"""Sections of sentences: the subject, the findings, the model's output before and after, and how the report was
made."""

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fp8serve.calibration.result import GeneratedReport, HealingReport, KeptReport, Made, SmoothingReport
from fp8serve.calibration.words import count, number, size

from .curve import curve
from .findings import Finding
from .html import coded, details, figures, paragraph, section, table


def heading(title: str, verdict: str, notes: Sequence[str]) -> str:
    """The subject, the result, and anything unexpected."""
    return f"<h1>{escape(title)}</h1>" + "".join(paragraph(text, "lead") for text in (verdict, *notes))


def what_to_know(found: Sequence[Finding]) -> str:
    """The findings, or a sentence that nothing is wrong."""
    calm = [] if any(finding.trouble for finding in found) else [Finding("Nothing here needs attention.")]
    items = (f'<li class="{"trouble" if f.trouble else "calm"}">{coded(f.text)}</li>' for f in (*calm, *found))
    return f'<ul class="findings">{"".join(items)}</ul>'


def before_and_after(samples: Sequence[GeneratedReport]) -> str:
    """The model's output in high precision and in FP8, side by side."""
    return section(
        "Before and after",
        "Held-out prompts, continued by the model in high precision and by what was written. Tokens are drawn, with "
        "the same random numbers for both. Other words are not worse words: one token that was nearly as likely "
        "changes all that follows it.",
        *map(_sample, samples),
    )


def _sample(sample: GeneratedReport) -> str:
    same = _in_common(sample.before, sample.after)
    alike = f"the same for {count(sample.same_tokens, 'token')}" if sample.same_tokens else "different at once"
    told = "the same" if sample.before == sample.after else alike
    sides = (_side("In high precision", sample.before, same), _side(f"In FP8: {told}", sample.after, same))
    prompt = f'<div class="prompt"><b>Prompt</b><p class="text">{escape(sample.prompt)}</p></div>'
    return f'{prompt}<div class="said">{"".join(sides)}</div>'


def _in_common(one: str, other: str) -> int:
    """The number of characters that both begin with, without the beginning of a word that differs."""
    differing = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    same = next(differing, min(len(one), len(other)))
    within_word = re.match(r"\S", one[same:]) or re.match(r"\S", other[same:])
    return len(re.sub(r"\S+$", "", one[:same])) if within_word else same


def _side(title: str, text: str, same: int) -> str:
    """The first word that differs is marked."""
    parts = re.fullmatch(r"(\s*\S*)(.*)", text[same:], re.DOTALL)
    word, rest = parts.groups() if parts else ("", "")
    marked = f"<mark>{escape(word)}</mark>" if word else ""
    return f'<div><b>{escape(title)}</b><p class="text">{escape(text[:same])}{marked}{escape(rest)}</p></div>'


def healing(report: HealingReport | None) -> str:
    if report is None:
        return ""
    drawn = {f"Loss of {report.steps} steps (nats)": curve(report.losses, "step")}
    return section(
        "Healing",
        "The FP8 model was trained to say what it said in high precision. On the held-out samples its KL divergence "
        f"went from {number(report.kl_before)} to {number(report.kl_after)} nats"
        + ("." if report.helped else ", which is no better: the weights of before were written."),
        figures(drawn, "small"),
    )


def smoothing(report: SmoothingReport | None) -> str:
    """The pairs whose channels were evened out."""
    if report is None or not report.pairs:
        return ""
    names = table(("what makes the channels",), [[escape(name)] for name in report.pairs])
    return section(
        "Smoothing",
        "Channels far larger than the others were divided by powers of two, and the weights that read them multiplied: "
        f"in {len(report.pairs)} of {report.tried} pairs, where that made the error of the layer's output smaller.",
        details("The pairs", names),
    )


def in_bf16(kept: Sequence[KeptReport]) -> str:
    """The linears that were left as they are."""
    rows = [[escape(", ".join(k.names)), size(k.bytes), number(k.kl)] for k in kept]
    return section(
        "Stays in BF16",
        "These layers were left in high precision, because somebody named them or a target for quality asked for it.",
        table(("linear layers", "more than in FP8", "KL that their FP8 would add, nats"), rows) if kept else "",
    )


def facts(made: Made | None, told: Mapping[str, Any]) -> str:
    """How to repeat the run, and its inputs."""
    command = f"<pre>{escape(made.command)}</pre><p>{escape(made.date)}, {escape(made.machine)}</p>" if made else ""
    text = escape(json.dumps(told, indent=2, ensure_ascii=False))
    folded = details("Recipe, data, versions", f"<pre>{text}</pre>")
    return section("How it was made", "Repeat it with this command.", command, folded)
