"""Packed weights in the engine: when they are packed, which they are, and that no bit differs."""

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

from .test_fused import MODES, SIZES, make
from .tiny import write_model

pytestmark = pytest.mark.skipif(not has_batch_invariant_products("cpu"), reason="the CPU kernels are not built")
PROMPTS = [[256, *b"Once upon a time"], list(range(1, 60))]


@pytest.fixture(autouse=True)
def packs_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every level reads packed weights, though only one likes to."""
    monkeypatch.setattr(packing, "worth_packing", lambda: True)


def unpacked(monkeypatch: pytest.MonkeyPatch, make_engine: Callable[[], Engine]) -> Engine:
    """An engine that never packs."""
    with monkeypatch.context() as for_now:
        for_now.setattr(packing, "worth_packing", lambda: False)
        return make_engine()


def tokens_of(engine: Engine) -> list[tuple[int, ...]]:
    done = engine.generate(PROMPTS, temperature=0.0, max_new_tokens=24, ignore_eos=True)
    return [completion.token_ids for completion in done]


def weights_of(engine: Engine) -> dict[str, int]:
    """The number of dimensions of every linear's weight: 3 where it is packed."""
    model = engine.loaded.runner.model
    kinds = FrozenLinear | BatchInvariantLinear
    return {name: m.weight.dim() for name, m in model.named_modules() if isinstance(m, kinds)}


@pytest.mark.parametrize("mode", [*MODES, "bf16"])
def test_packed_before_during_and_after_gives_the_same_tokens(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    options: dict[str, Any] = {"recipe": "bf16"} if mode == "bf16" else {}
    if mode == "bf16":
        write_model(path, **SIZES)

    def engine() -> Engine:
        return Engine(path, **options, max_num_seqs=4) if options else make(path, mode)

    never, meanwhile, before = unpacked(monkeypatch, engine), engine(), engine()
    assert not before.pack_weights()
    expected = tokens_of(never)
    assert tokens_of(meanwhile) == expected
    assert tokens_of(before) == expected
    assert set(weights_of(never).values()) == {2}
    assert weights_of(meanwhile) == weights_of(before)
    assert {dims for name, dims in weights_of(before).items() if name != "lm_head"} == {3}


def test_the_first_token_does_not_wait(tmp_path: Path) -> None:
    engine = make(tmp_path / "model", "delayed")
    engine.add_request(Request("one", tuple(PROMPTS[0]), SamplingParams(max_new_tokens=4)))
    (first,) = engine.step()
    assert first.token_ids
    assert set(weights_of(engine).values()) == {2}
    while engine.has_work():
        engine.step()
    assert 3 in weights_of(engine).values()


def test_packing_stops_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seconds = make(tmp_path / "model", "delayed"), itertools.count()
    monkeypatch.setattr(packing.time, "perf_counter", lambda: float(next(seconds)))
    assert engine.pack_weights(0.0)
    assert set(weights_of(engine).values()) == {2}
    assert engine.pack_weights(2.5)  # it looks at the clock before every matrix: two, of which the first is q, k and v
    assert list(weights_of(engine).values()).count(3) == 4


def test_the_models_layers_read_the_same_memory(tmp_path: Path) -> None:
    """Joined or not, a weight is in memory once."""
    engine = make(tmp_path / "model", "delayed")
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


def test_a_head_that_is_the_embedding_stays(tmp_path: Path) -> None:
    tied = Engine(write_model(tmp_path / "tied", **SIZES | {"vocab_size": 272}), recipe="current")
    own = Engine(
        write_model(tmp_path / "own", **SIZES | {"vocab_size": 272}, tie_word_embeddings=False), recipe="current"
    )
    for engine in (tied, own):
        engine.pack_weights()
    assert weights_of(tied)["lm_head"] == 2
    assert weights_of(own)["lm_head"] == 3


def test_what_cannot_be_packed_runs_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen rows of a k projection would be two heads of this model, and it has one of eight."""
    odd = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 8}
    engine = Engine(write_model(tmp_path / "model", **odd), recipe="current")
    never = unpacked(monkeypatch, lambda: Engine(tmp_path / "model", recipe="current"))
    engine.pack_weights()
    assert weights_of(engine)["model.layers.0.self_attn.k_proj"] == 2
    assert weights_of(engine)["model.layers.0.self_attn.o_proj"] == 3
    assert tokens_of(engine) == tokens_of(never)


def test_a_model_that_hardly_fits_stays_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "free_memory", lambda: 1 << 20)
    engine = make(tmp_path / "model", "delayed")
    assert not engine.pack_weights()
    assert set(weights_of(engine).values()) == {2}
