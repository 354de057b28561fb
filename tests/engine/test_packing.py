"""Packed weights: when the engine packs them, which ones, and that packing changes no bit."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8serve.engine import packing
from fp8serve.engine.engine import Engine
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.fp8.batch_invariant import BatchInvariantLinear, has_batch_invariant_products
from fp8serve.fp8.frozen import FrozenLinear

from .test_fused import MODES, SIZES, make_engine
from .tiny import write_model

pytestmark = pytest.mark.skipif(not has_batch_invariant_products("cpu"), reason="the CPU kernels are not built")
PROMPTS = [[256, *b"Once upon a time"], list(range(1, 60))]


@pytest.fixture(autouse=True)
def always_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every instruction set can read packed weights, although packing is worth it on only one."""
    monkeypatch.setattr(packing, "worth_packing", lambda: True)


def unpacked(monkeypatch: pytest.MonkeyPatch, make_engine: Callable[[], Engine]) -> Engine:
    """Returns an engine that never packs."""
    with monkeypatch.context() as for_now:
        for_now.setattr(packing, "worth_packing", lambda: False)
        return make_engine()


def tokens_of(engine: Engine) -> list[tuple[int, ...]]:
    completions = engine.generate(PROMPTS, temperature=0.0, max_new_tokens=24, ignore_eos=True)
    return [completion.token_ids for completion in completions]


def weight_dims(engine: Engine) -> dict[str, int]:
    """Returns the number of dimensions of every linear layer's weight, which is 3 if it is packed."""
    model = engine.loaded.runner.model
    kinds = FrozenLinear | BatchInvariantLinear
    return {name: m.weight.dim() for name, m in model.named_modules() if isinstance(m, kinds)}


@pytest.mark.parametrize("mode", [*MODES, "bf16"])
def test_packing_before_or_while_generating_changes_no_token(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    options: dict[str, Any] = {"recipe": "bf16"} if mode == "bf16" else {}
    if mode == "bf16":
        write_model(path, **SIZES)

    def engine() -> Engine:
        return Engine(path, **options, max_num_seqs=4) if options else make_engine(path, mode)

    never, during, before = unpacked(monkeypatch, engine), engine(), engine()
    assert not before.pack_weights()
    expected = tokens_of(never)
    assert tokens_of(during) == expected
    assert tokens_of(before) == expected
    assert set(weight_dims(never).values()) == {2}
    assert weight_dims(during) == weight_dims(before)
    assert {dims for name, dims in weight_dims(before).items() if name != "lm_head"} == {3}


def test_the_first_token_does_not_wait_for_packing(tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "model", "delayed")
    engine.add_request(Request("one", tuple(PROMPTS[0]), SamplingParams(max_new_tokens=4)))
    (first,) = engine.step()
    assert first.token_ids
    assert set(weight_dims(engine).values()) == {2}
    while engine.has_work():
        engine.step()
    assert 3 in weight_dims(engine).values()


def test_packing_stops_at_its_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seconds = make_engine(tmp_path / "model", "delayed"), itertools.count()
    monkeypatch.setattr(packing.time, "perf_counter", lambda: float(next(seconds)))
    assert engine.pack_weights(0.0)
    assert set(weight_dims(engine).values()) == {2}
    assert engine.pack_weights(2.5)  # the clock is read before every matrix: joined q, k and v are packed, and one more
    assert list(weight_dims(engine).values()).count(3) == 4


def test_layers_read_the_memory_of_the_joined_weight(tmp_path: Path) -> None:
    """Joined or not, a weight is in memory once."""
    engine = make_engine(tmp_path / "model", "delayed")
    engine.pack_weights()
    layer: Any = engine.loaded.runner.model.model.layers[0]
    attention = layer.self_attn
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    joined = attention.qkv.weight
    assert q.weight_q.data_ptr() == joined.data_ptr()
    assert k.weight_q.data_ptr() == q.weight_q.data_ptr() + q.weight_q.nbytes
    x = torch.randn(3, q.in_features).bfloat16()
    with torch.inference_mode():
        together = attention.qkv(x, layer.input_layernorm)
        alone = [part(layer.input_layernorm(x)) for part in (q, k, v)]
    assert all(map(torch.equal, alone, together))


def test_a_tied_output_head_is_not_packed(tmp_path: Path) -> None:
    tied = Engine(write_model(tmp_path / "tied", **SIZES | {"vocab_size": 272}), recipe="current")
    own = Engine(
        write_model(tmp_path / "own", **SIZES | {"vocab_size": 272}, tie_word_embeddings=False), recipe="current"
    )
    for engine in (tied, own):
        engine.pack_weights()
    assert weight_dims(tied)["lm_head"] == 2
    assert weight_dims(own)["lm_head"] == 3


def test_weights_that_cannot_be_packed_run_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen rows of a k projection would be two heads of this model, and it has one of eight."""
    odd = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 8}
    engine = Engine(write_model(tmp_path / "model", **odd), recipe="current")
    never = unpacked(monkeypatch, lambda: Engine(tmp_path / "model", recipe="current"))
    engine.pack_weights()
    assert weight_dims(engine)["model.layers.0.self_attn.k_proj"] == 2
    assert weight_dims(engine)["model.layers.0.self_attn.o_proj"] == 3
    assert tokens_of(engine) == tokens_of(never)


def test_nothing_is_packed_if_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "free_memory", lambda: 1 << 20)
    engine = make_engine(tmp_path / "model", "delayed")
    assert not engine.pack_weights()
    assert set(weight_dims(engine).values()) == {2}
