"""The interface of a training method, and the choice of one. It has two halves because processes without torch also
read data.

    Reader   turns rows of files into items; the HTTP server and a dry run need only this half
    Method   turns items into a loss to minimise and metrics to report

An item (`data.Item`) is for example a row (supervised) or a pair of completions (DPO). The trainer, the data order,
checkpoints and validation handle items without knowing their contents.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fp8serve.model.text.data_files import LIMITS, DataLimits
from fp8serve.model.text.examples import read_rows
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import Item, Row, RowCounts

if TYPE_CHECKING:
    from torch import Tensor

    from fp8serve.ranks import Ranks
    from fp8serve.train.forward import Forward, Logits

ExampleT = TypeVar("ExampleT")
ItemT = TypeVar("ItemT", bound=Item)


class Reader(ABC, Generic[ExampleT, ItemT]):
    """Reads the data of a method.

    `columns` are the columns of a table that the method reads; None means all. `requirement` is a phrase for what an
    example must have; other examples are dropped. If all are dropped, `advice` tells the user what to change.
    `text_problem` says why the method does not read prose (`examples.read_rows`).
    """

    columns: Collection[str] | None = None
    requirement: str
    advice: str
    text_problem: str

    @abstractmethod
    def parse_row(self, row: str | Mapping[str, Any], where: str) -> ExampleT:
        """Returns the example in a row or in a line of JSON. Raises DataError that names `where` and the problem."""

    def read_examples(self, source: Path | str, limits: DataLimits = LIMITS) -> Iterator[ExampleT]:
        """Yields all examples of a source (`model.text.data_files`) in order. Raises DataError while iterating if the
        source has no example, exceeds `limits`, or has an invalid row."""
        return read_rows(source, self.parse_row, self.text_problem, self.columns, limits)

    @abstractmethod
    def tokenize(
        self, examples: Iterable[ExampleT], tokenizer: Tokenizer, seq_len: int
    ) -> tuple[list[ItemT], RowCounts]:
        """Returns the items, in order, and counts. Examples without a trainable token within `seq_len` are dropped."""

    def encode_fields(self, item: ItemT) -> bytes:
        """Returns the fields of an item besides its rows, for the token cache. Raises TypeError if they cannot be
        stored exactly. By default there are none."""
        return b""

    @abstractmethod
    def decode_item(self, rows: tuple[Row, ...], fields: bytes) -> ItemT:
        """Returns the item with these rows and the fields that `encode_fields` returned."""


@dataclass(frozen=True)
class Metric:
    """A metric that a step reports under `name`, as a mean. `label` is its name in the log message; without a label
    the message leaves the metric out.

    Validation reports the metric as `valid_` + `name` without `train_`. If a step has several updates, the mean is that
    of the last update or, with `from_first_update`, that of the first update, before the weights have changed.
    """

    name: str
    label: str = ""
    from_first_update: bool = False

    @property
    def validation_name(self) -> str:
        return f"valid_{self.name.removeprefix('train_')}"


@dataclass(frozen=True)
class RunContext:
    """The state of a run just before its first step or after a resume. `model_dir` is the base model or a checkpoint.
    `is_new_run` is False if the run resumes from a checkpoint."""

    forward: "Forward"
    model_dir: Path
    out: Path
    is_new_run: bool


class Method(ABC, Generic[ItemT]):
    """Computes the loss that a run minimises and the metrics that it reports. By default, a method needs no reference
    model and generates nothing.

    `updates` is the number of optimizer updates in a step, all with the same items. `is_supervised` says whether a
    higher loss of the same items at the end of a run means that the model became worse.
    """

    metrics: tuple[Metric, ...]
    updates = 1
    is_supervised = True

    @abstractmethod
    def count_loss_terms(self, items: Sequence[ItemT]) -> int:
        """Returns the number of terms (target tokens, pairs) over which the loss is averaged; at least 1."""

    @abstractmethod
    def compute_sums(self, logits: "Logits", items: Sequence[ItemT]) -> tuple["Tensor", ...]:
        """Returns the loss and each of `metrics`, summed over `items`, as scalars. Only the loss has a gradient."""

    def compute_reference(self, forward: "Forward", items: Sequence[ItemT], ranks: "Ranks") -> list[ItemT]:
        """Returns the items with the reference values that the initial model gives them. All `ranks` must call this."""
        return list(items)

    def reference_tensors(self, items: Sequence[ItemT]) -> dict[str, "Tensor"]:
        """Returns the results of `compute_reference` as tensors for a checkpoint."""
        return {}

    def load_reference(self, items: Sequence[ItemT], tensors: Mapping[str, "Tensor"]) -> list[ItemT]:
        """Returns the items with the references in `tensors`. Raises JobError if `tensors` belong to other items."""
        return list(items)

    def start(self, context: RunContext) -> None:
        """Prepares for training steps. The trainer calls it once, before the first step of a new or resumed run."""

    def prepare_step(self, step: int, microbatches: Sequence[Sequence[ItemT]]) -> Sequence[Sequence[Any]]:
        """Returns the microbatches that step `step` (from 0) trains on, for example with rollouts of the current
        weights."""
        return microbatches

    def close(self) -> None:
        """Frees resources. The trainer calls it whenever the run ends, even if `start` was never called."""


def reader_of(config: TrainConfig) -> Reader[Any, Any]:
    """Returns the reader of the job's data. It imports no torch."""
    match config.method:
        case "sft":
            from fp8serve.train.methods.supervised import SftReader

            return SftReader()
        case "dpo":
            from fp8serve.train.methods.dpo.data import DpoReader

            return DpoReader()
        case "grpo":
            from fp8serve.train.methods.grpo.data import GrpoReader

            return GrpoReader(config.max_completion_tokens)


def method_of(config: TrainConfig) -> Method[Any]:
    """Returns the job's training method. Only `grpo` imports the engine."""
    match config.method:
        case "sft":
            from fp8serve.train.methods.supervised import Sft

            return Sft(config)
        case "dpo":
            from fp8serve.train.methods.dpo.method import Dpo

            return Dpo(config)
        case "grpo":
            from fp8serve.train.methods.grpo.method import Grpo

            return Grpo(config)
