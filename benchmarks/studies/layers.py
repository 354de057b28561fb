"""The cost of each recipe for each linear of a model: the SQNR of its output, with all recipes on the same text.

The model is calibrated as a user would calibrate it: the delayed recipe gets its scales from text other than the
measured one, and the others scale each tensor by its own content. Each linear gets the input that it has in the FP8
model, and is compared with the same layer in high precision on that input (`calibration.compare`), so a layer is
charged with its own error.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.studies.quantization import activations
from fp8serve.calibration.compare import compare
from fp8serve.calibration.data import calibration_batches
from fp8serve.calibration.observe import final_states, observe
from fp8serve.calibration.pipeline import load_for_calibration
from fp8serve.fp8.recipe import DelayedScaling, from_name
from fp8serve.model.text.tokenizer import Tokenizer

RECIPES = ("delayed", "current", "rowwise", "block")


def study(
    model: Path, data: Sequence[Path] | None, samples: int, seq_len: int, report: Callable[[str, int, int], None]
) -> dict[str, Any]:
    """{"activations": rows of `quantization`, "recipes": {name: {"layers": {linear: dB}, "perplexity", ...}}}.

    ModelError, DataError: an input cannot be read. `samples` sequences of `data` are calibrated on, others measured.
    """
    decoder, linears = load_for_calibration(model, "cpu")
    batches = calibration_batches(
        data, Tokenizer.from_dir(model), decoder.config.vocab_size,
        samples=samples, seq_len=min(seq_len, decoder.config.max_position_embeddings), batch_size=4, seed=0,
        holdout=data,
    )  # fmt: skip
    states = final_states(observe(decoder, linears, batches.calibration, DelayedScaling()))
    results = {}
    for index, name in enumerate(RECIPES):
        report(name, index, len(RECIPES))
        recipe = from_name(name)
        assert recipe is not None  # RECIPES has no bf16
        quality, layers = compare(decoder, linears, batches.held_out, recipe, states)
        sqnr = {linear: tally.sqnr_db for linear, tally in layers.items()}
        finite = [value for value in sqnr.values() if value is not None]
        results[name] = {
            "layers": sqnr,
            "median_db": median(finite),
            "worst_db": min(finite),
            "perplexity": quality.perplexity,
            "perplexity_bf16": quality.reference_perplexity,
            "top1_agreement": quality.top1_agreement,
        }
    return {"activations": list(activations(decoder, linears, batches.held_out[0])), "recipes": results}
