"""What the trainer asks of a method. Two halves, because data are also read where there is no torch.

    Reader   rows of files -> items; the server's front and a dry run need only this
    Method   items -> a loss to minimise and means to report

An item is what a step counts one of: a row of supervised fine-tuning, a pair of answers. It is made of one or several
`Row`s, which is what goes through the model. The trainer, the order of steps, checkpoints and validation know items and
not what is in them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.train.data import Item, Row, RowCounts

if TYPE_CHECKING:
    from torch import Tensor

    from fp8serve.ranks import Ranks
    from fp8serve.train.forward import Forward, Logits

ExampleT = TypeVar("ExampleT")
ItemT = TypeVar("ItemT", bound=Item)


class Reader(Protocol[ExampleT, ItemT]):
    """The data of a method. lacks: what an example that is dropped does not have; advice: what to do about it."""

    lacks: str
    advice: str

    def row(self, row: str | Mapping[str, Any], where: str) -> ExampleT:
        """The example that a row, or a line of JSON, is. DataError names `where` and what is wrong."""

    def file(self, given: Path | str) -> list[ExampleT]:
        """All examples of a source (`model.text.data_files`), in order. DataError: it has none, or a broken row."""

    def items(self, examples: Sequence[ExampleT], tokenizer: Tokenizer, seq_len: int) -> tuple[list[ItemT], RowCounts]:
        """Those that have something to learn within `seq_len` tokens, in order, and the count of the others."""

    def kept(self, item: ItemT) -> bytes:
        """What has to be written of an item besides its rows. TypeError: it cannot be written exactly."""

    def recalled(self, rows: tuple[Row, ...], kept: bytes) -> ItemT:
        """The item of these rows, and of what `kept` gave."""


@dataclass(frozen=True)
class Measure:
    """A mean that a step reports under `name`; `words` is what the line for a person calls it, if it is in there.

    Of held-out items it is reported as `valid_` and the name without `train_`. Where a step has several updates it is
    that of the last, or, with `of_first`, of the first, before anything has moved.
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
        """Of how many the loss is a mean, above 0: targets, pairs. A step's is that of all its microbatches."""

    def sums(self, logits: "Logits", items: Sequence[ItemT]) -> tuple["Tensor", ...]:
        """(loss, one for each of `measures`), summed over `items`: scalars, of which the loss has a gradient."""

    def begin(self, forward: "Forward", items: Sequence[ItemT], ranks: "Ranks") -> list[ItemT]:
        """The items with what the method has to know of the model before its first step; found by all `ranks`."""

    def keep(self, items: Sequence[ItemT]) -> dict[str, "Tensor"]:
        """What `begin` found, for checkpoints; nothing: {}."""

    def recall(self, items: Sequence[ItemT], kept: Mapping[str, "Tensor"]) -> list[ItemT]:
        """The reverse of `keep`. JobError when it is of other items."""

    def start(self, scene: Scene) -> None:
        """Called once before the steps of a run, from wherever it stands."""

    def collect(self, step: int, microbatches: Sequence[Sequence[ItemT]]) -> Sequence[Sequence[Any]]:
        """The items that step `step`, from 0, learns from: with what the model as it is now has to say of them."""

    def close(self) -> None:
        """Called when the run ends, however it does; also where it never started."""


class FromData:
    """What a method answers whose data say all that is learnt."""

    updates = 1
    is_supervised = True

    def begin(self, forward: "Forward", items: Sequence[Any], ranks: "Ranks") -> list[Any]:
        return list(items)

    def keep(self, items: Sequence[Any]) -> dict[str, "Tensor"]:
        return {}

    def recall(self, items: Sequence[Any], kept: Mapping[str, "Tensor"]) -> list[Any]:
        return list(items)

    def start(self, scene: Scene) -> None:
        """There is nothing to prepare."""

    def collect(self, step: int, microbatches: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        return microbatches

    def close(self) -> None:
        """Nothing was opened."""
