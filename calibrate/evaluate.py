"""evaluate: how good a directory is as it is served, alone or against a reference model.

Both models read the same sequences in lockstep and batch by batch, so memory holds only two sets of mapped weights and
the activations of one batch. With a reference every FP8 linear is also compared with the reference's linear of the same
name, on its actual input.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from fp8serve.errors import ModelError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import HeadDtype, Recipe, RecipeChoice, from_name, name_of
from fp8serve.model.building import AnyModel, Model
from fp8serve.model.checkpoint import load_servable
from fp8serve.model.text.tokenizer import Tokenizer

from .data import Batch, documents, load_samples, make_batches, source_names
from .device import check_device
from .lengths import fitting, shortfall
from .made import call, made
from .measure import LayerTally, TokenTally, add_logits
from .options import SampleOptions
from .passes import against as compared
from .passes import forward
from .progress import Progress, Stages
from .result import EvalReport, LayerReport, Quality
from .sensitivity import kl_shares


@torch.no_grad()
def evaluate(
    model_dir: Path | str,
    data: Path | str | Sequence[Path | str] | None = None,
    against: Path | str | None = None,
    *,
    recipe: RecipeChoice | Recipe = "stored",
    scales: Path | str | None = None,
    head_dtype: HeadDtype = "bf16",
    progress: Progress | None = None,
    command: str | None = None,
    **options: Any,
) -> EvalReport:
    """Perplexity of `model_dir` under `recipe` ("stored": its own FP8 weights and scales), and its distance from
    `against`.

    recipe: a name, as on the command line, or a Recipe. head_dtype: "fp8" measures the model with its head cast as
    serving does with this option; the head's noise is in the logits but not in `layers`. options: the fields of
    SampleOptions. `against`: a directory run in BF16, with the same vocabulary; it adds its perplexity, KL(against ||
    model), agreement on the most likely token, and the SQNR of every FP8 linear against the linear of the same name
    there. command: the command that a reader of the report can repeat; None: this call. ModelError, DataError,
    RecipeError, ScalesError: an input cannot be used, or the two models do not fit each other.
    """
    asked = SampleOptions.of({"data": data, **options})
    check_device(asked.device)
    stages, source = Stages(progress), Path(model_dir)
    with stages.stage("load"):
        model = load_servable(source, named(recipe), scales=scales, device=asked.device, head=head_dtype)
        reference = None if against is None else _reference(model, source, Path(against), asked.device)
        limit, notes = fitting(asked.seq_len, *(m.config for m in (model, reference) if m is not None))
        found = load_samples(
            asked.data, Tokenizer.from_dir(source), model.config.vocab_size,
            count=asked.samples, seq_len=limit, seed=asked.seed,
        )  # fmt: skip
    told = {"data": data, "against": against, "recipe": recipe, "scales": scales}
    told |= {} if head_dtype == "bf16" else {"head_dtype": head_dtype}
    batches = make_batches(found, asked.batch_size, asked.device)
    quality, layers = _measure(model, reference, batches, stages)
    tokens = sum(batch.tokens for batch in batches)
    return EvalReport(
        model=str(source),
        against=None if against is None else str(against),
        recipe=recipe if isinstance(recipe, str) else name_of(recipe),
        source=source_names(asked.data),
        samples=len(found),
        seq_len=limit,
        quality=quality,
        layers=layers,
        seconds=stages.total(),
        notes=notes + shortfall(asked.samples, limit, len(found), tokens),
        documents=documents(found),
        tokens=tokens,
        made=made(command or call("evaluate", source, **told, **options)),
        head_dtype=head_dtype,
    )


def named(recipe: RecipeChoice | Recipe) -> Literal["stored", "bf16"] | Recipe:
    """The recipe of a name; "stored" and "bf16" name none. RecipeError: there is no such name."""
    if recipe == "stored" or not isinstance(recipe, str):
        return recipe
    return from_name(recipe) or "bf16"


def _reference(model: Model, source: Path, against: Path, device: str) -> Model:
    reference = load_servable(against, "bf16", device=device)
    check_comparable(model, reference, source, against)
    return reference


def _measure(
    model: Model, reference: Model | None, batches: Sequence[Batch], stages: Stages
) -> tuple[Quality, tuple[LayerReport, ...]]:
    """The quality over the tokens and, with a reference, of every FP8 linear."""
    linears = {} if reference is None else {n: m for n, m in model.named_modules() if isinstance(m, FrozenLinear)}
    linears.pop(model.head_name, None)
    tokens, layers = TokenTally(), {name: LayerTally() for name in linears}
    for batch in stages.steps("evaluate", batches):
        with compared(linears, dict((reference or model).named_modules()), layers):
            hidden = forward(model, batch)
        other = None if reference is None else (reference, forward(reference, batch))
        add_logits(tokens, batch.targets, (model, hidden), other)
    shares = {} if reference is None else _shares(reference, linears, batches, stages)
    if reference is not None:
        for name, linear in linears.items():
            layers[name].add_weight(reference.get_parameter(f"{name}.weight"), linear)
    reports = tuple(tally.report(name, shares.get(name)) for name, tally in layers.items())
    return tokens.quality(compared=reference is not None), reports


def _shares(
    reference: Model, linears: Mapping[str, FrozenLinear], batches: Sequence[Batch], stages: Stages
) -> dict[str, float]:
    """What each of the FP8 `linears` would add to the KL divergence if it alone replaced the reference's."""
    exact = {name: reference.get_submodule(name) for name in linears}
    return kl_shares(reference, exact, batches, lambda name, linear, x: linears[name](x), stages=stages)


def check_comparable(model: AnyModel, reference: AnyModel, source: Path, against: Path) -> None:
    """ModelError unless both predict the same vocabulary with the same layers: anything else is not a comparison."""
    for what in ("vocab_size", "num_layers", "hidden_size"):
        mine, other = getattr(model.config, what), getattr(reference.config, what)
        if mine != other:
            raise ModelError(
                f"{source} and {against} cannot be compared: {what} is {mine} in one and {other} in the other; "
                "give the high-precision model that this one was made from."
            )
