"""Measures the quality of a model directory as it is served, alone or against a reference model.

Both models read the same sequences batch by batch, so memory holds only two sets of mapped weights and the activations
of one batch. With a reference every FP8 linear is also compared with the linear of the same name in the reference, on
the input that occurs in the measured model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fp8serve.calibration.checks import check_device, limit_seq_len, missing_samples_note
from fp8serve.calibration.compare import kl_shares
from fp8serve.calibration.data import Batch, count_documents, load_samples, make_batches, source_names
from fp8serve.calibration.embedding import (
    CosineSummary,
    EncoderEvalReport,
    Ranking,
    ScoreDistance,
    candidate_indices,
    cosine_matrix,
    split_texts,
)
from fp8serve.calibration.measure import LayerTally, TokenTally, add_logits, read_tallies
from fp8serve.calibration.options import SampleOptions
from fp8serve.calibration.output import call_text, make_origin
from fp8serve.calibration.passes import compare_with_reference, forward
from fp8serve.calibration.pipeline import pooling_of
from fp8serve.calibration.progress import Progress, Stages
from fp8serve.calibration.result import EvalReport, LayerReport, Quality
from fp8serve.errors import ModelError, RecipeError
from fp8serve.fp8.frozen import FrozenLinear, make_rows_independent
from fp8serve.fp8.recipe import HeadDtype, Recipe, RecipeChoice, from_name, name_of
from fp8serve.model.building import AnyModel, Model, hidden_states
from fp8serve.model.checkpoint import load_any_servable, load_servable
from fp8serve.model.network.encoder import Encoder
from fp8serve.model.network.pooling import Pooling, to_scores
from fp8serve.model.text.tokenizer import Tokenizer

Texts = Sequence[tuple[list[int], list[int]]]  # token ids and segments of each text


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
    """Measures the perplexity of `model_dir`, and its difference from the reference `against`.

    Args:
        data: Files to measure on; None for the passages that ship with fp8serve.
        against: Directory of a reference with the same vocabulary, which runs in BF16. It adds the reference's
            perplexity, KL(against || model), the agreement on the most likely token, and the SQNR of every FP8 linear.
        recipe: A Recipe or the name of one; "stored" uses the quantized weights and scales of the directory.
        scales: File of scales to use instead of those in the directory.
        head_dtype: "fp8" casts the head as serving does with this option. The error of the head is in the logits but
            not in `layers` of the report.
        progress: Called with (stage, done, total) after every step.
        command: The command that the report shows as its origin; None for this call.
        options: The fields of SampleOptions.

    Raises ModelError, DataError, RecipeError or ScalesError if an input cannot be used, or if the models cannot be
    compared.
    """
    settings = SampleOptions.of({"data": data, **options}).on_device(Path(model_dir))
    check_device(settings.device)
    stages, source = Stages(progress), Path(model_dir)
    with stages.stage("load"):
        model = load_servable(source, recipe_of_name(recipe), scales=scales, device=settings.device, head=head_dtype)
        reference = None if against is None else load_servable(Path(against), "bf16", device=settings.device)
        if reference is not None:
            check_comparable(model, reference, source, Path(str(against)))
        limit, notes = limit_seq_len(settings.seq_len, *(m.config for m in (model, reference) if m is not None))
        samples = load_samples(
            settings.data, Tokenizer.from_dir(source), model.config.vocab_size,
            count=settings.samples, seq_len=limit, seed=settings.seed,
        )  # fmt: skip
    arguments = {"data": data, "against": against, "recipe": recipe, "scales": scales}
    arguments |= {} if head_dtype == "bf16" else {"head_dtype": head_dtype}
    batches = make_batches(samples, settings.sequences_per_batch, settings.device)
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
        notes=notes + missing_samples_note(settings.samples, limit, len(samples), tokens),
        documents=count_documents(samples),
        tokens=tokens,
        origin=make_origin(command or call_text("evaluate", source, **arguments, **options)),
        head_dtype=head_dtype,
    )


def recipe_of_name(recipe: RecipeChoice | Recipe) -> Literal["stored", "bf16"] | Recipe:
    """Returns the recipe with this name; "stored" and "bf16" are returned as they are.

    Raises RecipeError if there is no such recipe.
    """
    if recipe == "stored" or not isinstance(recipe, str):
        return recipe
    return from_name(recipe) or "bf16"


def _measure(
    model: Model, reference: Model | None, batches: Sequence[Batch], stages: Stages
) -> tuple[Quality, tuple[LayerReport, ...]]:
    """Returns the quality over all tokens and, with a reference, the statistics of every FP8 linear."""
    linears = {} if reference is None else quantized_linears(model)
    linears.pop(model.head_name, None)
    tokens, tallies = TokenTally(), {name: LayerTally() for name in linears}
    for batch in stages.steps("evaluate", batches):
        with compare_with_reference(linears, dict((reference or model).named_modules()), tallies):
            hidden = forward(model, batch)
        reference_hidden = None if reference is None else (reference, forward(reference, batch))
        add_logits(tokens, batch.targets, (model, hidden), reference_hidden)
    quality = tokens.quality(compared=reference is not None)
    if reference is None:
        return quality, ()
    exact = {name: reference.get_submodule(name) for name in linears}
    shares = kl_shares(reference, exact, batches, lambda name, linear, x: linears[name](x), stages=stages)
    return quality, _layer_reports(linears, reference, tallies, shares)


def quantized_linears(model: AnyModel) -> dict[str, FrozenLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, FrozenLinear)}


def _layer_reports(
    linears: Mapping[str, FrozenLinear],
    reference: AnyModel,
    tallies: Mapping[str, LayerTally],
    shares: Mapping[str, float] | None = None,
) -> tuple[LayerReport, ...]:
    """Returns the statistics of `linears`. `shares` are the KL divergences that they would add to the reference."""
    for name, linear in linears.items():
        tallies[name].add_weight(reference.get_parameter(f"{name}.weight"), linear)
    read_tallies(tallies.values())
    return tuple(tally.report(name, (shares or {}).get(name)) for name, tally in tallies.items())


def check_comparable(model: AnyModel, reference: AnyModel, source: Path, against: Path) -> None:
    """Raises ModelError unless both models have the same vocabulary, number of layers and hidden size."""
    for field in ("vocab_size", "num_layers", "hidden_size"):
        value, expected = getattr(model.config, field), getattr(reference.config, field)
        if value != expected:
            raise ModelError(
                f"{source} and {against} cannot be compared: {field} is {value} in one and {expected} in the other; "
                "name the high-precision model from which the measured model was made."
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
    """Measures a model that embeds or classifies on texts, and its difference from the reference `against`.

    The arguments are those of `evaluate`. Raises RecipeError for a classifier without a reference.
    """
    settings = SampleOptions.of({"data": data, **options}).on_device(Path(model_dir))
    check_device(settings.device)
    stages, source = Stages(progress), Path(model_dir)
    with stages.stage("load"):
        model = _load_served(source, recipe_of_name(recipe), scales, settings.device)
        reference = None if against is None else _load_served(Path(against), "bf16", None, settings.device)
        if reference is not None:
            check_comparable(model, reference, source, Path(str(against)))
        elif model.config.head is not None:
            raise RecipeError("A classifier can only be compared with a reference; name it with --against.")
        pooling, tokenizer = pooling_of(source, model.config), Tokenizer.from_dir(source)
        limit = min(settings.seq_len, model.config.max_length, pooling.max_length or settings.seq_len)
        samples = load_samples(
            settings.data, tokenizer, model.config.vocab_size, count=settings.samples, seq_len=limit, seed=settings.seed
        )
    cut = () if limit == settings.seq_len else (f"Texts were cut to {limit} tokens, the limit of the model.",)
    comparison = _Comparison(model, reference, pooling, tokenizer, stages, settings, limit)
    texts: Texts = [(list(s.ids), [0] * len(s.ids)) for s in samples]
    cosine, scores, layers = comparison.compare_texts(texts)
    tokens = sum(len(ids) for ids, _ in texts)
    arguments = {"data": data, "against": against, "recipe": recipe, "scales": scales}
    return EncoderEvalReport(
        model=str(source),
        against=None if against is None else str(against),
        recipe=recipe if isinstance(recipe, str) else name_of(recipe),
        source=source_names(settings.data),
        samples=len(samples),
        documents=count_documents(samples),
        seq_len=limit,
        tokens=tokens,
        cosine=cosine,
        ranking=comparison.ranking(split_texts([ids for ids, _ in texts], tokenizer)),
        scores=scores,
        layers=layers,
        seconds=stages.total(),
        notes=cut + missing_samples_note(settings.samples, limit, len(samples), tokens),
        origin=make_origin(
            command or call_text("calibration.evaluate.evaluate_encoder", source, **arguments, **options)
        ),
    )


def _load_served(source: Path, recipe: Any, scales: Path | str | None, device: str) -> AnyModel:
    """Loads the model as it is served, so that a text's outputs do not depend on the other texts of its batch."""
    model = load_any_servable(source, recipe, scales, device)
    make_rows_independent(model)
    return model


@dataclass(frozen=True)
class _Comparison:
    """Runs a model, and its reference if there is one, over the same texts of at most `limit` tokens."""

    model: AnyModel
    reference: AnyModel | None
    pooling: Pooling
    tokenizer: Tokenizer
    stages: Stages
    options: SampleOptions
    limit: int

    def compare_texts(self, texts: Texts) -> tuple[CosineSummary | None, ScoreDistance | None, tuple[LayerReport, ...]]:
        """Compares vectors and scores, and every FP8 linear; without a reference the result is (None, None, ())."""
        if self.reference is None:
            return None, None, ()
        linears = quantized_linears(self.model)
        tallies = {name: LayerTally() for name in linears}
        with compare_with_reference(linears, dict(self.reference.named_modules()), tallies):
            vectors, scores = self._run(self.model, texts, "evaluate")
        exact_vectors, exact_scores = self._run(self.reference, texts, "reference")
        distance = None if scores is None or exact_scores is None else ScoreDistance.of(scores, exact_scores)
        reports = _layer_reports(linears, self.reference, tallies)
        return CosineSummary.of(exact_vectors, vectors), distance, reports

    def ranking(self, pairs: Sequence[tuple[str, str]]) -> Ranking | None:
        """Runs the ranking test; returns None for fewer than two texts, or for a classifier that does not rank."""
        head = self.model.config.head
        if len(pairs) < 2 or (head is not None and not (len(head.labels) == 1 and isinstance(self.model, Encoder))):
            return None
        rank = self._by_cosine if head is None else self._by_score
        reference = None if self.reference is None else rank(self.reference, pairs)
        scores = rank(self.model, pairs)
        correct = torch.zeros(len(pairs)) if head is not None else torch.arange(len(pairs))
        return Ranking.of(scores, correct, reference)

    def _by_cosine(self, model: AnyModel, pairs: Sequence[tuple[str, str]]) -> Tensor:
        """Returns the scores of every first half with every second half."""
        halves = [text for part in zip(*pairs, strict=True) for text in part]
        texts = [self.tokenizer.encode_pair(text, limit=self.limit) for text in halves]
        queries, documents = self._run(model, texts, "rank")[0].chunk(2)
        return cosine_matrix(queries, documents)

    def _by_score(self, model: AnyModel, pairs: Sequence[tuple[str, str]]) -> Tensor:
        """Returns the scores of every first half with its own second half and with those of the next texts."""
        indices = candidate_indices(len(pairs))
        candidates = [(pairs[i][0], pairs[int(j)][1]) for i, row in enumerate(indices) for j in row]
        texts = [self.tokenizer.encode_pair(*pair, limit=self.limit) for pair in candidates]
        scores = self._run(model, texts, "rank")[1]
        return torch.empty(0) if scores is None else scores.view(indices.shape)

    def _run(self, model: AnyModel, texts: Texts, stage: str) -> tuple[Tensor, Tensor | None]:
        """Returns the vectors [texts, H], and the scores [texts, labels], or None for a model without labels."""
        vectors, scores, head, size = [], [], model.config.head, self.options.sequences_per_batch
        batches = [texts[i : i + size] for i in range(0, len(texts), size)]
        for batch in self.stages.steps(stage, batches):
            ids, segments = (torch.tensor([i for row in part for i in row], device=self.options.device)
                          for part in zip(*batch, strict=True))  # fmt: skip
            lengths = [len(row) for row, _ in batch]
            hidden = hidden_states(model, ids, lengths, segments)
            vectors.append(self.pooling(hidden, lengths).cpu())
            if head is not None:
                scores.append(to_scores(_logits(model, hidden, lengths), head.activation).cpu())
        return torch.cat(vectors), torch.cat(scores) if scores else None


def _logits(model: AnyModel, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
    """Returns the logits of a classifier's head, which reads the first token of an encoder, the last of a decoder."""
    if isinstance(model, Encoder):
        return model.logits(hidden, lengths)
    ends = torch.tensor(lengths, device=hidden.device).cumsum(0) - 1
    return model.logits(hidden[ends])
