"""A decoding step by the CUDA kernels on the emulated GPU: all but attention rounds as it does on the CPU."""

import pytest
import torch

from fp8serve.fp8 import stacked
from fp8serve.model.network.experts import mixtures
from tests.cuda import emulated, test_decoding
from tests.cuda.test_decoding import CONFIG, Tiny, noise, on_emulated_kernels

EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 6,
           "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 128}  # fmt: skip


@pytest.mark.emulator
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_all_but_attention_rounds_as_the_cpu_does(cache: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Tiny("cpu", cache=cache, budget=24)
    expected.generate(2, temperature=0.0)
    on_emulated_kernels(monkeypatch, but="paged_attention")
    found = Tiny("cpu", cache=cache, budget=24)
    found.generate(2, temperature=0.0)
    for one, other in zip(found.logits, expected.logits, strict=True):
        assert noise(one, other) <= 10**-10


@pytest.mark.emulator
@pytest.mark.parametrize("recipe", ["rowwise", "block"])
def test_experts_are_multiplied_as_on_the_cpu(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture in every layer: a chunk of a prompt by the mma kernel, a step of a few tokens by the skinny one."""
    monkeypatch.setattr(test_decoding, "CONFIG", CONFIG | EXPERTS)
    expected = Tiny("cpu", recipe, budget=48)
    expected.generate(2, temperature=0.0)
    on_emulated_kernels(monkeypatch, but="paged_attention")
    rows: list[int] = []

    def grouped_mm(*args: torch.Tensor) -> torch.Tensor:
        rows.append(len(args[0]))
        return emulated.ops().grouped_mm(*args)  # type: ignore[no-any-return]

    monkeypatch.setattr(stacked, "_grouped_mm", grouped_mm)
    found = Tiny("cpu", recipe, budget=48)
    assert all(experts.is_stacked for experts in mixtures(found.runner.model).values())
    found.generate(2, temperature=0.0)
    assert min(rows) <= 64 < max(rows)
    for one, other in zip(found.logits, expected.logits, strict=True):
        assert noise(one, other) <= 10**-10
