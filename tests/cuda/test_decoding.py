"""Decoding and training on a GPU with torch alone, without files. On the CPU the tests prove themselves."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("numpy")

from fp8serve.engine import runner
from fp8serve.engine.graphs import CudaCapture
from fp8serve.engine.kv_cache import BlockPool
from fp8serve.engine.request import Request
from fp8serve.engine.runner import KvScale, Runner
from fp8serve.engine.sampler import sample
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.engine.scheduler import Scheduler
from fp8serve.engine.sequence import Sequence
from fp8serve.fp8 import elementwise
from fp8serve.fp8 import frozen as frozen_layers
from fp8serve.fp8.attention import causal_attention
from fp8serve.fp8.autocast import autocast
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.linear import convert
from fp8serve.fp8.ops import backends
from fp8serve.fp8.recipe import DelayedScaling, from_name
from fp8serve.model.config.decoder import parse_config
from fp8serve.model.network.decoder import Decoder, rotated
from tests.cuda import emulated
from tests.cuda.conftest import on_both

pytestmark = on_both
SIZES = {"vocab_size": 320, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 64}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, **SIZES,
}  # fmt: skip
PROMPTS = [list(range(3, 40)), [7, 8, 9], [300] * 20]
# Attention on a GPU multiplies BF16 weights. So does the CPU where it has BF16 units; elsewhere it keeps them in FP32,
# and from there on other FP8 values flip.
MOST_NOISE = 10**-2.5 if "bf16" in backends()["paged_attention"] else 10**-2


def model(dtype: torch.dtype = torch.bfloat16) -> Decoder:
    made = Decoder(parse_config(CONFIG), dtype=dtype)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            spread = 0.1 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=noise) * spread + (parameter.dim() == 1))
    return made


def frozen(device: str, recipe: str) -> Decoder:
    """FP8 weights, made on the CPU."""
    made, how = model().requires_grad_(False), from_name(recipe)
    assert how is not None
    for name in made.linear_names():
        parent, _, child = name.rpartition(".")
        layer = FrozenLinear.from_linear(made.get_submodule(name), how)  # type: ignore[arg-type]
        setattr(made.get_submodule(parent), child, layer)
    return made.to(device)


class Tiny:
    """An engine without its surroundings."""

    def __init__(
        self, device: str, recipe: str = "rowwise", cache: torch.dtype = torch.bfloat16, budget: int = 64
    ) -> None:
        """`budget`: tokens in a step; with 64 every prompt is whole in the first."""
        decoder, one = frozen(device, recipe), torch.ones((), device=device)
        decoder.join()
        scales = [KvScale(8 * one, 8 * one, one / 8, one / 8)] * 2 if cache.itemsize == 1 else None
        self.runner = Runner(decoder, 40, 16, cache, scales)
        self.budget = budget
        self.logits: list[Tensor] = []

    def generate(self, tokens: int, **params: Any) -> list[list[int]]:
        scheduler = Scheduler(BlockPool(40, 16), 4, self.budget, self.budget)
        wanted = SamplingParams(max_new_tokens=tokens, seed=1, **params)
        seqs = [Sequence.of(Request(str(i), tuple(prompt), wanted)) for i, prompt in enumerate(PROMPTS)]
        for seq in seqs:
            scheduler.add(seq)
        while scheduler.has_work():
            work = scheduler.schedule()
            logits = self.runner.run(work)
            self.logits.append(logits.cpu().clone())
            scheduler.advance(work)
            chosen = sample(logits, [item.seq for item in work if item.samples], ())
            for item, sampled in zip([item for item in work if item.samples], chosen, strict=True):
                assert sampled.token_id is not None
                item.seq.token_ids.append(sampled.token_id)
                if item.seq.num_generated == tokens:
                    scheduler.finish(item.seq, "length")
        return [seq.token_ids[seq.num_prompt :] for seq in seqs]


@pytest.mark.parametrize("recipe", ["rowwise", "block"])
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_logits_are_close_to_the_cpus(device: str, recipe: str, cache: torch.dtype) -> None:
    """Of the prompts, whose tokens are given; in dB, as layers are judged. Where roundings differ, FP8 values flip."""
    there, here = Tiny(device, recipe, cache), Tiny("cpu", recipe, cache)
    for engine in (there, here):
        engine.generate(1, temperature=0.0)
    for found, expected in zip(there.logits, here.logits, strict=True):
        assert noise(found, expected) <= MOST_NOISE


def noise(found: Tensor, expected: Tensor) -> float:
    """Its power, as a share of the signal's."""
    expected = expected.double()
    return float((found.double() - expected).square().sum() / expected.square().sum().clamp(min=1e-300))


def on_emulated_kernels(monkeypatch: pytest.MonkeyPatch, but: str = "") -> None:
    """The ops of a decoding step, `but` one, taken by the CUDA kernels on the emulated GPU."""
    if emulated.COMPILER is None:
        pytest.skip("no C++ compiler")
    kernels = emulated.ops()
    taken = {
        frozen_layers: ("norm rms_norm", "norm_quantize rms_norm_quantize", "silu_mul silu_mul", "quantize quantize",
                        "silu_mul_quantize silu_mul_quantize", "quantize_watched quantize_watched",
                        "scaled_mm scaled_mm", "scaled_mm_add scaled_mm_add", "watched_mm_add watched_mm_add"),
        elementwise: ("rms_norm rms_norm",),
        runner: ("rotary_write_kv rotary_write_kv", "paged_attention paged_attention"),
    }  # fmt: skip
    for module, names in taken.items():
        for name, op in (pair.split() for pair in names if pair.split()[1] != but):
            monkeypatch.setattr(module, f"_{name}", getattr(kernels, op).default)
    monkeypatch.setattr(frozen_layers, "_is_on_gpu", lambda x: True)


@pytest.mark.emulator
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_the_kernels_make_a_decoder(device: str, cache: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk after which nobody samples, the ends of prompts beside others' beginnings, a decoding step; by row, so
    that plain norms and activations run, too."""
    expected = Tiny("cpu", cache=cache, budget=24)
    expected.generate(2, temperature=0.0)
    if device == "cpu":
        on_emulated_kernels(monkeypatch)
    found = Tiny(device, cache=cache, budget=24)
    found.generate(2, temperature=0.0)
    assert [len(logits) for logits in found.logits] == [0, 2, 3, 1]
    for one, other in zip(found.logits, expected.logits, strict=True):
        assert noise(one, other) <= MOST_NOISE


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_replayed_decoding_has_the_same_bits(device: str, cache: torch.dtype) -> None:
    plain, replayed = Tiny(device, cache=cache), Tiny(device, cache=cache)
    capture = CudaCapture(torch.device(device)) if device == "cuda" else lambda run: run
    replayed.runner.use_graphs(capture, 4, 512)
    sampling: dict[str, Any] = {"top_p": 0.9, "repetition_penalty": 1.1}
    assert replayed.generate(12, **sampling) == plain.generate(12, **sampling)
    for found, expected in zip(replayed.logits, plain.logits, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "block"])
def test_gradients_are_close_to_the_cpus(device: str, recipe: str) -> None:
    """Two steps, so that delayed scales are those of the first."""
    there, here = (gradients(place, recipe) for place in (device, "cpu"))
    for name, expected in here.items():
        assert (there[name] - expected).norm() <= 0.15 * expected.norm(), name


def gradients(device: str, recipe: str) -> dict[str, Tensor]:
    decoder = convert(model(torch.float32)).to(device, torch.bfloat16)
    how = DelayedScaling(amax_history_len=4) if recipe == "delayed" else from_name(recipe)
    tokens = torch.tensor(PROMPTS[0] + PROMPTS[2], device=device)
    lengths = [len(PROMPTS[0]), len(PROMPTS[2])]
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    for _ in range(2):
        decoder.zero_grad()
        with autocast(recipe=how):
            attend = rotated(lambda layer, q, k, v: causal_attention(q, k, v, lengths, 64**-0.5))
            hidden = decoder(tokens, positions, attend)
            logits = decoder.logits(hidden)  # type: ignore[operator]
        torch.nn.functional.cross_entropy(logits, tokens.roll(-1)).backward()
    return {name: p.grad.detach().double().cpu() for name, p in decoder.named_parameters() if p.grad is not None}
