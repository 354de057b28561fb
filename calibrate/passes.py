"""Forward and backward passes over flattened batches, whole or layer by layer, and the hooks that look inside.

No gradient of a weight is ever computed here: gradient calibration needs only the gradients of activations, so it takes
no memory beyond the activations of one batch. For the same reason the loss is computed in slices of the logits.

Layer by layer, one layer runs over all batches before the next is touched. So every weight is read from its file once,
however many batches there are, and a model larger than memory costs one pass over the disk. Memory holds one layer's
weights and the hidden states of all batches, [tokens, hidden] in BF16. The results equal those of whole passes, bit for
bit. A model that transformers computes is a single layer here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fp8serve.calibration.data import IGNORED, Batch
from fp8serve.calibration.measure import LOGIT_ROWS, LayerTally
from fp8serve.calibration.progress import Stages
from fp8serve.errors import ScalesError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.ops import dequantize, quantize
from fp8serve.fp8.served_attention import served_attention
from fp8serve.model.building import AnyModel, Model
from fp8serve.model.network.decoder import rotated
from fp8serve.model.network.encoder import Encoder
from fp8serve.model.network.rotary import Attend
from fp8serve.model.storage.memory import trim
from fp8serve.model.storage.shards import release_pages

Linears = Mapping[str, Linear]
Tap = Callable[[str, Tensor, Tensor], tuple[Tensor, Tensor]]  # (attention name, k, v) -> the k and v that are used
T = TypeVar("T")


def attention_names(decoder: Model) -> list[str]:
    return [f"model.layers.{i}.self_attn" for i in range(decoder.config.num_layers)]


def forward(decoder: Model, batch: Batch, tap: Tap | None = None) -> Tensor:
    """Hidden states [tokens, hidden]; sequences attend causally to themselves. `tap` sees and may replace k, v."""
    return decoder(batch.ids, batch.positions, attending(decoder, batch, tap))  # type: ignore[no-any-return]


def attending(decoder: Model, batch: Batch, tap: Tap | None = None) -> Attend:
    """How the tokens of a batch attend in the decoder's layers."""
    names = attention_names(decoder)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = tap(names[layer], k, v) if tap else (k, v)
        return served_attention(q, k, v, batch.lengths, *decoder.attention_options(layer))

    return rotated(attend)


def backward(decoder: Model, hidden: Tensor, targets: Tensor) -> None:
    """Gradients of the mean next-token cross entropy over the scored tokens, as in training, down to the embedding.

    `hidden` [tokens, hidden] must come from a pass inside `tracked`. A batch without scored tokens has no gradient.
    """
    scored = (targets != IGNORED).nonzero().squeeze(1)
    leaf = hidden.detach().requires_grad_()
    for rows in torch.split(scored, LOGIT_ROWS):
        loss = cross_entropy(decoder.logits(leaf[rows]), targets[rows], reduction="sum") / len(scored)
        loss.backward()  # type: ignore[no-untyped-call]
    if leaf.grad is not None:
        hidden.backward(leaf.grad)  # type: ignore[no-untyped-call]


@contextmanager
def tracked(decoder: Model) -> Iterator[None]:
    """Inside the context, activations have gradients although no weight has: the embedding's output requires them."""
    hook = decoder.embedding.register_forward_hook(lambda module, args, out: out.requires_grad_())
    try:
        with torch.enable_grad():
            yield
    finally:
        hook.remove()


@contextmanager
def hooks(linears: Mapping[str, nn.Module], make: Callable[[str], Callable[..., object]]) -> Iterator[None]:
    """Inside, every linear has the forward hook that `make` gives for its name."""
    handles = [linear.register_forward_hook(make(name)) for name, linear in linears.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def in_place(decoder: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Inside the context, these replace the model's modules of the same names."""
    before = {name: decoder.get_submodule(name) for name in modules}
    try:
        _put(decoder, modules)
        yield
    finally:
        _put(decoder, before)


def _put(decoder: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    for name, module in modules.items():
        decoder.set_submodule(name, module)


@contextmanager
def in_fp8(
    linears: Linears, freeze: Callable[[str, Linear], FrozenLinear], tallies: Mapping[str, LayerTally]
) -> Iterator[None]:
    """Inside the context, every linear gives its FP8 output, which is compared with the exact one for the same input.

    The frozen linear is made for one call and dropped: only one layer's FP8 weights exist at any time.
    """

    def make(name: str) -> Callable[..., Tensor]:
        def hook(linear: Linear, args: tuple[Tensor], exact: Tensor) -> Tensor:
            frozen = freeze(name, linear)
            got: Tensor = frozen(args[0])
            _add_input(tallies[name], frozen, args[0])
            tallies[name].add_output(exact, got)
            return got

        return hook

    with hooks(linears, make):
        yield


def _add_input(tally: LayerTally, linear: FrozenLinear, x: Tensor) -> None:
    rows = x.reshape(-1, x.shape[-1])
    if linear.input_spec.is_fp8:
        tally.add_input(rows, *linear.cast(rows))


@contextmanager
def against(
    linears: Mapping[str, FrozenLinear], references: Mapping[str, nn.Module], tallies: Mapping[str, LayerTally]
) -> Iterator[None]:
    """Inside, the output of every linear is compared with that of the reference of the same name on the same input."""

    def make(name: str) -> Callable[..., None]:
        def hook(linear: FrozenLinear, args: tuple[Tensor], got: Tensor) -> None:
            _add_input(tallies[name], linear, args[0])
            tallies[name].add_output(references[name](args[0]), got)

        return hook

    with hooks(linears, make):
        yield


def fp8_cache(scales: Mapping[str, Tensor]) -> Tap:
    """Keys and values as an FP8 cache would return them; `scales` by `<attention>.k` and `.v`."""

    def through(x: Tensor, scale: Tensor) -> Tensor:
        return dequantize(*quantize(x, scale=scale)).to(x.dtype)

    return lambda name, k, v: (through(k, scales[f"{name}.k"]), through(v, scales[f"{name}.v"]))


def blame(decoder: Model, linears: Linears, batch: Batch) -> ScalesError:
    """Rerun a batch whose result was not finite, and name the first tensor that is not finite."""
    results: list[str] = []

    def make(name: str) -> Callable[..., None]:
        def hook(linear: Linear, args: tuple[Tensor], out: Tensor) -> None:
            for role, tensor in (("input", args[0]), ("weight", linear.weight)):
                if not tensor.isfinite().all():
                    results.append(f"{name}.{role}")

        return hook

    with torch.no_grad(), hooks(linears, make):
        forward(decoder, batch)
    where = results[0] if results else "the final hidden state"
    return ScalesError(
        f"{where} holds NaN or infinite values in high precision already; the weights are damaged or overflow, "
        "so there is nothing to calibrate."
    )


class Stream:
    """A batch on its way through the model. `hidden`: its state so far, BF16 [tokens, hidden]."""

    def __init__(self, model: AnyModel, batch: Batch, tap: Tap | None = None) -> None:
        self._parts, self.batch = model.parts, batch
        self.hidden, self._arguments = _entered(model, batch, tap)

    def run(self, index: int) -> Tensor:
        """The layer's output for the hidden state, which is not changed."""
        layer: Callable[..., Tensor] = self._parts[index]
        return layer(self.hidden, *self._arguments(index))

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
