"""evaluate, for a model that embeds or scores: how far FP8 moves its vectors and scores, and whether searches change.

Without a reference there is nothing to compare; the report then says how often a text's other half is found.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8serve.errors import RecipeError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import Recipe, RecipeChoice, name_of
from fp8serve.model.building import AnyModel
from fp8serve.model.network.encoder import Encoder
from fp8serve.model.network.pooling import Pooling
from fp8serve.model.network.scores import scored
from fp8serve.model.reading import hidden_states, load_reader
from fp8serve.model.text.tokenizer import Tokenizer

from .closeness import Closeness
from .data import documents, load_samples, source_names
from .device import check_device
from .pipeline import pooling_of
from .encoder_result import EncoderEvalReport, ScoreDistance
from .evaluate import check_comparable, named
from .lengths import shortfall
from .made import call, made
from .measure import LayerTally
from .options import SampleOptions
from .passes import against as compared
from .progress import Progress, Stages
from .result import LayerReport
from .retrieval import Ranking, cosines, halves, neighbours

Rows = Sequence[tuple[list[int], list[int]]]  # ids and segments of texts


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
    asked = SampleOptions.of({"data": data, **options})
    check_device(asked.device)
    stages, source = Stages(progress), Path(model_dir)
    with stages.stage("load"):
        model = _load(source, named(recipe), scales, asked.device)
        reference = None if against is None else _load(Path(against), "bf16", None, asked.device)
        if reference is not None:
            check_comparable(model, reference, source, Path(str(against)))
        elif model.config.head is not None:
            raise RecipeError("A classifier is compared with the model that it was made from; name it with --against.")
        pooling, tokenizer = pooling_of(source, model.config), Tokenizer.from_dir(source)
        limit = min(asked.seq_len, model.config.max_length, pooling.max_length or asked.seq_len)
        found = load_samples(
            asked.data, tokenizer, model.config.vocab_size, count=asked.samples, seq_len=limit, seed=asked.seed
        )
    cut = () if limit == asked.seq_len else (f"Texts were cut to {limit} tokens, which is what the model reads.",)
    task = _Comparison(model, reference, pooling, tokenizer, stages, asked, limit)
    texts: Rows = [(list(s.ids), [0] * len(s.ids)) for s in found]
    closeness, scores, layers = task.texts(texts)
    tokens = sum(len(ids) for ids, _ in texts)
    told = {"data": data, "against": against, "recipe": recipe, "scales": scales}
    return EncoderEvalReport(
        model=str(source),
        against=None if against is None else str(against),
        recipe=recipe if isinstance(recipe, str) else name_of(recipe),
        source=source_names(asked.data),
        samples=len(found),
        documents=documents(found),
        seq_len=limit,
        tokens=tokens,
        closeness=closeness,
        ranking=task.ranking(halves([ids for ids, _ in texts], tokenizer)),
        scores=scores,
        layers=layers,
        seconds=stages.total(),
        notes=cut + shortfall(asked.samples, limit, len(found), tokens),
        made=made(command or call("calibration.encoder_evaluate.evaluate_encoder", source, **told, **options)),
    )


def _load(source: Path, recipe: Any, scales: Path | str | None, device: str) -> AnyModel:
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
        asked: SampleOptions,
        limit: int,
    ) -> None:
        self.model, self.reference, self.pooling, self.tokenizer = model, reference, pooling, tokenizer
        self.stages, self.asked, self.limit = stages, asked, limit

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
        queries, found = self._read(model, rows, "rank")[0].chunk(2)
        return cosines(queries, found)

    def _by_score(self, model: AnyModel, pairs: Sequence[tuple[str, str]]) -> Tensor:
        """Scores of every first half with its second half and those of some other texts."""
        places = neighbours(len(pairs))
        asked = [(pairs[i][0], pairs[int(j)][1]) for i, row in enumerate(places) for j in row]
        rows = [self.tokenizer.encode_pair(*pair, most=self.limit) for pair in asked]
        scores = self._read(model, rows, "rank")[1]
        return torch.empty(0) if scores is None else scores.view(places.shape)

    def _read(self, model: AnyModel, rows: Rows, stage: str) -> tuple[Tensor, Tensor | None]:
        """Vectors [texts, H], and scores [texts, labels] of a model with labels."""
        vectors, scores, head, size = [], [], model.config.head, self.asked.batch_size
        groups = [rows[i : i + size] for i in range(0, len(rows), size)]
        for group in self.stages.steps(stage, groups):
            ids, kinds = (torch.tensor([i for row in part for i in row], device=self.asked.device)
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
