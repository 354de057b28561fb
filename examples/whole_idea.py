"""The whole idea of fp8serve in one file: calibrate, serve, fine-tune in FP8, and serve with the scales of training.

Plain PyTorch, and four of the library's ops: `quantize`, `quantize_transpose`, `scaled_mm` and `delayed_update`. A
network that predicts the next character of a text stands for the language model. It runs in well under a minute:

    python examples/whole_idea.py

FP8 has 256 values, from -448 to 448 in E4M3. To use them well, a tensor is multiplied by a *scale* before it is cast,
and divided by it afterwards. The best scale is 448 / amax, where amax is the largest magnitude in the tensor, but to
know amax means to read the tensor before it is cast. *Delayed scaling* reads it once: it casts with the scale of
earlier steps, records the amax on the way, and computes the next scale from the history of amaxes. The scale and the
history are all its state. This file takes that state through four stages:

    calibrate  the model computes in high precision, and amaxes are noted: the first scales
    serve      the scales do not change; the weights are stored in FP8
    fine-tune  every step casts with the scales so far, and updates them at its end
    serve      the scales from the end of training are used; nothing is calibrated again
"""

from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fp8serve.fp8.ops  # noqa: F401 - importing it registers the ops with torch

ops: Any = torch.ops.fp8serve
E4M3 = torch.float8_e4m3fn  # for inputs and weights: 4 bits of exponent, 3 of mantissa, up to 448
E5M2 = torch.float8_e5m2  # for gradients, which need range more than precision: up to 57344
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


# -- the state of one tensor ------------------------------------------------------------------------------------------


class Scaling:
    """The delayed-scaling state of one tensor: its scale, and the largest magnitudes of the last steps.

    Slot 0 of `history` collects the current step; 1 is the oldest step and the last slot the newest.
    """

    def __init__(self, dtype: torch.dtype, length: int = 16) -> None:
        self.dtype = dtype
        self.scale = torch.ones(())  # x * scale is cast: it multiplies to quantize
        self.history = torch.zeros(length)
        self.dropped = torch.zeros((), dtype=torch.int64)  # steps whose amax was not finite; they change no scale
        self.steps = torch.zeros((), dtype=torch.int64)

    def note(self, amax: Tensor) -> None:
        """Stage an amax; the scale does not change before the step ends."""
        self.history[0] = torch.maximum(self.history[0], amax)

    def cast(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [M, K] in FP8, and transposed [K, M], with one read of x. Values beyond the range become the largest."""
        q, q_transposed, amax = ops.quantize_transpose(x, self.scale, self.dtype)
        self.note(amax)
        return q, q_transposed

    @property
    def inverse(self) -> Tensor:
        """The factor that dequantizes."""
        return self.scale.reciprocal()


def update(states: list[Scaling], margin: int = 0) -> None:
    """The end of a step, for all states at once: scale = (largest / 2^margin) / max(history); then histories rotate."""
    ops.delayed_update(
        [s.scale for s in states],
        [s.history for s in states],
        [s.dropped for s in states],
        [s.steps for s in states],
        [LARGEST[s.dtype] for s in states],
        margin,
        1,  # a new scale at every step
        "max",
    )


# -- a linear layer ----------------------------------------------------------------------------------------------------


class Fp8Product(torch.autograd.Function):
    """Y = X W^T with all three of its matrix products in FP8, accumulated in FP32.

    `scaled_mm(a, b, ...)` is a b^T: it reads both operands along rows, so that the dimension that is summed lies
    contiguous. That is why each tensor is cast and transposed at once: each takes part in two products, one along its
    rows and one along its columns.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: "Fp8Linear") -> Tensor:
        x8, x8_transposed = layer.states["input"].cast(x)
        w8, w8_transposed = layer.states["weight"].cast(weight)
        # The backward pass must use the scales that these data were cast with, and the step's end changes scales in
        # place; `reciprocal` makes tensors of their own.
        x_inverse, w_inverse = layer.states["input"].inverse, layer.states["weight"].inverse
        ctx.save_for_backward(x8_transposed, w8_transposed, x_inverse, w_inverse)  # one byte for each element of x
        ctx.layer = layer
        return ops.scaled_mm(x8, w8, x_inverse, w_inverse, None, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (dy,) = grads
        x8_transposed, w8_transposed, x_inverse, w_inverse = ctx.saved_tensors
        state = ctx.layer.states["grad_output"]
        dy8, dy8_transposed = state.cast(dy)
        dx = ops.scaled_mm(dy8, w8_transposed, state.inverse, w_inverse, None, dy.dtype)  # dY W
        dw = ops.scaled_mm(dy8_transposed, x8_transposed, state.inverse, x_inverse, None, dy.dtype)  # dY^T X
        return dx, dw, None


class Fp8Linear(nn.Linear):
    """A linear layer without bias that computes in high precision, in high precision while it records amaxes, or in
    FP8."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.states = {"input": Scaling(E4M3), "weight": Scaling(E4M3), "grad_output": Scaling(E5M2)}
        self.mode = "high precision"

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "fp8":
            return Fp8Product.apply(x, self.weight, self)  # type: ignore[no-untyped-call, no-any-return]
        if self.mode == "calibrate":
            self.states["input"].note(x.detach().abs().amax())
            self.states["weight"].note(self.weight.detach().abs().amax())
        return super().forward(x)


class ServedLinear(nn.Module):
    """The layer in a server: a weight of one byte per element, two fixed scales, no gradient and no history."""

    def __init__(self, weight: Tensor, weight_scale: Tensor, input_scale: Tensor) -> None:
        super().__init__()
        self.weight, _ = ops.quantize(weight, weight_scale, E4M3)
        self.weight_inverse, self.input_scale = weight_scale.reciprocal(), input_scale

    def forward(self, x: Tensor) -> Tensor:
        x8, _ = ops.quantize(x, self.input_scale, E4M3)
        return ops.scaled_mm(x8, self.weight, self.input_scale.reciprocal(), self.weight_inverse, None, x.dtype)


# -- the model ---------------------------------------------------------------------------------------------------------

CONTEXT, WIDTH, HIDDEN, BATCH = 16, 16, 192, 192


class Network(nn.Module):
    """The next character from the CONTEXT before it. The first and the last layer stay in high precision, as they do in
    the library: they are small, and an error there costs most."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, WIDTH)
        self.up = Fp8Linear(CONTEXT * WIDTH, HIDDEN)
        self.down = Fp8Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, characters)

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [M, CONTEXT] -> logits FP32 [M, characters]."""
        x = self.embedding(ids).flatten(1)
        x = torch.nn.functional.gelu(self.up(x))
        x = torch.nn.functional.gelu(self.down(x))
        return self.head(x)  # type: ignore[no-any-return]

    def fp8_layers(self) -> dict[str, Fp8Linear]:
        return {name: layer for name, layer in self.named_modules() if isinstance(layer, Fp8Linear)}

    def switch(self, mode: str) -> None:
        for layer in self.fp8_layers().values():
            layer.mode = mode

    def states(self, *names: str) -> list[Scaling]:
        return [layer.states[name] for layer in self.fp8_layers().values() for name in names]


# -- text --------------------------------------------------------------------------------------------------------------


class Text:
    """A text as examples: CONTEXT characters, and the one that follows."""

    def __init__(self, text: str, alphabet: str) -> None:
        numbers = {character: number for number, character in enumerate(alphabet)}
        self.ids = torch.tensor([numbers[character] for character in text])

    def batch(self, size: int, noise: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.ids) - CONTEXT, (size,), generator=noise)
        windows = self.ids[starts[:, None] + torch.arange(CONTEXT + 1)]
        return windows[:, :-1], windows[:, -1]


def loss_of(model: nn.Module, ids: Tensor, following: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(model(ids), following)


@torch.no_grad()
def measured(model: nn.Module, text: Text) -> float:
    """The loss on 4,096 examples, which are the same in every call."""
    return float(loss_of(model, *text.batch(4096, torch.Generator().manual_seed(99))))


# -- the four stages ---------------------------------------------------------------------------------------------------


def train(model: Network, text: Text, steps: int, rate: float) -> Iterator[float]:
    """The loss of each step. A step ends with the update of every scale, independently of the optimizer; in high
    precision no amax was recorded, so the update changes nothing."""
    optimizer, noise = torch.optim.AdamW(model.parameters(), lr=rate), torch.Generator().manual_seed(1)
    for _ in range(steps):
        loss = loss_of(model, *text.batch(BATCH, noise))
        loss.backward()  # type: ignore[no-untyped-call]
        update(model.states("input", "weight", "grad_output"))
        optimizer.step()
        optimizer.zero_grad()
        yield float(loss.detach())


@torch.no_grad()
def calibrate(model: Network, text: Text, batches: int = 8) -> None:
    """Record amaxes over some batches, and compute the first scales. The outputs of the model do not change."""
    model.switch("calibrate")
    noise = torch.Generator().manual_seed(2)
    for _ in range(batches):
        model(text.batch(BATCH, noise)[0])
        update(model.states("input", "weight"))


def save(model: Network, path: Path) -> None:
    """Weights, scales and histories: all that the next stage needs."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, layer in model.fp8_layers().items():
        for role, state in layer.states.items():
            tensors |= {f"{name}.{role}.scale": state.scale, f"{name}.{role}.history": state.history}
    save_file(tensors, path)


def served(path: Path, characters: int) -> Network:
    """The model as a server loads it: FP8 weights, and the scales of the file."""
    tensors = load_file(path)
    model = Network(characters)
    model.load_state_dict({name: value for name, value in tensors.items() if name in model.state_dict()})
    for name in model.fp8_layers():
        scales = tensors[f"{name}.weight.scale"], tensors[f"{name}.input.scale"]
        setattr(model, name, ServedLinear(tensors[f"{name}.weight"], *scales))
    return model.eval()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # such small products are not worth a second thread
    pages = [text for _, text in sorted(topics.items())]  # the language reference, which every Python carries
    alphabet = "".join(sorted(set("".join(pages))))
    known, new = Text("".join(pages[:20]), alphabet), Text("".join(pages[20:40]), alphabet)

    model = Network(len(alphabet))
    for _ in train(model, known, steps=200, rate=3e-3):
        pass
    print(f"a model in high precision      loss {measured(model, known):.4f}")

    with TemporaryDirectory() as folder:
        calibrate(model, known)
        save(model, Path(folder, "calibrated"))
        in_fp8 = served(Path(folder, "calibrated"), len(alphabet))
        print(f"calibrated, served in FP8      loss {measured(in_fp8, known):.4f}")
        print(f"  the scale of up's input      {float(model.up.states['input'].scale):.2f}")

        print(f"on a new text                  loss {measured(in_fp8, new):.4f}")
        model.switch("fp8")  # from here on every product of these layers is FP8, forwards and backwards
        for _ in train(model, new, steps=150, rate=1e-3):
            pass
        save(model, Path(folder, "tuned"))
        tuned = served(Path(folder, "tuned"), len(alphabet))
        print(f"fine-tuned and served in FP8   loss {measured(tuned, new):.4f}")
        print(f"  the scale of up's input      {float(model.up.states['input'].scale):.2f}, kept by training")

        ids, _ = new.batch(64, torch.Generator().manual_seed(3))
        with torch.no_grad():
            same = torch.equal(model(ids), tuned(ids))
        print(f"what was trained is what is served: {'the same bits' if same else 'other bits'}")


if __name__ == "__main__":
    main()
