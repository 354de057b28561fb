"""Forward and backward passes of a whole decoder over flattened batches, and the hooks that look inside.

No gradient of a weight is ever computed here: gradient calibration needs only the gradients of activations, so it takes
no memory beyond the activations of one batch. For the same reason the loss is computed in slices of the logits.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fp8serve.errors import ScalesError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.ops import dequantize, quantize
from fp8serve.fp8.served_attention import served_attention
from fp8serve.model.building import Model
from fp8serve.model.network.decoder import Attend, rotated

from .data import IGNORED, Batch
from .measure import LOGIT_ROWS, LayerTally

Linears = Mapping[str, Linear]
Tap = Callable[[str, Tensor, Tensor], tuple[Tensor, Tensor]]  # (attention name, k, v) -> the k and v that are used


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
    found: list[str] = []

    def make(name: str) -> Callable[..., None]:
        def hook(linear: Linear, args: tuple[Tensor], out: Tensor) -> None:
            for role, tensor in (("input", args[0]), ("weight", linear.weight)):
                if not tensor.isfinite().all():
                    found.append(f"{name}.{role}")

        return hook

    with torch.no_grad(), hooks(linears, make):
        forward(decoder, batch)
    where = found[0] if found else "the final hidden state"
    return ScalesError(
        f"{where} holds NaN or infinite values in high precision already; the weights are damaged or overflow, "
        "so there is nothing to calibrate."
    )
