"""A decoding step by the CUDA kernels on the emulated GPU: all but attention rounds as it does on the CPU."""

import pytest
import torch

from tests.cuda.test_decoding import Tiny, noise, on_emulated_kernels


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
