"""Decoding and training on a GPU that has only torch, without model files. Runs on a CPU, too, to test the tests."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("numpy")
pytest.importorskip("annotated_types")

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
from fp8serve.fp8 import linear as linear_layers
from fp8serve.fp8.attention import causal_attention
from fp8serve.fp8.autocast import autocast
from fp8serve.fp8.conversion import convert
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.ops import reference
from fp8serve.fp8.recipe import DelayedScaling, from_name
from fp8serve.model.config.decoder import parse_config
from fp8serve.model.network.decoder import Decoder, make_attend
from tests.cuda import emulated, hopper
from tests.cuda.conftest import on_both

SIZES = {"vocab_size": 320, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 64}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, **SIZES,
}  # fmt: skip
PROMPTS = [list(range(3, 40)), [7, 8, 9], [300] * 20]
# If sums are rounded differently, some FP8 values change, and the noise of the result is another sample of the same
# distribution. Its size, measured against the BF16 model, must not exceed that of the CPU's FP8 result by more than
# these ratios. A single parameter has as few as 64 elements, so its ratio is less certain.
MORE_NOISE = 1.25  # ratio of the noise power of logits, and of the RMS noise of all gradients together
MORE_NOISE_OF_ONE = 1.5  # ratio of the RMS noise of the gradient of one parameter


def model(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Decoder:
    decoder = Decoder(parse_config(CONFIG), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            spread = 0.1 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread + (parameter.dim() == 1))
    return decoder


def frozen(device: str, recipe: str, seed: int) -> Decoder:
    """Returns a decoder with FP8 weights, which are quantized on the CPU."""
    decoder, chosen = model(seed=seed).requires_grad_(False), from_name(recipe)
    assert chosen is not None
    for name in decoder.linear_names():
        parent, _, child = name.rpartition(".")
        layer = FrozenLinear.from_linear(decoder.get_submodule(name), chosen)  # type: ignore[arg-type]
        setattr(decoder.get_submodule(parent), child, layer)
    return decoder.to(device)


class Tiny:
    """A minimal engine: runner, scheduler and sampler, without files and processes."""

    def __init__(
        self,
        device: str,
        recipe: str | None = "rowwise",
        cache: torch.dtype = torch.bfloat16,
        budget: int = 64,
        seed: int = 0,
    ) -> None:
        """`recipe` is None for the BF16 model. `budget` is tokens in a step; 64 tokens fit all prompts in one step."""
        one = torch.ones((), device=device)
        decoder = frozen(device, recipe, seed) if recipe else model(seed=seed).requires_grad_(False).to(device)
        decoder.join()
        scales = [KvScale(8 * one, 8 * one, one / 8, one / 8)] * 2 if cache.itemsize == 1 else None
        self.runner = Runner(decoder, 40, 16, cache, scales)
        self.budget, self.seed = budget, seed
        self.logits: list[Tensor] = []

    def generate(self, tokens: int, script: list[list[int]] | None = None, **params: Any) -> list[list[int]]:
        """Returns the tokens generated for each prompt. If `script` has tokens, they replace the sampled ones."""
        scheduler = Scheduler(BlockPool(40, 16), 4, self.budget, self.budget)
        params_of_all = SamplingParams(max_new_tokens=tokens, seed=1, **params)
        seqs = [Sequence.of(Request(str(i), tuple(prompt), params_of_all)) for i, prompt in enumerate(PROMPTS)]
        for seq in seqs:
            scheduler.add(seq)
        while scheduler.has_work():
            work = scheduler.schedule()
            logits = self.runner.run(work)
            self.logits.append(logits.cpu().clone())
            scheduler.launch(work)
            scheduler.advance(work)
            chosen = sample(logits, [item.seq for item in work if item.needs_sample], ())
            for item, sampled in zip([item for item in work if item.needs_sample], chosen, strict=True):
                assert sampled.token_id is not None
                index = item.seq.num_generated
                token_id = script[seqs.index(item.seq)][index] if script else sampled.token_id
                item.seq.token_ids.append(token_id)
                if item.seq.num_generated == tokens:
                    scheduler.finish(item.seq, "length")
        return [seq.token_ids[seq.num_prompt :] for seq in seqs]


def assert_no_noisier(*runs: tuple[Tiny, Tiny, list[list[int]]]) -> None:
    """Checks that logits on the device are not much noisier than those on the CPU, compared with the BF16 model.

    Each argument is (engine on the device, engine on the CPU, the tokens that the CPU has generated). A few rows of one
    model are not enough for a ratio; on an H200, six models had ratios from 0.90 to 1.11.
    """
    logits: list[tuple[Tensor, Tensor, Tensor]] = []
    for there, here, tokens in runs:
        exact = Tiny("cpu", None, budget=here.budget, seed=here.seed)
        for engine in (there, exact):
            engine.generate(len(tokens[0]), tokens, temperature=0.0)
        assert [len(rows) for rows in there.logits] == [len(rows) for rows in here.logits]
        logits.append((torch.cat(there.logits), torch.cat(here.logits), torch.cat(exact.logits)))
    device_logits, cpu_logits, truth = map(torch.cat, zip(*logits, strict=True))
    assert noise(device_logits, truth) <= MORE_NOISE * noise(cpu_logits, truth)


LOGITS = pytest.mark.parametrize(
    ("recipe", "cache"),
    [(recipe, cache) for recipe in ("rowwise", "block") for cache in (torch.bfloat16, torch.float8_e4m3fn)],
    ids=str,
)


@on_both
@LOGITS
def test_logits_are_as_accurate_as_on_the_cpu(device: str, recipe: str, cache: torch.dtype) -> None:
    here = Tiny("cpu", recipe, cache)
    tokens = here.generate(1, temperature=0.0)
    assert_no_noisier((Tiny(device, recipe, cache), here, tokens))


Product = Callable[..., Tensor]


def multiply_by(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes all layers use another function for scaled_mm, in training and in inference."""

    def add(*arguments: Any) -> Tensor:
        *operands, residual = arguments
        return residual + product(*operands, residual.dtype)  # type: ignore[no-any-return]

    monkeypatch.setattr(linear_layers, "_scaled_mm", product)
    monkeypatch.setattr(frozen_layers, "_scaled_mm", product)
    monkeypatch.setattr(frozen_layers, "_scaled_mm_add", add)


def without_a_block(a: Tensor, *others: Any) -> Tensor:
    a = a.clone()
    a[:, :128] = 0
    return reference.scaled_mm(a, *others)  # type: ignore[no-any-return]


@LOGITS
def test_logits_with_hoppers_sums_are_accepted_and_wrong_ones_are_not(
    recipe: str, cache: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Tiny("cpu", recipe, cache)
    tokens = here.generate(1, temperature=0.0)
    multiply_by(hopper.scaled_mm, monkeypatch)
    assert_no_noisier((Tiny("cpu", recipe, cache), here, tokens))
    multiply_by(without_a_block, monkeypatch)
    with pytest.raises(AssertionError):
        assert_no_noisier((Tiny("cpu", recipe, cache), here, tokens))


def noise(actual: Tensor, expected: Tensor) -> float:
    """Returns the power of `actual - expected`, relative to the power of `expected`."""
    expected = expected.double()
    return float((actual.double() - expected).square().sum() / expected.square().sum().clamp(min=1e-300))


def on_emulated_kernels(monkeypatch: pytest.MonkeyPatch, but: str = "") -> None:
    """Makes the CUDA kernels on the emulated GPU compute all ops of a decoding step, except the op `but`."""
    if emulated.COMPILER is None:
        pytest.skip("no C++ compiler")
    kernels = emulated.ops()
    names_by_module = {
        frozen_layers: ("norm rms_norm", "norm_quantize rms_norm_quantize", "silu_mul silu_mul", "quantize quantize",
                        "silu_mul_quantize silu_mul_quantize", "quantize_watched quantize_watched",
                        "scaled_mm scaled_mm", "stored_mm stored_mm",
                        "stored_gated_mm stored_gated_mm", "scaled_mm_add scaled_mm_add",
                        "watched_mm_add watched_mm_add"),
        elementwise: ("rms_norm rms_norm",),
        runner: ("rotary_write_kv rotary_write_kv", "stored_rotary_mm stored_rotary_mm",
                 "paged_attention paged_attention"),
    }  # fmt: skip
    for module, names in names_by_module.items():
        for name, op in (pair.split() for pair in names if pair.split()[1] != but):
            monkeypatch.setattr(module, f"_{name}", getattr(kernels, op).default)
    monkeypatch.setattr(frozen_layers, "_is_on_gpu", lambda x: True)


@on_both
@pytest.mark.emulator
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_decoder_on_the_cuda_kernels_is_as_accurate_as_on_the_cpu(
    device: str, cache: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps are a chunk without sampling, two steps with ends and beginnings of prompts, and a decoding step. The
    recipe is rowwise, so that norms and activations without a cast run, too."""
    all_here = [Tiny("cpu", cache=cache, budget=24, seed=seed) for seed in range(3)]
    tokens = [here.generate(2, temperature=0.0) for here in all_here]
    assert [len(logits) for logits in all_here[0].logits] == [0, 2, 3, 1]
    if device == "cpu":
        on_emulated_kernels(monkeypatch)
    all_there = [Tiny(device, cache=cache, budget=24, seed=here.seed) for here in all_here]
    assert_no_noisier(*zip(all_there, all_here, tokens, strict=True))


@on_both
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_replayed_decoding_has_the_same_bits(device: str, cache: torch.dtype) -> None:
    plain, replayed = Tiny(device, cache=cache), Tiny(device, cache=cache)
    capture = CudaCapture(torch.device(device)) if device == "cuda" else lambda run: run
    replayed.runner.use_graphs(capture, 4, 512)
    sampling: dict[str, Any] = {"top_p": 0.9, "repetition_penalty": 1.1}
    assert replayed.generate(12, **sampling) == plain.generate(12, **sampling)
    for actual, expected in zip(replayed.logits, plain.logits, strict=True):
        assert torch.equal(actual, expected)


RECIPES = pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "block"])


@on_both
@RECIPES
def test_gradients_are_as_accurate_as_on_the_cpu(device: str, recipe: str) -> None:
    assert_gradients_no_noisier(gradients(device, recipe), gradients("cpu", recipe))


@RECIPES
def test_gradients_with_hoppers_sums_are_accepted_and_wrong_ones_are_not(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = gradients("cpu", recipe)
    multiply_by(hopper.scaled_mm, monkeypatch)
    assert_gradients_no_noisier(gradients("cpu", recipe), here)
    multiply_by(without_a_block, monkeypatch)
    with pytest.raises(AssertionError):
        assert_gradients_no_noisier(gradients("cpu", recipe), here)


Gradients = dict[str, Tensor]


def assert_gradients_no_noisier(there: Gradients, here: Gradients) -> None:
    """Checks the noise of each parameter's gradient, and of all together, compared with training in BF16."""
    exact = gradients("cpu", None)
    actual, expected = (
        {name: noise(grad, exact[name]) ** 0.5 for name, grad in grads.items()} for grads in (there, here)
    )
    for name in expected:
        assert actual[name] <= MORE_NOISE_OF_ONE * expected[name], name
    assert math.hypot(*actual.values()) <= MORE_NOISE * math.hypot(*expected.values())


def gradients(device: str, recipe: str | None) -> Gradients:
    """Returns the gradients of the second step, whose delayed scales are from the first. `recipe` is None for BF16."""
    trained = model(torch.float32)
    decoder = (convert(trained) if recipe else trained).to(device, torch.bfloat16)
    chosen = DelayedScaling(amax_history_len=4) if recipe == "delayed" else from_name(recipe or "rowwise")
    tokens = torch.tensor(PROMPTS[0] + PROMPTS[2], device=device)
    lengths = [len(PROMPTS[0]), len(PROMPTS[2])]
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    for _ in range(2):
        decoder.zero_grad()
        with autocast(enabled=recipe is not None, recipe=chosen):
            attend = make_attend(lambda layer, q, k, v: causal_attention(q, k, v, lengths, 64**-0.5))
            hidden = decoder(tokens, positions, attend)
            logits = decoder.logits(hidden)  # type: ignore[operator]
        torch.nn.functional.cross_entropy(logits, tokens.roll(-1)).backward()
    return {name: p.grad.detach().double().cpu() for name, p in decoder.named_parameters() if p.grad is not None}
