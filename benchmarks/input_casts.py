"""The loss of accuracy by casting only the inputs of linear layers: weights stay as they are, all is computed in FP32.

    python benchmarks/input_casts.py MODEL TEXT.jsonl [--samples 8] [--seq-len 512]

Each row casts the input of every linear layer to E4M3 and back in one way, and shows the KL divergence from the model
without casts. "mantissa" rounds to E4M3's four significant bits at any exponent, so no value is too large or too small.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fp8serve.calibration.data import Batch, load_samples, make_batches
from fp8serve.calibration.measure import TokenTally, add_logits
from fp8serve.calibration.passes import forward
from fp8serve.calibration.result import Quality
from fp8serve.model.checkpoint import load_servable
from fp8serve.model.network.decoder import Decoder
from fp8serve.model.text.tokenizer import Tokenizer

E4M3, LARGEST = torch.float8_e4m3fn, 448
Cast = Callable[[Tensor, float], Tensor]  # (input [tokens, K], the largest magnitude that it ever has) -> like input


def quantized(x: Tensor, amax: Tensor, power_2: bool) -> Tensor:
    scale = LARGEST / amax.clamp_min(1e-12)
    scale = scale.log2().floor().exp2() if power_2 else scale
    return (x * scale).clamp(-LARGEST, LARGEST).to(E4M3).float() / scale


def mantissa(x: Tensor, amax: float) -> Tensor:
    fraction, exponent = torch.frexp(x)
    return torch.ldexp((fraction * 16).round() / 16, exponent)


def per_tensor(power_2: bool) -> Cast:
    return lambda x, amax: quantized(x, torch.tensor(amax), power_2)


def per_token(power_2: bool) -> Cast:
    return lambda x, amax: quantized(x, x.abs().amax(-1, keepdim=True), power_2)


def per_block(power_2: bool) -> Cast:
    def cast(x: Tensor, amax: float) -> Tensor:
        blocks = pad(x, (0, -x.shape[-1] % 128)).unflatten(-1, (-1, 128))
        return quantized(blocks, blocks.abs().amax(-1, keepdim=True), power_2).flatten(-2)[..., : x.shape[-1]]

    return cast


CASTS: dict[str, Cast] = {
    "mantissa": mantissa,
    "per tensor": per_tensor(False),
    "per tensor, powers of two": per_tensor(True),
    "per token": per_token(False),
    "per token, powers of two": per_token(True),
    "per 1x128": per_block(False),
    "per 1x128, powers of two": per_block(True),
}


@contextmanager
def inputs(linears: Mapping[str, nn.Module], change: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Inside the block, every linear reads change(its name, its input) in place of its input."""
    handles = [
        linear.register_forward_pre_hook(lambda module, args, name=name: (change(name, args[0]),))
        for name, linear in linears.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def largest(linears: Mapping[str, nn.Module], decoder: Decoder, batches: list[Batch]) -> dict[str, float]:
    """Returns the largest magnitude in the inputs of each linear over all batches."""
    amaxes_by_linear = dict.fromkeys(linears, 0.0)

    def record_amax(name: str, x: Tensor) -> Tensor:
        amaxes_by_linear[name] = max(amaxes_by_linear[name], float(x.abs().max()))
        return x

    with inputs(linears, record_amax):
        for batch in batches:
            forward(decoder, batch)
    return amaxes_by_linear


def cost(cast: Cast, amaxes: Mapping[str, float], decoder: Decoder, batches: list[Batch]) -> Quality:
    """Returns the quality of the model whose inputs are cast, compared with that of the model without casts."""
    linears, tally = {name: decoder.get_submodule(name) for name in amaxes}, TokenTally()
    for batch in batches:
        exact = forward(decoder, batch)
        with inputs(linears, lambda name, x: cast(x, amaxes[name])):
            hidden = forward(decoder, batch)
        add_logits(tally, batch.targets, (decoder, hidden), (decoder, exact))
    return tally.quality(compared=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=512)
    options = parser.parse_args()
    decoder = load_servable(options.model, "bf16", dtype=torch.float32)
    samples = load_samples(
        [options.text], Tokenizer.from_dir(options.model), decoder.config.vocab_size,
        count=options.samples, seq_len=options.seq_len, seed=0,
    )  # fmt: skip
    batches = make_batches(samples, 4)
    amaxes = largest({name: decoder.get_submodule(name) for name in decoder.linear_names()}, decoder, batches)
    for name, cast in CASTS.items():
        quality = cost(cast, amaxes, decoder, batches)
        assert quality.reference_perplexity is not None
        percent = 100 * (quality.perplexity / quality.reference_perplexity - 1)
        same = f"same top token {quality.top1_agreement:.1%}"
        print(f"{name:26} KL {quality.kl_divergence:.4f}  perplexity {percent:+.2f} %  {same}", flush=True)


if __name__ == "__main__":
    main()
