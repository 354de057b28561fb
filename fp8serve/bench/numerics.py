"""`fp8serve bench numerics`: three studies of the casts and recipes, on synthetic values and on a model.

Without a model it makes one: a Llama of 4 layers, trained for a short while on text that every Python carries. The
activations of random weights have no outliers and would show nothing.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fp8serve.bench import layers, quantization, spikes
from fp8serve.bench.corpus import corpus
from fp8serve.bench.plot import Panel, svg

Tell = Callable[[str, int, int], None]
OWN_STEPS = 200


@contextmanager
def _model(given: Path | None, steps: int, tell: Tell) -> Iterator[tuple[Path, str]]:
    """(a model directory, its description)."""
    if given is not None:
        yield given, str(given)
        return
    with tempfile.TemporaryDirectory(prefix="fp8serve-bench-") as folder:
        yield trained(Path(folder), steps, tell), f"a Llama of 4 layers trained for {steps} steps in BF16"


def trained(folder: Path, steps: int, tell: Tell) -> Path:
    """A small model with realistic activations, below `folder`."""
    from fp8serve.train.config import TrainConfig
    from fp8serve.train.scratch import write_random_model, write_texts
    from fp8serve.train.trainer import Trainer

    texts, _ = corpus(docstrings_too=False)
    config = TrainConfig(
        model=str(write_random_model(folder / "untrained", texts)),
        data=(str(write_texts(folder / "train.jsonl", texts)),),
        out=str(folder / "run"),
        recipe="bf16",
        on_divergence="keep",
        max_steps=steps,
        batch_size=8,
        seq_len=128,
        lr=2e-3,
        weight_decay=0.1,
    )

    def follow(event: dict[str, Any]) -> None:
        if event["type"] == "metrics":
            tell("training a model", event["step"], event["total_steps"])

    result = Trainer(config).run(follow)
    return Path(str(result.model))


def study(
    model: Path | None, data: Sequence[Path] | None, *, samples: int, seq_len: int, own_steps: int, tell: Tell
) -> dict[str, Any]:
    """The figures of all three studies. ModelError, DataError: `model` or `data` (None: our passages) is unusable."""
    with _model(model, own_steps, tell) as (directory, described):
        found = layers.study(directory, data, samples, seq_len, tell)
    casts = [*quantization.synthetic(), *found.pop("activations")]
    return {"model": described, "casts": casts, **found, "spikes": spikes.study()}


def charts(result: Mapping[str, Any]) -> dict[str, str]:
    """SVG files by name."""
    by_recipe = {
        name: [(float(i), value) for i, value in enumerate(found["layers"].values()) if value is not None]
        for name, found in result["recipes"].items()
    }
    return {
        "layers": svg(
            "Output SQNR of every linear", [Panel("SQNR, dB", by_recipe)], "linear, in the order of the model"
        ),
        "spikes": spikes.chart(result["spikes"]["cases"]),
        "margins": spikes.margin_chart(result["spikes"]["margins"]),
    }
