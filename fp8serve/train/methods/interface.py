"""What a method implements, in two halves, because data are also read by processes without torch.

    Reader   rows of files -> items; the server's front and a dry run need only this
    Method   items -> a loss to minimise and means to report

An item is the unit that a step counts, for example a row of supervised fine-tuning or a pair of answers. It consists of
one or more `Row`s, which go through the model. The trainer, the order of steps, checkpoints and validation handle items
without knowing what is in them.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fp8serve.model.text.data_files import DataLimits
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.train.data import Item, Row, RowCounts

if TYPE_CHECKING:
    from torch import Tensor

    from fp8serve.ranks import Ranks
    from fp8serve.train.forward import Forward, Logits

ExampleT = TypeVar("ExampleT")
ItemT = TypeVar("ItemT", bound=Item)


class Reader(Protocol[ExampleT, ItemT]):
    """The data of a method. columns: those that it reads of a table, None for all. lacks: what an example that is
    dropped does not have; advice: what to do about it."""

    columns: Collection[str] | None
    lacks: str
    advice: str

    def row(self, row: str | Mapping[str, Any], where: str) -> ExampleT:
        """The example in a row or in a line of JSON. DataError names `where` and what is wrong."""

    def file(self, source: Path | str, limits: DataLimits) -> Iterator[ExampleT]:
        """All examples of a source (`model.text.data_files`), in order, as they are read. DataError while iterating:
        it has none, exceeds `limits`, or has a broken row."""

    def items(self, examples: Iterable[ExampleT], tokenizer: Tokenizer, seq_len: int) -> tuple[list[ItemT], RowCounts]:
        """Those that have something to learn within `seq_len` tokens, in order, and the count of the others."""

    def kept(self, item: ItemT) -> bytes:
        """What must be stored of an item besides its rows. TypeError: it cannot be stored exactly."""

    def recalled(self, rows: tuple[Row, ...], kept: bytes) -> ItemT:
        """The item of these rows, and of what `kept` gave."""


@dataclass(frozen=True)
class Measure:
    """A mean that a step reports under `name`; `words` is its name in the message for people, if it appears there.

    For held-out items its name is `valid_` and the name without `train_`. If a step has several updates, the mean is
    that of the last one or, with `of_first`, of the first one, before the weights have changed.
    """

    name: str
    words: str = ""
    of_first: bool = False

    @property
    def held_out(self) -> str:
        return f"valid_{self.name.removeprefix('train_')}"


@dataclass(frozen=True)
class Scene:
    """Where a run stands when its steps begin. source: a directory of the model, the base's or a checkpoint's.
    is_fresh: no step was taken yet."""

    forward: "Forward"
    source: Path
    out: Path
    is_fresh: bool


class Method(Protocol[ItemT]):
    """What a run minimises, and what it reports beside the loss.

    updates: of the weights in a step, all by its items. is_supervised: whether the loss of the same items before and
    after a run says if the model became worse.
    """

    measures: tuple[Measure, ...]
    updates: int
    is_supervised: bool

    def weight(self, items: Sequence[ItemT]) -> int:
        """The number of things (targets, pairs) of which the loss is a mean, above 0; a step adds up its
        microbatches'."""

    def sums(self, logits: "Logits", items: Sequence[ItemT]) -> tuple["Tensor", ...]:
        """(loss, then each of `measures`), summed over `items`: scalars. Only the loss has a gradient."""

    def begin(self, forward: "Forward", items: Sequence[ItemT], ranks: "Ranks") -> list[ItemT]:
        """The items with what the method needs to know about the initial model; all `ranks` compute it together."""

    def keep(self, items: Sequence[ItemT]) -> dict[str, "Tensor"]:
        """What `begin` found, for checkpoints; nothing: {}."""

    def recall(self, items: Sequence[ItemT], stored: Mapping[str, "Tensor"]) -> list[ItemT]:
        """The reverse of `keep`. JobError if `stored` belongs to other items."""

    def start(self, scene: Scene) -> None:
        """Called once before the steps of a run, from wherever it stands."""

    def collect(self, step: int, microbatches: Sequence[Sequence[ItemT]]) -> Sequence[Sequence[Any]]:
        """The items that step `step` (from 0) learns from, with what the present model computes for them."""

    def close(self) -> None:
        """Called when the run ends for any reason, even if `start` was never called."""


class FromData:
    """Defaults for a method whose data alone say what is learnt."""

    updates = 1
    is_supervised = True

    def begin(self, forward: "Forward", items: Sequence[Any], ranks: "Ranks") -> list[Any]:
        return list(items)

    def keep(self, items: Sequence[Any]) -> dict[str, "Tensor"]:
        return {}

    def recall(self, items: Sequence[Any], stored: Mapping[str, "Tensor"]) -> list[Any]:
        return list(items)

    def start(self, scene: Scene) -> None:
        """There is nothing to prepare."""

    def collect(self, step: int, microbatches: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        return microbatches

    def close(self) -> None:
        """Nothing was opened."""
