"""Delayed scaling when a tensor suddenly gets 100 times larger, for one step or from then on.

A stream of Gaussian tensors is quantized in E4M3 step by step with the product's own state and update. At step `START`
the values are 100 times larger: in the scenario `once` for that step only, in `lasting` from then on. Delayed scaling
quantizes that step with the scale of the steps before, so all but the smallest values saturate; a margin leaves room
for this. Afterwards the history contains the spike for N steps. That is harmless in E4M3, whose precision is the same
over 13 binades, until small values reach the subnormals.

Each step has the fraction of elements beyond the range and the SQNR in dB. A run has recovered when the SQNR is within
1 dB of its value before the spike and stays there.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks.studies.quantization import sqnr_db
from fp8serve.charts import Panel, svg_file
from fp8serve.fp8.ops import dequantize
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.fp8.scaling import Entry, ScalingState, update

FACTOR, START, STEPS, ELEMENTS = 100.0, 20, 100, 1 << 14
HISTORIES, MARGINS, SCENARIOS = (1, 16, 64), (0, 3, 7), ("once", "lasting")
SWEEP = range(9)  # margins at history 16, one spike
_E4M3, _MAX = torch.float8_e4m3fn, 448.0


def study(steps: int = STEPS) -> dict[str, list[dict[str, Any]]]:
    """{"cases": one entry per scenario, history length and margin, "margins": one per margin of SWEEP}."""
    return {
        "cases": [_case(s, history, margin, steps) for s in SCENARIOS for history in HISTORIES for margin in MARGINS],
        "margins": [_case("once", HISTORIES[1], margin, START + 20) for margin in SWEEP],
    }


def _case(scenario: str, history: int, margin: int, steps: int) -> dict[str, Any]:
    saturated, sqnr = zip(*_run(scenario, history, margin, steps), strict=True)
    before = sqnr[START - 1]
    late = [step for step in range(START, steps) if sqnr[step] < before - 1]
    return {
        "scenario": scenario,
        "history": history,
        "margin": margin,
        "before_db": before,
        "spike_db": sqnr[START],
        "spike_saturated": saturated[START],
        "worst_after_db": min(sqnr[START + 1 :]),
        "steps_to_recover": late[-1] + 1 - START if late else 0,
        "recovered": not late or late[-1] + 1 < steps,
        "saturated": list(saturated),
        "sqnr_db": list(sqnr),
    }


def _run(scenario: str, history: int, margin: int, steps: int) -> Iterator[tuple[float, float]]:
    """(saturated fraction, SQNR in dB) of each step."""
    recipe = DelayedScaling(amax_history_len=history, margin=margin)
    state = ScalingState.create(history, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        larger = step == START or (scenario == "lasting" and step > START)
        x = torch.randn(ELEMENTS, generator=generator) * (FACTOR if larger else 1.0)
        if step == 0:  # the first step would run at scale 1, which is not studied here
            state.stage(x.abs().max())
            update([Entry(state, _MAX)], recipe)
        scale = state.scale.clone()
        q, amax = torch.ops.fp8serve.quantize(x, scale, _E4M3)
        state.stage(amax)
        update([Entry(state, _MAX)], recipe)
        yield float((x.abs() * scale > _MAX).float().mean()), sqnr_db(x, dequantize(q, scale.reciprocal()))


def chart(cases: Sequence[Mapping[str, Any]]) -> str:
    """SQNR over steps with one spike, for each history length: without a margin, and with one that covers the spike."""
    panels = [
        Panel(
            f"SQNR, dB, margin {margin}",
            {
                f"history {case['history']}": list(enumerate(case["sqnr_db"]))
                for case in cases
                if case["scenario"] == "once" and case["margin"] == margin
            },
        )
        for margin in (MARGINS[0], MARGINS[-1])
    ]
    return svg_file(f"Delayed scaling in E4M3, values {FACTOR:.0f} times larger at step {START} only", panels, "step")


def margin_chart(cases: Sequence[Mapping[str, Any]]) -> str:
    """SQNR against the margin, before the spike, at it and after it, and the saturated share at the spike."""
    curves = {"before": "before_db", "at the spike": "spike_db", "worst after": "worst_after_db"}
    points = [(float(case["margin"]), 100 * case["spike_saturated"]) for case in cases]
    panels = [
        Panel("SQNR, dB", {name: [(float(c["margin"]), c[key]) for c in cases] for name, key in curves.items()}),
        Panel("saturated at the spike, %", {"at the spike": points}),
    ]
    return svg_file(f"Margins and a spike of {FACTOR:.0f} times, history {HISTORIES[1]}", panels, "margin")
