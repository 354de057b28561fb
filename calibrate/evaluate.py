"""evaluate: how good a directory is as it is served, alone or against a reference model.

Both models read the same sequences in lockstep and batch by batch, so memory holds only two sets of mapped weights and
the activations of one batch. With a reference every FP8 linear is also compared with the reference's linear of the same
name, on its actual input.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fp8serve.calibration.checks import check_device, fitting, shortfall
from fp8serve.calibration.compare import kl_shares
from fp8serve.calibration.data import Batch, documents, load_samples, make_batches, source_names
from fp8serve.calibration.embedding import (
    Closeness,
    EncoderEvalReport,
    Ranking,
    ScoreDistance,
    cosines,
    halves,
    neighbours,
)
from fp8serve.calibration.measure import LayerTally, TokenTally, add_logits
from fp8serve.calibration.options import SampleOptions
from fp8serve.calibration.output import call, origin_of
from fp8serve.calibration.passes import against as compared
from fp8serve.calibration.passes import forward
from fp8serve.calibration.pipeline import pooling_of
from fp8serve.calibration.progress import Progress, Stages
from fp8serve.calibration.result import EvalReport, LayerReport, Quality
from fp8serve.errors import ModelError, RecipeError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import HeadDtype, Recipe, RecipeChoice, from_name, name_of
from fp8serve.model.building import AnyModel, Model, hidden_states
from fp8serve.model.checkpoint import load_reader, load_servable
from fp8serve.model.network.encoder import Encoder
from fp8serve.model.network.pooling import Pooling, scored
from fp8serve.model.text.tokenizer import Tokenizer

Rows = Sequence[tuple[list[int], list[int]]]  # ids and segments of texts


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
    settings = SampleOptions.of({"data": data, **options})
    check_device(settings.device)
    stages, source = Stages(progress), Path(model_dir)
    with stages.stage("load"):
        model = load_servable(source, recipe_of_name(recipe), scales=scales, device=settings.device, head=head_dtype)
        reference = None if against is None else _reference(model, source, Path(against), settings.device)
        limit, notes = fitting(settings.seq_len, *(m.config for m in (model, reference) if m is not None))
        samples = load_samples(
            settings.data, Tokenizer.from_dir(source), model.config.vocab_size,
            count=settings.samples, seq_len=limit, seed=settings.seed,
        )  # fmt: skip
    arguments = {"data": data, "against": against, "recipe": recipe, "scales": scales}
    arguments |= {} if head_dtype == "bf16" else {"head_dtype": head_dtype}
    batches = make_batches(samples, settings.batch_size, settings.device)
    quality, layers = _measure(model, reference, batches, stages)
    tokens = sum(batch.tokens for batch in batches)
    return EvalReport(
        model=str(source),
        against=None if against is None else str(against),
        recipe=recipe if isinstance(recipe, str) else name_of(recipe),
        source=source_names(settings.data),
        samples=len(samples),
        seq_len=limit,
        quality=quality,
        layers=layers,
        seconds=stages.total(),
        notes=notes + shortfall(settings.samples, limit, len(samples), tokens),
        documents=documents(samples),
        tokens=tokens,
        made=origin_of(command or call("evaluate", source, **arguments, **options)),
        head_dtype=head_dtype,
    )


def recipe_of_name(recipe: RecipeChoice | Recipe) -> Literal["stored", "bf16"] | Recipe:
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


@torch.no_grad()
def evaluate_encoder(
    model_dir: Path | str,
    data: Path | str | Sequence[Path | str] | None = None,
    against: Path | str | None = None,
    *,
    recipe: RecipeChoice | Recipe = "stored",
    scales: Path | str | None = None,
    progress: Progress | None = None,
    command: str | None = None,
    **options: Any,
) -> EncoderEvalReport:
    """Evaluates `model_dir` under `recipe` on texts; with `against`, run in BF16, measures what FP8 changed. As
    `evaluate`.

    RecipeError: a classifier without a reference, for which nothing can be measured.
    """
    settings = SampleOptions.of({"data": data, **options})
    check_device(settings.device)
    stages, source = Stages(progress), Path(model_dir)
    with stages.stage("load"):
        model = _load_served(source, recipe_of_name(recipe), scales, settings.device)
        reference = None if against is None else _load_served(Path(against), "bf16", None, settings.device)
        if reference is not None:
            check_comparable(model, reference, source, Path(str(against)))
        elif model.config.head is not None:
            raise RecipeError("A classifier is compared with the model that it was made from; name it with --against.")
        pooling, tokenizer = pooling_of(source, model.config), Tokenizer.from_dir(source)
        limit = min(settings.seq_len, model.config.max_length, pooling.max_length or settings.seq_len)
        samples = load_samples(
            settings.data, tokenizer, model.config.vocab_size, count=settings.samples, seq_len=limit, seed=settings.seed
        )
    cut = () if limit == settings.seq_len else (f"Texts were cut to {limit} tokens, which is what the model reads.",)
    task = _Comparison(model, reference, pooling, tokenizer, stages, settings, limit)
    texts: Rows = [(list(s.ids), [0] * len(s.ids)) for s in samples]
    closeness, scores, layers = task.texts(texts)
    tokens = sum(len(ids) for ids, _ in texts)
    arguments = {"data": data, "against": against, "recipe": recipe, "scales": scales}
    return EncoderEvalReport(
        model=str(source),
        against=None if against is None else str(against),
        recipe=recipe if isinstance(recipe, str) else name_of(recipe),
        source=source_names(settings.data),
        samples=len(samples),
        documents=documents(samples),
        seq_len=limit,
        tokens=tokens,
        closeness=closeness,
        ranking=task.ranking(halves([ids for ids, _ in texts], tokenizer)),
        scores=scores,
        layers=layers,
        seconds=stages.total(),
        notes=cut + shortfall(settings.samples, limit, len(samples), tokens),
        made=origin_of(command or call("calibration.evaluate.evaluate_encoder", source, **arguments, **options)),
    )


def _load_served(source: Path, recipe: Any, scales: Path | str | None, device: str) -> AnyModel:
    """The model as it is served, so that no row depends on another."""
    model = load_reader(source, recipe, scales, device)
    for module in model.modules():
        if isinstance(module, FrozenLinear):
            module.make_rows_independent()
    return model


class _Comparison:
    """Two models, or one, over the same texts."""

    def __init__(
        self,
        model: AnyModel,
        reference: AnyModel | None,
        pooling: Pooling,
        tokenizer: Tokenizer,
        stages: Stages,
        settings: SampleOptions,
        limit: int,
    ) -> None:
        self.model, self.reference, self.pooling, self.tokenizer = model, reference, pooling, tokenizer
        self.stages, self.options, self.limit = stages, settings, limit

    def texts(self, rows: Rows) -> tuple[Closeness | None, ScoreDistance | None, tuple[LayerReport, ...]]:
        """The distance of vectors and of scores, and every FP8 linear's noise; nothing without a reference."""
        if self.reference is None:
            return None, None, ()
        linears = {n: m for n, m in self.model.named_modules() if isinstance(m, FrozenLinear)}
        tallies = {name: LayerTally() for name in linears}
        with compared(linears, dict(self.reference.named_modules()), tallies):
            got = self._read(self.model, rows, "evaluate")
        exact = self._read(self.reference, rows, "reference")
        for name, linear in linears.items():
            tallies[name].add_weight(self.reference.get_parameter(f"{name}.weight"), linear)
        distance = None if got[1] is None or exact[1] is None else ScoreDistance.of(got[1], exact[1])
        reports = tuple(tally.report(name) for name, tally in tallies.items())
        return Closeness.of(exact[0], got[0]), distance, reports

    def ranking(self, pairs: Sequence[tuple[str, str]]) -> Ranking | None:
        """How the other halves of texts are ranked. None: fewer than two texts, or labels that rank nothing."""
        head = self.model.config.head
        if len(pairs) < 2 or (head is not None and not (len(head.labels) == 1 and isinstance(self.model, Encoder))):
            return None
        rank = self._by_cosine if head is None else self._by_score
        reference = None if self.reference is None else rank(self.reference, pairs)
        scores = rank(self.model, pairs)
        right = torch.zeros(len(pairs)) if head is not None else torch.arange(len(pairs))
        return Ranking.of(scores, right, reference)

    def _by_cosine(self, model: AnyModel, pairs: Sequence[tuple[str, str]]) -> Tensor:
        """Scores of every first half with every second half."""
        rows = [self.tokenizer.encode_pair(text, most=self.limit) for part in zip(*pairs, strict=True) for text in part]
        queries, documents = self._read(model, rows, "rank")[0].chunk(2)
        return cosines(queries, documents)

    def _by_score(self, model: AnyModel, pairs: Sequence[tuple[str, str]]) -> Tensor:
        """Scores of every first half with its second half and those of some other texts."""
        places = neighbours(len(pairs))
        candidates = [(pairs[i][0], pairs[int(j)][1]) for i, row in enumerate(places) for j in row]
        rows = [self.tokenizer.encode_pair(*pair, most=self.limit) for pair in candidates]
        scores = self._read(model, rows, "rank")[1]
        return torch.empty(0) if scores is None else scores.view(places.shape)

    def _read(self, model: AnyModel, rows: Rows, stage: str) -> tuple[Tensor, Tensor | None]:
        """Vectors [texts, H], and scores [texts, labels] of a model with labels."""
        vectors, scores, head, size = [], [], model.config.head, self.options.batch_size
        groups = [rows[i : i + size] for i in range(0, len(rows), size)]
        for group in self.stages.steps(stage, groups):
            ids, kinds = (torch.tensor([i for row in part for i in row], device=self.options.device)
                          for part in zip(*group, strict=True))  # fmt: skip
            lengths = [len(row) for row, _ in group]
            hidden = hidden_states(model, ids, lengths, kinds)
            vectors.append(self.pooling(hidden, lengths).cpu())
            if head is not None:
                scores.append(scored(_logits(model, hidden, lengths), head.activation).cpu())
        return torch.cat(vectors), torch.cat(scores) if scores else None


def _logits(model: AnyModel, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
    """By the head of labels: an encoder's reads the first token of each text, a decoder's the last."""
    if isinstance(model, Encoder):
        return model.logits(hidden, lengths)
    ends = torch.tensor(lengths, device=hidden.device).cumsum(0) - 1
    return model.logits(hidden[ends])
