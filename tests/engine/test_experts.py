"""Mixtures of experts in the engine: stacked weights and grouped products give the same bits as experts called one by
one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fp8serve.engine import packing
from fp8serve.engine.engine import Engine
from fp8serve.fp8.batch_invariant import has_batch_invariant_products
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.model.network.experts import Mixture
from tests.model.test_experts import write_gpt_oss

from .test_fused import MODES, make_engine
from .test_oracle import TEXT, learn
from .tiny import call_each_layer, write_model

pytestmark = pytest.mark.skipif(not has_batch_invariant_products("cpu"), reason="the CPU kernels are not built")
KINDS = ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"]
SIZES = {"moe_intermediate_size": 128, "hidden_size": 256, "intermediate_size": 128}
PROMPTS = [[256, *b"Once upon a time"], list(range(1, 90)), [256, *b"x"]]
NEW = 64


def sizes_of(kind: str) -> dict[str, int]:
    return {
        key: value
        for key, value in SIZES.items()
        if kind not in ("mixtral", "gpt_oss") or key != "moe_intermediate_size"
    }


def logits_and_tokens(engine: Engine, prompts: list[list[int]], tokens: int) -> list[torch.Tensor]:
    """Returns the logits of every step, followed by the generated tokens of each prompt."""
    run, logits_of_steps = engine.loaded.runner.run, list[torch.Tensor]()

    def watched(*work: Any) -> torch.Tensor:
        logits = run(*work)
        logits_of_steps.append(logits.clone())
        return logits

    engine.loaded.runner.run = watched  # type: ignore[method-assign]
    completions = engine.generate(prompts, temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
    return [*logits_of_steps, *(torch.tensor(completion.token_ids) for completion in completions)]


def mixtures(engine: Engine) -> list[Mixture]:
    return [module for module in engine.loaded.runner.model.modules() if isinstance(module, Mixture)]


def packed(engine: Engine) -> bool:
    model = engine.loaded.runner.model
    return all(m.is_packed for name, m in model.named_modules() if isinstance(m, FrozenLinear) and ".experts." in name)


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_grouped_experts_equal_experts_called_one_by_one(
    kind: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "worth_packing", lambda: False)
    sizes = sizes_of(kind)
    plain, grouped = (make_engine(tmp_path / "model", mode, kind, **sizes) for _ in range(2))
    assert all(mixture.experts.stacks() for mixture in mixtures(grouped))
    call_each_layer(plain)
    monkeypatch.setattr(packing, "worth_packing", lambda: True)
    fast = make_engine(tmp_path / "model", mode, kind, **sizes)
    fast.pack_weights()
    expected = logits_and_tokens(plain, PROMPTS, 12)
    assert all(map(torch.equal, logits_and_tokens(grouped, PROMPTS, 12), expected))
    assert all(map(torch.equal, logits_and_tokens(fast, PROMPTS, 12), expected))
    assert not packed(grouped)
    assert packed(fast)
    columns = ("name", "amax", "saturated", "saturation")
    for engine in (grouped, fast):
        assert [[r[c] for c in columns] for r in engine.scales()] == [[r[c] for c in columns] for r in plain.scales()]


@pytest.mark.parametrize("packs", [False, True])
def test_experts_in_mxfp4_have_the_bits_of_their_weights_in_bf16(
    packs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-oss as published: its experts stay in 4 bits, which `weight_bytes` shows."""
    monkeypatch.setattr(packing, "worth_packing", lambda: packs)
    expected = write_gpt_oss(tmp_path)
    wide, narrow = (Engine(tmp_path, recipe=recipe, max_num_seqs=4) for recipe in ("bf16", "stored"))
    narrow.pack_weights()
    assert all(mixture.experts.stacks() for mixture in mixtures(narrow))
    prompts = [list(range(3, 40)), [5, 9], list(range(20, 29))]
    outputs = [logits_and_tokens(engine, prompts, 12) for engine in (wide, narrow)]
    assert all(map(torch.equal, *outputs))
    assert packed(narrow) is packs
    elements = sum(weight.numel() for weight in expected.values())
    saved = wide.info()["weight_bytes"] - narrow.info()["weight_bytes"]
    assert saved == pytest.approx(elements * (2 - 4.25 / 8), rel=0.03)


def learner(kind: str, path: Path) -> Any:
    """Returns a model of transformers in FP32, and the tokenizer in `path`."""
    write_model(path, kind)
    if kind != "gpt_oss":
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.manual_seed(0)  # ours are written one by one, which transformers does not read
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_64_greedy_tokens_equal_transformers(kind: str, tmp_path: Path) -> None:
    oracle = learn(learner(kind, tmp_path))
    oracle.to(torch.bfloat16).save_pretrained(tmp_path)
    prompts = [list(TEXT[at : at + size]) for at, size in ((0, 8), (30, 40), (60, 17))]
    engine = Engine(tmp_path, recipe="bf16", max_batch_tokens=24, max_prefill_tokens=8)
    for prompt, completion in zip(prompts, engine.generate(prompts, temperature=0.0, max_new_tokens=NEW), strict=True):
        expected = oracle.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        assert completion.token_ids == expected[0, len(prompt) :].tolist()


def test_an_experts_statistics_count_only_its_own_rows(tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "model", "delayed", "qwen3_moe", **SIZES)
    engine.generate(PROMPTS, temperature=0.0, max_new_tokens=8, ignore_eos=True)
    records = {record["name"]: record for record in engine.scales()}
    for i, mixture in enumerate(mixtures(engine)):
        tokens = mixture.experts.tokens.tolist()
        assert sum(tokens) % mixture.settings.per_token == 0
        for expert, count in enumerate(tokens):
            for leaf in ("gate_proj", "up_proj", "down_proj"):
                amax = records[f"model.layers.{i}.mlp.experts.{expert}.{leaf}"]["amax"]
                assert (amax > 0) == (count > 0)


def test_saturation_is_counted_for_the_expert_that_saturates(tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "model", "delayed", "qwen3_moe", **SIZES)
    mixture = mixtures(engine)[0]
    x, norm = torch.randn(5, 256).bfloat16() * 40, torch.nn.Identity()
    with torch.no_grad():
        chosen, _ = mixture.choose(x)
        mixture(x, norm, lambda y: y)
    scale = 20.0  # made up by write_scales
    for expert, module in enumerate(mixture.experts):
        rows = x[(chosen == expert).any(1)].float()
        expected = int(((rows * scale).abs() > 448.001).sum())
        assert int(module.gate_proj.saturated) == expected
        assert int(module.up_proj.saturated) == expected


@pytest.mark.parametrize("pack", [False, True])
def test_writing_to_or_replacing_a_weight_takes_effect(
    pack: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "worth_packing", lambda: pack)

    def changed(how: str) -> list[torch.Tensor]:
        engine = make_engine(tmp_path / "model", "delayed", "qwen3_moe", **SIZES)
        engine.generate(PROMPTS, temperature=0.0, max_new_tokens=2)
        for mixture in mixtures(engine):
            for expert in mixture.experts:
                down: Any = expert.down_proj
                if how == "written":
                    down.weight_scale_inv.mul_(2)
                elif how == "replaced":
                    down.weight_scale_inv = down.weight_scale_inv * 2
                elif how == "data":
                    down.weight_scale_inv.data = down.weight_scale_inv * 2
                elif how == "set":
                    doubled = down.weight_scale_inv * 2
                    down.weight_scale_inv.set_(doubled.untyped_storage(), 0, doubled.shape)
                elif how == "swapped":
                    torch.utils.swap_tensors(down.weight_scale_inv, down.weight_scale_inv * 2)
                elif how == "another":
                    parts = down.weight_scale_inv * 2, None, down.input_scale, down.input_spec, down.out_dtype
                    expert.down_proj = FrozenLinear(down.weight_q, *parts)
        return logits_and_tokens(engine, PROMPTS, 4)

    same, *others = (changed(how) for how in ("not", "written", "replaced", "data", "set", "swapped", "another"))
    assert not all(map(torch.equal, same, others[0]))
    for other in others[1:]:
        assert all(map(torch.equal, other, others[0]))


def test_packing_does_not_bring_a_replaced_tensor_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "worth_packing", lambda: True)
    engine = make_engine(tmp_path / "model", "delayed", "qwen3_moe", **SIZES)
    down: Any = mixtures(engine)[0].experts[0].down_proj
    down.weight_scale_inv = doubled = down.weight_scale_inv * 2
    engine.loaded.packer.pack()
    assert down.weight_scale_inv is doubled


def test_a_hook_on_an_expert_is_called(tmp_path: Path) -> None:
    engine, sizes = make_engine(tmp_path / "model", "delayed", "qwen3_moe", **SIZES), list[int]()
    for expert in mixtures(engine)[0].experts:
        expert.up_proj.register_forward_hook(lambda m, args, out: sizes.append(len(args[0])))
    engine.generate([PROMPTS[1]], temperature=0.0, max_new_tokens=1)
    assert sum(sizes) == 89 * 3


def test_experts_that_memory_cannot_hold_twice_stay_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacked = make_engine(tmp_path / "model", "delayed", "qwen3_moe", **SIZES)
    monkeypatch.setattr("fp8serve.model.network.experts.free_memory", lambda: 1000)
    loose = make_engine(tmp_path / "model", "delayed", "qwen3_moe", **SIZES)
    assert not any(mixture.experts.stacks() for mixture in mixtures(loose))
    assert all(map(torch.equal, logits_and_tokens(loose, PROMPTS, 6), logits_and_tokens(stacked, PROMPTS, 6)))
