"""A model run layer by layer: one layer over all batches before the next is touched.

So every weight is read from its file once, however many batches there are, and a model larger than memory costs one
pass over the disk. Memory holds one layer's weights and the hidden states of all batches, [tokens, hidden] in BF16. The
results equal those of whole passes, bit for bit. A model that transformers computes is a single layer here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.model.building import AnyModel, Model
from fp8serve.model.network.encoder import Encoder
from fp8serve.model.storage.mapped import release_pages
from fp8serve.model.storage.memory import trim

from .data import Batch
from .passes import Tap, attending, hooks
from .progress import Stages

T = TypeVar("T")


class Stream:
    """A batch on its way through the model. `hidden`: its state so far, BF16 [tokens, hidden]."""

    def __init__(self, model: AnyModel, batch: Batch, tap: Tap | None = None) -> None:
        self._parts, self.batch = model.parts, batch
        self.hidden, self._told = _entered(model, batch, tap)

    def run(self, index: int) -> Tensor:
        """The layer's output for the hidden state, which is not changed."""
        layer: Callable[..., Tensor] = self._parts[index]
        return layer(self.hidden, *self._told(index))

    def advance(self, index: int) -> None:
        self.hidden = self.run(index)


def _entered(model: AnyModel, batch: Batch, tap: Tap | None) -> tuple[Tensor, Callable[[int], tuple[Any, ...]]]:
    """The first layer's input, and the other arguments of every layer."""
    if isinstance(model, Encoder):
        return model.enter(batch.ids, batch.lengths), lambda index: (batch.lengths,)
    hidden, attend = model.enter(batch.ids), attending(model, batch, tap)
    places = model.places(batch.positions, hidden.dtype)
    return hidden, lambda index: (places[index], attend)


def streams(decoder: AnyModel, batches: Sequence[Batch], tap: Tap | None = None) -> list[Stream]:
    return [Stream(decoder, batch, tap) for batch in batches]


def layers(decoder: AnyModel, stage: str, stages: Stages | None) -> Iterator[int]:
    """The index of every layer; releases the pages of a finished layer, and memory freed in the meantime.

    A weight that is a view of the file must therefore be replaced, not written to: a write would be lost.
    """
    for index in (stages or Stages()).steps(stage, range(len(decoder.parts))):
        yield index
        _release(decoder.parts[index])
        trim()


@contextmanager
def releasing(decoder: Model) -> Iterator[None]:
    """Inside, whole passes release the pages of every layer that has run, forwards and backwards."""

    def ran(layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        _release(layer)
        if args[0].requires_grad:
            args[0].register_hook(lambda gradient: _release(layer))  # type: ignore[no-untyped-call]

    with hooks({str(index): layer for index, layer in enumerate(decoder.parts)}, lambda name: ran):
        yield


def _release(layer: nn.Module) -> None:
    for parameter in layer.parameters():
        release_pages(parameter)


def release_weights(frozen: Mapping[str, FrozenLinear]) -> None:
    """Rounded weights that are mapped from a file of unfinished results leave memory until they are read again."""
    for layer in frozen.values():
        release_pages(layer.weight_q)


def within(decoder: AnyModel, index: int, named: Mapping[str, T]) -> dict[str, T]:
    """The entries that belong to a layer, of a mapping by the names of tensors or modules."""
    return {name: named[name] for name in decoder.named_in(index, named)}
