"""A calibration report with every kind of content, for the tests of what shows it."""

import math

from fp8serve.calibration.result import CalibrationReport, DataReport, LayerReport, Quality, TensorReport

PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
               "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip


def make_report(layers: int = 4, model: str = "models/tiny") -> CalibrationReport:
    names = [f"model.layers.{i}.{p}" for i in range(layers) for p in PROJECTIONS]
    sqnr = {n: 30 + 4 * math.sin(7 * i) - (6 if "down" in n else 0) for i, n in enumerate(names)}
    history = tuple(1 + 0.5 * math.sin(i) for i in range(20))
    roles = ("input", "weight")
    return CalibrationReport(
        model=model,
        out="out",
        recipe={"recipe": "DelayedScaling", "margin": 0},
        format="compressed-tensors",
        device="cpu",
        data=DataReport(("mine.jsonl",), 128, 512, 32, 12345, ("shipped passages",), 16, 900, 0, 0, 40, 9),
        quality=Quality(890, 12.6, 12.5, 0.002, 0.98),
        layers=tuple(LayerReport(n, sqnr[n], 0.001 if "down" in n else 0.0) for n in names),
        tensors=tuple(
            TensorReport(f"{n}.{r}", 10 ** (0.1 * (i % 19) - 0.5), 300.0, 20, history)
            for i, n in enumerate(names)
            for r in roles
        ),
        bytes_before=2_000_000,
        bytes_after=1_100_000,
        seconds={"observe": 1.0, "total": 2.5},
        versions={"fp8serve": "0.1.0"},
    )
