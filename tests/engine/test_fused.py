"""Joined projections and fused ops give the same logits, bit for bit, and the same amaxes as layers called one by one.

The last layer skips rows whose logits are not needed, which changes no other row.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp8serve.engine import packing
from fp8serve.engine import runner as runner_module
from fp8serve.engine.engine import Engine
from fp8serve.engine.request import Request
from fp8serve.engine.runner import Runner
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.engine.scheduler import StepWork, Work
from fp8serve.engine.sequence import Sequence
from fp8serve.fp8.batch_invariant import has_batch_invariant_products
from fp8serve.fp8.elementwise import rms_norm
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.joined import JoinedLinear, can_join
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.model.network.experts import Mixture
from fp8serve.model.network.rotary import Attend

from .tiny import ARCHITECTURES, OTHERS, call_each_layer, write_model, write_scales

pytestmark = pytest.mark.skipif(not has_batch_invariant_products("cpu"), reason="the CPU kernels are not built")
SIZES = {"hidden_size": 256, "intermediate_size": 256, "max_position_embeddings": 512, "head_dim": 128}
MODES: dict[str, dict[str, Any]] = {
    "delayed": {"recipe": DelayedScaling()},
    "weight scales of their own": {"recipe": DelayedScaling()},
    "fp8 cache": {"recipe": DelayedScaling(), "kv_cache_dtype": "fp8"},
    "rowwise": {"recipe": "rowwise"},
    "current": {"recipe": "current"},
    "block": {"recipe": "block"},
    "weights only": {"recipe": "w8a16"},
    "weights in NVFP4": {"recipe": "nvfp4-w4a16"},
}


def make_engine(path: Path, mode: str, model_type: str = "llama", **sizes: Any) -> Engine:
    if not path.exists():
        write_model(path, model_type, **SIZES | sizes)
        write_scales(path, path / "made-up", kv=True, shared=mode != "weight scales of their own")
    options = dict(MODES[mode])
    if isinstance(options["recipe"], DelayedScaling):
        options["scales"] = path / "made-up"
    return Engine(path, **options, max_num_seqs=4)


def logits_and_tokens(engine: Engine, prompts: list[list[int]], tokens: int) -> list[Tensor]:
    """Returns the logits of every step, followed by the generated tokens of each prompt."""
    run, logits_of_steps = engine.loaded.runner.run, []

    def watched(work: Any) -> Tensor:
        logits = run(work)
        logits_of_steps.append(logits.clone())
        return logits

    engine.loaded.runner.run = watched  # type: ignore[method-assign]
    completions = engine.generate(prompts, temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
    return [*logits_of_steps, *(torch.tensor(completion.token_ids) for completion in completions)]


def assert_fused_equals_plain(path: Path, mode: str, tokens: int, **model: Any) -> None:
    prompts = [[256, *b"Once upon a time"], list(range(1, 90))]
    fused, plain = make_engine(path, mode, **model), make_engine(path, mode, **model)
    assert all(projections_are_joined(fused).values())
    call_each_layer(plain)
    actual, expected = (logits_and_tokens(engine, prompts, tokens) for engine in (fused, plain))
    assert len(actual) == len(expected) > tokens
    assert all(map(torch.equal, actual, expected))
    assert not any(projections_are_joined(plain).values())
    assert [r["amax"] for r in fused.scales()] == [r["amax"] for r in plain.scales()]


def projections_are_joined(engine: Engine) -> dict[str, bool]:
    """Returns whether the projections of each input (qkv, gate_up) are joined into one matrix."""
    layers: Any = engine.loaded.runner.model.model.layers
    groups = {
        f"{i}.{name}": group for i, layer in enumerate(layers) for name, group in projection_groups(layer).items()
    }
    return {name: group.weight is not None for name, group in groups.items()}


def projection_groups(layer: Any) -> dict[str, Any]:
    block = layer.get_submodule(layer.mlp_name)
    return {"qkv": layer.self_attn.qkv, **({} if isinstance(block, Mixture) else {"gate_up": block.gate_up})}


@pytest.mark.parametrize("mode", list(MODES))
def test_fused_and_plain_layers_give_equal_logits_and_256_tokens(tmp_path: Path, mode: str) -> None:
    assert_fused_equals_plain(tmp_path / "model", mode, 256)


@pytest.mark.parametrize("model_type", [name for name in ARCHITECTURES | OTHERS if name != "llama"])
def test_fused_equals_plain_for_every_architecture(tmp_path: Path, model_type: str) -> None:
    assert_fused_equals_plain(tmp_path / "model", "delayed", 12, model_type=model_type)


def test_fused_equals_plain_with_sliding_windows(tmp_path: Path) -> None:
    assert_fused_equals_plain(tmp_path / "model", "fp8 cache", 40, model_type="mistral", sliding_window=20)


BLOCKS = 16  # tokens in each


def mixed_steps() -> list[StepWork]:
    """Returns steps of four sequences with scattered cache blocks: chunks, whole prompts and decoded tokens, mixed."""
    lengths = {"long": 640, "chunked": 45, "short": 33, "one": 1}
    numbers = iter(torch.randperm(60, generator=torch.Generator().manual_seed(1)).tolist())
    a, b, c, d = (sequence(i, length, numbers) for i, length in enumerate(lengths.values()))
    steps = [
        [(a, 0, 600)],  # no row is sampled
        [(b, 0, 20), (a, 600, 640), (c, 0, 33)],  # `b` is not sampled
        [(a, 640, 641), (b, 20, 44), (c, 33, 34)],
        [(a, 641, 642), (b, 44, 45), (c, 34, 35), (d, 0, 1)],  # one token each, and all are sampled
        [(a, 642, 643), (c, 35, 36), (d, 1, 2)],
    ]
    # `token_ids` already holds all tokens, so `ComputedWork` derives from its range whether it samples
    return [StepWork(others=[ComputedWork(seq, start, end - start) for seq, start, end in step]) for step in steps]


class ComputedWork(Work):
    """Work that samples if it reaches the end of the prompt, although all tokens are known."""

    @property
    def needs_sample(self) -> bool:
        return self.start + self.count >= self.seq.num_prompt


def sequence(seed: int, prompt: int, blocks: Iterator[int]) -> Sequence:
    ids = torch.randint(0, 256, (prompt + 8,), generator=torch.Generator().manual_seed(seed)).tolist()
    seq = Sequence.of(Request(str(seed), tuple(ids[:prompt]), SamplingParams(max_new_tokens=8)))
    seq.token_ids = ids
    seq.block_table = [next(blocks) for _ in range(-(-len(ids) // BLOCKS))]
    return seq


def disable_row_pruning(runner: Runner) -> None:
    """From now on the decoder computes all rows in every layer, and drops rows only after the last one."""
    forward = runner.model.forward

    def all_rows(token_ids: Tensor, positions: Tensor, attend: Attend, last: Tensor | None = None) -> Tensor:
        hidden = forward(token_ids, positions, attend)
        return hidden if last is None else hidden[last]

    runner.model.forward = all_rows  # type: ignore[method-assign]


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_skipping_rows_in_the_last_layer_changes_no_bit(tmp_path: Path, mode: str, model_type: str) -> None:
    """Compares logits and caches of every step with those of all rows of all layers, fused and called one by one."""
    engines = [make_engine(tmp_path / "model", mode, model_type, max_position_embeddings=1024) for _ in range(3)]
    pruned, every, plain = (engine.loaded.runner for engine in engines)
    call_each_layer(engines[2])
    disable_row_pruning(every)
    disable_row_pruning(plain)
    for work in mixed_steps():
        actual = pruned.run(work)
        assert len(actual) == sum(item.needs_sample for item in work)
        for other in (every, plain):
            assert torch.equal(actual, other.run(work))
            for mine, theirs in ((pruned.k_cache, other.k_cache), (pruned.v_cache, other.v_cache)):
                assert torch.equal(mine[:, :60].view(torch.uint8), theirs[:, :60].view(torch.uint8))
    assert bool(pruned.k_cache[1, :60].float().any())


class RowCounter:
    """Records the number of input rows of every product, and the number of queries of every attention."""

    def __init__(self, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        layers: Any = runner.model.model.layers
        self.names = {
            id(product): (i, name)
            for i, layer in enumerate(layers)
            for name, product in {
                **{name: group._joined for name, group in projection_groups(layer).items()},
                "o": layer.self_attn.o_proj,
                "down": layer.mlp.down_proj,
            }.items()
        }
        self.rows: dict[tuple[int, str], int] = {}
        self.queries: list[int] = []
        forward_norm, product_add, paged = (
            JoinedLinear.forward_norm,
            FrozenLinear.product_add,
            runner_module._paged_attention,
        )
        monkeypatch.setattr(
            JoinedLinear, "forward_norm", lambda m, x, *rest: forward_norm(m, self.count_rows(m, x), *rest)
        )
        monkeypatch.setattr(
            FrozenLinear, "product_add", lambda m, x, *rest: product_add(m, self.count_rows(m, x), *rest)
        )
        monkeypatch.setattr(runner_module, "_paged_attention", lambda q, *rest: paged(self.count_queries(q), *rest))

    def count_rows(self, product: JoinedLinear | FrozenLinear, x: Tensor) -> Tensor:
        self.rows[self.names[id(product)]] = len(x)
        return x

    def count_queries(self, q: Tensor) -> Tensor:
        self.queries.append(len(q))
        return q

    def clear(self) -> None:
        self.rows, self.queries = {}, []


def test_the_last_layer_computes_only_rows_that_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_engine(tmp_path / "model", "rowwise", max_position_embeddings=1024).loaded.runner
    counter = RowCounter(runner, monkeypatch)
    for work, tokens, sampled in zip(mixed_steps(), (600, 93, 26, 4, 3), (0, 2, 2, 4, 3), strict=True):
        counter.clear()
        runner.run(work)
        all_rows = {(0, name): tokens for name in ("qkv", "o", "gate_up", "down")} | {(1, "qkv"): tokens}
        sampled_rows = {(1, name): sampled for name in ("o", "gate_up", "down") if sampled}
        assert counter.rows == all_rows | sampled_rows
        assert counter.queries == [tokens, sampled]


class OpNames(TorchDispatchMode):
    """Records the names of the called ops in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_decoding_step_selects_no_rows(tmp_path: Path) -> None:
    """All its layers run the same ops, and none of them is an index."""
    runner = make_engine(tmp_path / "model", "delayed", max_position_embeddings=1024).loaded.runner
    prompts, decode = mixed_steps()[1], mixed_steps()[3]
    with torch.inference_mode(), OpNames() as mixed:
        runner.run(prompts)
    with torch.inference_mode(), OpNames() as decoding:
        runner.run(decode)
    assert sum(name.startswith("aten.index") for name in mixed.names) == 2  # of x and of q
    assert not any(name.startswith("aten.index") for name in decoding.names)
    ours = [name for name in decoding.names if name.startswith("fp8serve")]
    first, last = [i for i, name in enumerate(ours) if "quantize_watched" in name][::4]
    layer = ours[first:last]
    assert "fp8serve.paged_attention.default" in layer
    assert ours[last : last + len(layer)] == layer


def test_saturation_is_the_share_of_computed_rows(tmp_path: Path) -> None:
    """With scales at which all values but zero saturate, the share is one, for whole prompts and for a few rows."""
    engine = make_engine(tmp_path / "model", "delayed")
    for layer in engine.loaded.frozen.values():
        layer.input_scale.fill_(1e30)  # type: ignore[union-attr]
        layer.input_scale_inv.fill_(1 / 448)  # type: ignore[union-attr]  # a saturated value, 448, becomes 1
    engine.generate([list(range(1, 90)), [7, 8, 9]], temperature=0.0, max_new_tokens=3, ignore_eos=True)
    assert len(engine.scales()) == 14
    for record in engine.scales():
        assert 0.98 < record["saturation"] <= 1, record


def test_fused_equals_plain_for_odd_sizes(tmp_path: Path) -> None:
    sizes = {"hidden_size": 72, "intermediate_size": 100, "head_dim": 10, "num_attention_heads": 6}
    assert_fused_equals_plain(tmp_path / "model", "delayed", 12, **sizes, num_key_value_heads=3)


@pytest.mark.parametrize("pack", [False, True])
def test_fused_equals_plain_for_partial_weight_blocks(
    pack: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "worth_packing", lambda: pack)
    sizes = {"hidden_size": 144, "intermediate_size": 176, "head_dim": 16, "num_attention_heads": 9}
    assert_fused_equals_plain(tmp_path / "model", "block", 40, **sizes, num_key_value_heads=3)


def test_writing_to_a_block_scale_takes_effect(tmp_path: Path) -> None:
    sizes = {"hidden_size": 144, "intermediate_size": 176, "head_dim": 16}
    engines = [make_engine(tmp_path / "model", "block", **sizes) for _ in range(2)]
    for engine in engines:
        engine.generate([[1, 2]], temperature=0.0, max_new_tokens=2)
        for layer in engine.loaded.frozen.values():
            layer.weight_scale_inv.mul_(2)
    call_each_layer(engines[1])
    fused, plain = (logits_and_tokens(engine, [list(range(1, 90))], 3) for engine in engines)
    assert all(map(torch.equal, fused, plain))


def test_projections_that_share_a_weight_block_are_not_joined(tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "model", "block", hidden_size=72, intermediate_size=100)
    assert projections_are_joined(engine) == {"0.qkv": True, "0.gate_up": False, "1.qkv": True, "1.gate_up": False}
    assert len(engine.generate([[1, 2]], temperature=0.0, max_new_tokens=3)[0].token_ids) == 3


def test_projections_with_different_input_scales_are_not_joined(tmp_path: Path) -> None:
    write_model(tmp_path / "model", **SIZES)
    scales = write_scales(tmp_path / "model", tmp_path / "made-up")
    tensors = load_file(scales)
    tensors["model.layers.1.self_attn.k_proj.input.scale"] *= 2
    from safetensors import safe_open

    with safe_open(scales, "pt") as file:
        save_file(tensors, scales, file.metadata())
    engine = Engine(tmp_path / "model", recipe=DelayedScaling(), scales=scales)
    assert projections_are_joined(engine) == {"0.qkv": True, "0.gate_up": True, "1.qkv": False, "1.gate_up": True}


@pytest.mark.parametrize(("mode", "shape"), [("delayed", ()), ("weight scales of their own", (512, 1))])
def test_joined_projections_with_equal_weight_scales_share_one(tmp_path: Path, mode: str, shape: Any) -> None:
    """With a single scale, a GPU can use cuBLASLt."""
    layer = make_engine(tmp_path / "model", mode).loaded.runner.model.model.layers[0]  # type: ignore[union-attr, index]
    group = projection_groups(layer)["gate_up"]._joined
    assert group.scale.shape == shape
    assert [part.shares_weight_scale for part in group.layers] == [shape == ()] * 2
    assert {part.weight_scale_inv.untyped_storage().data_ptr() for part in group.layers} == {
        group.scale.untyped_storage().data_ptr()
    }


def test_a_bf16_model_is_not_joined(tmp_path: Path) -> None:
    assert not any(projections_are_joined(Engine(write_model(tmp_path / "model"), recipe="bf16")).values())


def frozen(weight: Tensor) -> FrozenLinear:
    return FrozenLinear(weight.to(torch.float8_e4m3fn), torch.tensor(0.5), None, torch.tensor(2.0))


def join(*parts: FrozenLinear) -> JoinedLinear:
    assert can_join(parts)
    return JoinedLinear({str(i): part for i, part in enumerate(parts)}, (set(), 0))


def test_adjacent_weights_are_joined_without_copying() -> None:
    whole = torch.randn(12, 8).to(torch.float8_e4m3fn)
    parts = [FrozenLinear(piece, torch.tensor(0.5), None, torch.tensor(2.0)) for piece in whole.split([4, 8])]
    together = join(*parts)
    assert together.weight.data_ptr() == whole.data_ptr()
    assert together.weight.shape == whole.shape


def test_other_weights_are_copied_once_and_become_views_of_the_joined_one() -> None:
    parts = [frozen(torch.randn(rows, 8)) for rows in (4, 8, 2)]
    before = [part.weight_q.float() for part in parts]
    together = join(*parts)
    x, weight = torch.randn(3, 8), torch.rand(8)
    outputs = together.forward_norm(x, weight, 1e-6)
    for part, values, y in zip(parts, before, outputs, strict=True):
        assert torch.equal(part(rms_norm(x, weight, 1e-6)), y)
        assert torch.equal(part.weight_q.float(), values)
        assert part.weight_q.untyped_storage().data_ptr() == together.weight.untyped_storage().data_ptr()
        assert part.amax is parts[0].amax
