"""Forward and backward passes over flattened batches, as a whole or layer by layer, and forward hooks.

No gradient of a weight is computed here. Gradient calibration needs only the gradients of activations, so it needs no
memory beyond the activations of one batch. The loss is computed in slices of the logits, which also saves memory.

In layer-by-layer passes one layer runs over all batches before the next layer runs. So every weight is read from its
file only once, and a model larger than memory needs one pass over the disk. Memory holds the weights of one layer and
the hidden states of all batches, [tokens, hidden] in BF16. The results equal those of whole passes bit for bit. A model
of the transformers backend counts as a single layer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fp8serve.calibration.data import Batch, scored_rows
from fp8serve.calibration.measure import LOGITS_PER_SLICE, LayerTally
from fp8serve.calibration.progress import Stages
from fp8serve.errors import ScalesError
from fp8serve.fp8.attention import served_attention
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.ops.arithmetic import dequantize
from fp8serve.model.building import AnyModel, Model
from fp8serve.model.network.decoder import make_attend
from fp8serve.model.network.encoder import Encoder
from fp8serve.model.network.rotary import Attend
from fp8serve.model.storage.mapping import release_pages
from fp8serve.model.storage.memory import trim

Linears = Mapping[str, Linear]
KVHook = Callable[[str, Tensor, Tensor], tuple[Tensor, Tensor]]  # (attention name, k, v) -> the k and v to use
Loss = Callable[[Tensor, Tensor], Tensor]  # (logits, FP32 [rows, vocab], indices of the rows) -> FP32 []
T = TypeVar("T")


def attention_names(decoder: Model) -> list[str]:
    return [f"model.layers.{i}.self_attn" for i in range(decoder.config.num_layers)]


def forward(decoder: AnyModel, batch: Batch, kv_hook: KVHook | None = None) -> Tensor:
    """Returns the hidden states [tokens, hidden] of a batch. `kv_hook` can record or replace keys and values."""
    if isinstance(decoder, Encoder):
        return decoder(batch.ids, batch.lengths)  # type: ignore[no-any-return]
    return decoder(batch.ids, batch.positions, batch_attention(decoder, batch, kv_hook))  # type: ignore[no-any-return]


def batch_attention(decoder: Model, batch: Batch, kv_hook: KVHook | None = None) -> Attend:
    """Returns the causal attention function of a batch, within each sequence, for the decoder's layers."""
    names = attention_names(decoder)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = kv_hook(names[layer], k, v) if kv_hook else (k, v)
        return served_attention(q, k, v, batch.lengths, *decoder.attention_options(layer))

    return make_attend(attend)


def backward(decoder: Model, hidden: Tensor, targets: Tensor) -> None:
    """Backpropagates the mean cross entropy of the scored tokens to the embedding's output, as in training.

    `hidden` [tokens, hidden] must come from a pass inside `with_activation_gradients`. A batch without scored tokens
    has no gradient.
    """
    scored = scored_rows(targets)

    def loss(logits: Tensor, rows: Tensor) -> Tensor:
        return cross_entropy(logits, targets[rows], reduction="sum") / len(scored)

    backpropagate_loss(decoder, hidden, scored, loss)


def backpropagate_loss(decoder: Model, hidden: Tensor, scored: Tensor, loss: Loss) -> None:
    """Backpropagates the sum of `loss` over slices of the rows `scored` through the head and through `hidden`.

    `hidden.backward(gradient)` would spend most of a second on importing sympy.
    """
    leaf = hidden.detach().requires_grad_()
    with torch.enable_grad():
        for rows in torch.split(scored, LOGITS_PER_SLICE):
            loss(decoder.logits(leaf[rows]), rows).backward()  # type: ignore[no-untyped-call]
        if leaf.grad is not None:
            (hidden * leaf.grad).sum().backward()  # type: ignore[no-untyped-call]


@contextmanager
def with_activation_gradients(decoder: Model) -> Iterator[None]:
    """Inside the context, the embedding's output requires gradients: activations have gradients, weights have none."""
    hook = decoder.embedding.register_forward_hook(lambda module, args, out: out.requires_grad_())
    try:
        with torch.enable_grad():
            yield
    finally:
        hook.remove()


@contextmanager
def forward_hooks(linears: Mapping[str, nn.Module], hook: Callable[..., object]) -> Iterator[None]:
    """Inside the context, every linear calls hook(name, linear, arguments, output) after its forward pass."""
    handles = [linear.register_forward_hook(partial(hook, name)) for name, linear in linears.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replaced_modules(decoder: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Inside the context, `modules` replace the modules of `decoder` that have the same names."""
    original = {name: decoder.get_submodule(name) for name in modules}
    try:
        for name, module in modules.items():
            decoder.set_submodule(name, module)
        yield
    finally:
        for name, module in original.items():
            decoder.set_submodule(name, module)


def run_in_fp8(
    linears: Linears, freeze: Callable[[str, Linear], FrozenLinear], tallies: Mapping[str, LayerTally]
) -> AbstractContextManager[None]:
    """Inside the context, every linear returns its FP8 output, and `tallies` record the error against the exact output.

    `freeze` is called once per call of a linear, and its result is then released.
    """

    def hook(name: str, linear: Linear, args: tuple[Tensor], exact: Tensor) -> Tensor:
        frozen = freeze(name, linear)
        output: Tensor = frozen(args[0])
        _add_input(tallies[name], frozen, args[0])
        tallies[name].add_output(exact, output)
        return output

    return forward_hooks(linears, hook)


def _add_input(tally: LayerTally, linear: FrozenLinear, x: Tensor) -> None:
    rows = x.reshape(-1, x.shape[-1])
    if linear.input_spec.is_fp8:
        tally.add_input(rows, *linear.cast(rows))


def compare_with_reference(
    linears: Mapping[str, FrozenLinear], references: Mapping[str, nn.Module], tallies: Mapping[str, LayerTally]
) -> AbstractContextManager[None]:
    """Inside the context, `tallies` record the error of every linear against the reference of the same name."""

    def hook(name: str, linear: FrozenLinear, args: tuple[Tensor], output: Tensor) -> None:
        _add_input(tallies[name], linear, args[0])
        tallies[name].add_output(references[name](args[0]), output)

    return forward_hooks(linears, hook)


def fp8_cache(scales: Mapping[str, Tensor]) -> KVHook:
    """Returns a hook that replaces keys and values by the values that an FP8 KV cache would return.

    The names of `scales` are `<attention>.k` and `<attention>.v`.
    """

    def round_trip(x: Tensor, scale: Tensor) -> Tensor:
        q, _ = torch.ops.fp8serve.quantize(x, scale, torch.float8_e4m3fn)
        return dequantize(q, scale.reciprocal()).to(x.dtype)

    return lambda name, k, v: (round_trip(k, scales[f"{name}.k"]), round_trip(v, scales[f"{name}.v"]))


def nonfinite_error(decoder: AnyModel, linears: Linears, batch: Batch) -> ScalesError:
    """Runs a batch again, and returns an error that names the first tensor that is not finite."""
    nonfinite: list[str] = []

    def hook(name: str, linear: Linear, args: tuple[Tensor], out: Tensor) -> None:
        for role, tensor in (("input", args[0]), ("weight", linear.weight)):
            if not tensor.isfinite().all():
                nonfinite.append(f"{name}.{role}")

    with torch.no_grad(), forward_hooks(linears, hook):
        forward(decoder, batch)
    tensor = nonfinite[0] if nonfinite else "the final hidden state"
    return ScalesError(
        f"{tensor} has NaN or infinite values in high precision; the weights are damaged or overflow, "
        "so the model cannot be calibrated."
    )


class LayerwisePass:
    """The layer-by-layer pass of one batch; `hidden` is the output of the last layer so far, BF16 [tokens, hidden]."""

    def __init__(self, model: AnyModel, batch: Batch, kv_hook: KVHook | None = None) -> None:
        self._parts, self.batch = model.parts, batch
        self.hidden, self._arguments = _first_layer_input(model, batch, kv_hook)

    def run(self, index: int) -> Tensor:
        """Returns the output of a layer for `hidden`, which does not change."""
        layer: Callable[..., Tensor] = self._parts[index]
        return layer(self.hidden, *self._arguments(index))

    def advance(self, index: int) -> None:
        """Runs a layer and stores its output in `hidden`."""
        self.hidden = self.run(index)


def _first_layer_input(
    model: AnyModel, batch: Batch, kv_hook: KVHook | None
) -> tuple[Tensor, Callable[[int], tuple[Any, ...]]]:
    """Returns the input of the first layer, and a function that returns the other arguments of a layer."""
    if isinstance(model, Encoder):
        return model.embed(batch.ids, batch.lengths), lambda index: (batch.lengths,)
    hidden, attend = model.embed(batch.ids), batch_attention(model, batch, kv_hook)
    position_embeddings = model.position_embeddings(batch.positions, hidden.dtype)
    return hidden, lambda index: (position_embeddings[index], attend)


def layerwise_passes(decoder: AnyModel, batches: Sequence[Batch], kv_hook: KVHook | None = None) -> list[LayerwisePass]:
    return [LayerwisePass(decoder, batch, kv_hook) for batch in batches]


def layer_indices(decoder: AnyModel, stage: str, stages: Stages | None) -> Iterator[int]:
    """Yields the index of every layer; after each layer, releases its mapped pages and the freed memory.

    A weight that is a view of the file must therefore be replaced instead of written to: a write would be lost.
    """
    for index in (stages or Stages()).steps(stage, range(len(decoder.parts))):
        yield index
        _release(decoder.parts[index])
        trim()


def releasing_layers(decoder: Model) -> AbstractContextManager[None]:
    """Inside the context, whole passes release the mapped pages of every layer after its forward and backward pass."""

    def hook(name: str, layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        _release(layer)
        if args[0].requires_grad:
            args[0].register_hook(lambda gradient: _release(layer))  # type: ignore[no-untyped-call]

    return forward_hooks({str(index): layer for index, layer in enumerate(decoder.parts)}, hook)


def _release(layer: nn.Module) -> None:
    for parameter in layer.parameters():
        release_pages(parameter)


def release_weights(frozen: Mapping[str, FrozenLinear]) -> None:
    """Releases the mapped pages of FP8 weights; the next access reads the pages from the file again."""
    for layer in frozen.values():
        release_pages(layer.weight_q)


def entries_of_layer(decoder: AnyModel, index: int, entries: Mapping[str, T]) -> dict[str, T]:
    """Returns the entries of one layer from a mapping whose keys are names of tensors or modules."""
    return {name: entries[name] for name in decoder.names_in_part(index, entries)}
