"""A decoding step on the CUDA kernels of the emulated GPU; all ops but attention round as on the CPU."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

pytest.importorskip("annotated_types")

from benchmarks import gpu_decode
from fp8serve.fp8 import stacked
from fp8serve.model.network.experts import mixtures
from tests.cuda import emulated, test_decoding
from tests.cuda.test_decoding import CONFIG, Tiny, noise, on_emulated_kernels

EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 6,
           "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 128}  # fmt: skip
LAUNCHES_OF_A_LAYER = 8


@pytest.mark.emulator
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_all_ops_but_attention_round_as_on_the_cpu(cache: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Tiny("cpu", cache=cache, budget=24)
    expected.generate(2, temperature=0.0)
    on_emulated_kernels(monkeypatch, but="paged_attention")
    actual = Tiny("cpu", cache=cache, budget=24)
    actual.generate(2, temperature=0.0)
    for one, other in zip(actual.logits, expected.logits, strict=True):
        assert noise(one, other) <= 10**-10


@pytest.mark.emulator
@pytest.mark.parametrize("recipe", ["rowwise", "block"])
def test_experts_are_multiplied_as_on_the_cpu(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer is a mixture of experts. A chunk of a prompt takes the mma kernel, a few tokens the skinny kernel."""
    monkeypatch.setattr(test_decoding, "CONFIG", CONFIG | EXPERTS)
    expected = Tiny("cpu", recipe, budget=48)
    expected.generate(2, temperature=0.0)
    on_emulated_kernels(monkeypatch, but="paged_attention")
    rows: list[int] = []

    def grouped_mm(*args: torch.Tensor) -> torch.Tensor:
        rows.append(len(args[0]))
        return emulated.ops().grouped_mm(*args)  # type: ignore[no-any-return]

    monkeypatch.setattr(stacked, "_grouped_mm", grouped_mm)
    monkeypatch.setattr(stacked.StackedExperts, "can_run_mlp_with", lambda *_: False)  # a GPU runs the ops separately
    actual = Tiny("cpu", recipe, budget=48)
    assert all(experts.stacks() for experts in mixtures(actual.runner.model).values())
    actual.generate(2, temperature=0.0)
    assert min(rows) <= 64 < max(rows)
    for one, other in zip(actual.logits, expected.logits, strict=True):
        assert noise(one, other) <= 10**-10


def launches_of_a_step(layers: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the kernels of a decoding step of one sequence with static scales, in order."""
    sized = gpu_decode.config(dry=True)
    layered = replace(
        sized, num_layers=layers, layer_windows=(None,) * layers, layer_ropes=sized.layer_ropes[:1] * layers
    )
    monkeypatch.setattr(gpu_decode, "config", lambda dry: layered)
    step = gpu_decode.DecodeStep("cpu", dry=True)
    emulated.emulator().launches()
    step(0)
    return [name for name, _ in emulated.emulator().launches()]


def launches_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    on_emulated_kernels(monkeypatch)
    two, three = (launches_of_a_step(layers, monkeypatch) for layers in (2, 3))
    layer = Counter(three) - Counter(two)
    assert layer.total() == len(three) - len(two)
    return layer


@pytest.mark.emulator
def test_a_decoder_layer_takes_eight_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Residuals are added inside products, counters are updated inside casts, and no memset is needed. If a change
    needs fewer launches, set LAUNCHES_OF_A_LAYER to the new number."""
    layer = launches_of_a_layer(monkeypatch)
    assert layer.total() == LAUNCHES_OF_A_LAYER, layer
    assert layer["memset"] == 0


@pytest.mark.emulator
@pytest.mark.parametrize("kernel", ["gated", "rotary"])
def test_a_fused_kernel_that_is_off_costs_a_launch(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_emulated_kernels(monkeypatch)
    here = torch.zeros(1)
    default = emulated.ops().gemm_kernels(here, "")
    emulated.ops().gemm_kernels(here, f"{default}+{kernel}".strip("+"))
    layer = launches_of_a_layer(monkeypatch)
    assert layer.total() == LAUNCHES_OF_A_LAYER + 1, layer


@pytest.mark.emulator
def test_a_decoder_layer_takes_six_launches_if_products_cast_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    on_emulated_kernels(monkeypatch)
    emulated.ops().gemm_kernels(torch.zeros(1), "none")
    layer = launches_of_a_layer(monkeypatch)
    assert layer.total() == LAUNCHES_OF_A_LAYER - 2, layer
    assert layer["memset"] == 0


@pytest.mark.emulator
def test_products_with_a_long_k_take_one_launch() -> None:
    """K is 4096, with a residual for one and for 64 rows, and for rows of experts."""
    gpu, one = emulated.emulator(), torch.tensor(1.0)
    weight = torch.ones(16, 4096).to(torch.float8_e4m3fn)
    for rows in (1, 64):
        residual = torch.zeros(rows, 16, dtype=torch.bfloat16)
        gpu.launches()
        product = gpu.ops.scaled_mm_add(weight[:1].expand(rows, -1).contiguous(), weight, one, one, None, residual)
        assert len(gpu.launches()) == 1
        assert bool((product == 4096).all())
    ends, scales = torch.tensor([2, 3], dtype=torch.int32), torch.ones(2)
    product = gpu.ops.grouped_mm(weight[:3], weight.view(2, 8, 4096), one, scales, ends, None, torch.bfloat16)
    assert len(gpu.launches()) == 1
    assert bool((product == 4096).all())
