"""A calibration report with every kind of content, for tests of pages and tables."""

import math

from fp8serve.calibration.result import (
    CalibrationReport,
    CastReport,
    ChannelReport,
    DataReport,
    GeneratedReport,
    HealingReport,
    LayerReport,
    Origin,
    Quality,
    SmoothingReport,
    TensorReport,
)

PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
               "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip


def cast(headroom: float | None = 0.5, zeros: float = 0.02, sqnr_db: float | None = 31.4) -> CastReport:
    """Returns cast statistics with most elements in the middle of the exponent range."""
    shares = [1 + 7 - abs(7 - i) for i in range(16)]
    return CastReport(sqnr_db, headroom, zeros, tuple((1 - zeros) * share / sum(shares) for share in shares), 1e-5)


def make_report(layers: int = 4, model: str = "models/tiny") -> CalibrationReport:
    """Returns a report in which layer 0 costs most, the inputs of every down_proj saturate, and the order by cost
    differs from that by SQNR."""
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
        layers=tuple(_layer(n, sqnr[n], kl=0.001 / (i + 1)) for i, n in enumerate(names)),
        tensors=tuple(
            TensorReport(f"{n}.{r}", 10 ** (0.1 * (i % 19) - 0.5), 300.0, 20, history, limit=1.5)
            for i, n in enumerate(names)
            for r in roles
        ),
        bytes_before=2_000_000,
        bytes_after=1_100_000,
        seconds={"observe": 1.0, "total": 2.5},
        versions={"fp8serve": "0.1.0"},
        generated=(GeneratedReport("Once upon", " a time there was", " a time there were", 48, 4),),
        smoothing=SmoothingReport(0.5, ("model.layers.0.input_layernorm",), 4 * layers),
        healing=HealingReport(3, 3e-5, (0.3, 0.2, 0.1), 0.05, 0.02),
        origin=Origin(
            "fp8serve calibrate models/tiny --out out", "2026-01-02T03:04:05+00:00", "Linux on a CPU, 2 threads"
        ),
    )


def _layer(name: str, sqnr_db: float, kl: float) -> LayerReport:
    down = "down" in name
    of_input = cast(-0.3 if down else 0.5)
    return LayerReport(
        name,
        sqnr_db,
        0.0001 if down else 0.0,
        kl=kl,
        input=of_input,
        weight=cast(0.0),
        outlier=ChannelReport(3, 2.5, 1.2),
    )
