"""`head_dtype="fp8"`: its logits, the tied embedding that it leaves unchanged, and models for which it is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fp8serve.engine import packing
from fp8serve.engine.engine import Engine
from fp8serve.fp8.batch_invariant import has_batch_invariant_products
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.ops.arithmetic import dequantize
from fp8serve.model.checkpoint import load_servable

from .tiny import write_model

PROMPTS = [[256, *b"Once upon a time"], [256, *b"To be"]]
PACKABLE: dict[str, Any] = {"hidden_size": 128, "vocab_size": 272}


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_a_head_with_a_scale_for_every_row(tmp_path: Path, tied: bool) -> None:
    """The embedding, which is tied to the head, keeps the values and the memory of the file."""
    write_model(tmp_path, tie_word_embeddings=tied, **PACKABLE)
    plain, cast = load_servable(tmp_path, "bf16"), load_servable(tmp_path, "bf16", head="fp8")
    head, weight = cast.head, plain.get_parameter("lm_head.weight")
    assert isinstance(head, FrozenLinear)
    assert head.weight_q.float().abs().amax(1).eq(448).all()
    assert torch.equal(cast.embedding.weight, plain.embedding.weight)
    assert not torch.equal(dequantize(head.weight_q, head.weight_scale_inv), weight.float())
    hidden = torch.randn(5, PACKABLE["hidden_size"]).bfloat16()
    exact = hidden.double() @ dequantize(head.weight_q, head.weight_scale_inv).double().T
    torch.testing.assert_close(cast.logits(hidden).double(), exact, rtol=2**-8, atol=1e-3)
    torch.testing.assert_close(cast.logits(hidden), plain.logits(hidden), rtol=0.05, atol=0.5)


@pytest.mark.skipif(not has_batch_invariant_products("cpu"), reason="the CPU kernels are not built")
def test_packing_the_fp8_head_changes_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, tie_word_embeddings=True, **PACKABLE)
    results = []
    for packs in (False, True):
        monkeypatch.setattr(packing, "worth_packing", lambda packs=packs: packs)
        engine = Engine(tmp_path, recipe="bf16", head_dtype="fp8")
        engine.pack_weights()
        head = engine.loaded.runner.model.head
        assert isinstance(head, FrozenLinear)
        assert head.is_packed is packs
        results.append(engine.generate(PROMPTS, temperature=0.0, max_new_tokens=8, logprobs=2))
    assert results[0] == results[1]
    assert engine.info()["head_dtype"] == "fp8"
    assert engine.info()["quantized_layers"] == 0
    assert engine.scales() == []
    other = Engine(tmp_path, recipe="bf16").generate(PROMPTS, temperature=0.0, max_new_tokens=8, logprobs=2)
    assert other != results[0]
