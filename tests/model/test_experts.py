"""Mixtures of experts: config.json, sorting tokens by expert, and files with stacked or separate experts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fp8serve.errors import ModelError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.model.checkpoint import load_servable, open_checkpoint
from fp8serve.model.config.decoder import parse_config, read_config
from fp8serve.model.device import estimate_weight_memory
from fp8serve.model.format_conversion import convert_format
from fp8serve.model.network.decoder import Decoder
from fp8serve.model.network.experts import Mixture
from fp8serve.model.transformers_export import export
from fp8serve.model.verify import verify
from tests.model.oracle import MODELS, all_logits, make_model

MOE = [kind for kind, (_, options) in MODELS.items() if "num_experts_per_tok" in options]
QWEN_LIKE = [kind for kind in MOE if kind != "gpt-oss"]
RAW = {"model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
       "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
IDS = list(range(3, 40))


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_defaults_of_mixtures_are_those_of_transformers(family: str) -> None:
    theirs: Any = transformers.AutoConfig.for_model(family)
    ours = parse_config(RAW | {"model_type": family}).experts
    assert ours is not None
    assert ours.count == theirs.num_local_experts if family != "qwen2_moe" else theirs.num_experts
    assert ours.per_token == theirs.num_experts_per_tok
    assert ours.size == getattr(theirs, "moe_intermediate_size", 96)
    assert ours.normalizes == getattr(theirs, "norm_topk_prob", True)
    assert ours.shared_size == getattr(theirs, "shared_expert_intermediate_size", None)
    assert ours.layers == (0, 1, 2, 3)


def test_some_layers_stay_dense() -> None:
    config = parse_config(RAW | {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert config.experts is not None
    assert config.experts.layers == (1,)
    assert parse_config(RAW | {"mlp_only_layers": [0, 1, 2, 3]}).experts is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 129}, "num_experts_per_tok is 129 where at most the 128 experts was expected"),
        ({"num_experts": 8, "num_local_experts": 4}, "num_local_experts is 4 where 8, as many as num_experts, was"),
        ({"num_experts": 0}, "num_experts is 0 where a positive whole number was expected"),
        ({"mlp_only_layers": "1"}, "mlp_only_layers is '1' where a list of layers was expected"),
        ({"shared_expert_intermediate_size": 4}, "does not implement"),
        ({"model_type": "qwen2_moe", "use_sliding_window": True}, "does not implement"),
    ],
)
def test_invalid_mixtures_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config(RAW | change)


def test_parameter_names_equal_those_of_the_files(tmp_path: Path) -> None:
    for kind, (first, last) in {
        "mixtral": ("block_sparse_moe.experts.0.w1", "block_sparse_moe.experts.4.w2"),
        "qwen2-moe": ("mlp.experts.0.gate_proj", "mlp.shared_expert.down_proj"),
    }.items():
        make_model(kind, tmp_path / kind)
        decoder = Decoder(read_config(tmp_path / kind), device="meta")
        names = decoder.linear_names()
        assert names[4] == f"model.layers.0.{first}"
        assert names[-1] == f"model.layers.1.{last}"
        assert set(names) < {name for name, _ in decoder.named_modules()}
        assert not any(name.endswith((".gate", "shared_expert_gate")) for name in names)


def test_tokens_are_sorted_by_expert_and_come_back() -> None:
    chosen = torch.tensor([[0, 3], [1, 3], [0, 4], [3, 4]])
    counts = torch.zeros(6, dtype=torch.int64)
    rows, places, offsets = torch.ops.fp8serve.sort_by_expert(chosen, counts)
    assert counts.tolist() == [2, 1, 0, 3, 2, 0]
    assert offsets.tolist() == [2, 3, 3, 6, 8, 8]
    assert rows.tolist() == [0, 2, 1, 0, 1, 3, 2, 3]
    experts = torch.arange(6).repeat_interleave(counts)
    assert torch.equal(experts[places].view(4, 2), chosen)


@pytest.mark.parametrize("kind", MOE)
def test_routing_all_tokens_to_all_experts_changes_no_result(kind: str, tmp_path: Path) -> None:
    make_model(kind, tmp_path)
    model = load_servable(tmp_path, "bf16")
    with torch.no_grad():
        expected = all_logits(model, IDS)
        counts: dict[str, int] = {}
        for name, module in model.named_modules():
            if isinstance(module, Mixture):
                module.experts.route_to_all_experts = True
                for i, expert in enumerate(module.experts):
                    expert.register_forward_hook(
                        lambda m, args, out, key=f"{name}.{i}": counts.update({key: len(args[0])})
                    )
        actual = all_logits(model, IDS)
    assert set(counts.values()) == {len(IDS)}
    assert (
        actual - expected
    ).abs().max() < 0.05 * expected.std()  # the bits of a library's product may depend on the number of rows


NAMES = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"), "qwen": ("mlp", "gate_proj", "up_proj", "down_proj")}


def stacked(tensors: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """Returns the weights stacked as transformers holds them in memory."""
    block, gate, up, down = NAMES["mixtral" if kind in ("mixtral", "phimoe") else "qwen"]
    result = {name.replace(f".{block}.", ".mlp."): t for name, t in tensors.items() if ".experts." not in name}
    for layer in {name.split(".experts.")[0] for name in tensors if ".experts." in name}:
        count = len({name.split(".experts.")[1].split(".")[0] for name in tensors if f"{layer}.experts." in name})
        at = layer.replace(block, "mlp")
        parts = [[tensors[f"{layer}.experts.{e}.{leaf}.weight"] for leaf in (gate, up, down)] for e in range(count)]
        result[f"{at}.experts.gate_up_proj"] = torch.stack([torch.cat([g, u]) for g, u, _ in parts])
        result[f"{at}.experts.down_proj"] = torch.stack([d for *_, d in parts])
    return result


@pytest.mark.parametrize("kind", QWEN_LIKE)
def test_stacked_experts_are_read_as_separate_ones(kind: str, tmp_path: Path) -> None:
    make_model(kind, tmp_path)
    separate = {name: t.clone() for name, t in open_checkpoint(tmp_path).items()}
    save_file(stacked(load_file(tmp_path / "model.safetensors"), kind), tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint) == set(separate)
    assert all(torch.equal(checkpoint[name], tensor) for name, tensor in separate.items())


def test_experts_of_mixtral_under_the_names_of_others(tmp_path: Path) -> None:
    """llm-compressor calls every family's projections gate_proj, up_proj and down_proj."""
    make_model("mixtral", tmp_path)
    file = tmp_path / "model.safetensors"
    before = {name: tensor.clone() for name, tensor in open_checkpoint(tmp_path).items()}
    theirs = {".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
    renamed = {}
    for name, tensor in load_file(file).items():
        for own, other in theirs.items():
            name = name.replace(own, other)
        renamed[name] = tensor
    save_file(renamed, file)
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint) == set(before)
    assert all(torch.equal(checkpoint[name], tensor) for name, tensor in before.items())


def test_a_duplicate_expert_is_refused(tmp_path: Path) -> None:
    make_model("qwen3-moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    both = stacked(tensors, "qwen3-moe") | {k: v for k, v in tensors.items() if ".experts.0.gate" in k}
    save_file(both, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"holds .*experts\.0\.gate_proj\.weight twice"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("size", "fits"), [(128, True), (96, False)])
def test_scales_of_stacked_fp8_experts(size: int, fits: bool, tmp_path: Path) -> None:
    """Block scales of 128 x 128, as transformers writes them. No block may span two projections."""
    make_model("qwen3-moe", tmp_path, overrides={"moe_intermediate_size": size, "hidden_size": 128})
    tensors = stacked(load_file(tmp_path / "model.safetensors"), "qwen3-moe")
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, rows, columns = tensors[name].shape
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        scales = torch.rand(count, -(-rows // 128), -(-columns // 128)) + 0.5
        tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if not fits:
        with pytest.raises(ModelError, match="blocks with rows of both gate and up"):
            open_checkpoint(tmp_path)
        return
    checkpoint = open_checkpoint(tmp_path)
    first, scales = (tensors[f"model.layers.1.mlp.experts.gate_up_proj{end}"][5] for end in ("", "_scale_inv"))
    for leaf, rows, scale in (("gate_proj", first[:128], scales[0]), ("up_proj", first[128:], scales[1])):
        assert torch.equal(checkpoint[f"model.layers.1.mlp.experts.5.{leaf}.weight"], rows.float() * scale)


def test_static_scales_of_stacked_experts(tmp_path: Path) -> None:
    """Each expert has one input scale and two weight scales, for gate and up, as in transformers."""
    make_model("qwen3-moe", tmp_path)
    tensors = stacked(load_file(tmp_path / "model.safetensors"), "qwen3-moe")
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count = len(tensors[name])
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        halves = 2 if "gate_up" in name else 1
        tensors[f"{name}_scale_inv"] = torch.arange(1, 1 + count * halves).float().reshape(count, halves, 1) / 64
        tensors[f"{name}_activation_scale"] = 2.0 ** -torch.arange(count).float()
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint, owner = open_checkpoint(tmp_path), "model.layers.1.mlp.experts"
    for leaf, scale in (("gate_proj", 11 / 64), ("up_proj", 12 / 64), ("down_proj", 6 / 64)):
        matrix = checkpoint.quantized_matrix(f"{owner}.5.{leaf}")
        assert matrix is not None
        assert matrix.input_scale is not None
        assert (float(matrix.weight_scale_inv), float(matrix.input_scale)) == (scale, 32.0)
    assert {finding.check for finding in verify(tmp_path)} <= {
        "implausible",
        "stale",
    }  # no tensor is unexpected or missing


def test_a_converted_mixture_of_transformers_is_not_exported(tmp_path: Path) -> None:
    theirs = make_model("qwen3-moe", tmp_path / "model")
    with pytest.raises(ModelError, match="experts of Qwen3MoeForCausalLM are no linear layers in transformers"):
        export(theirs, tmp_path / "out", recipe=None)


def test_the_error_names_the_missing_expert(tmp_path: Path) -> None:
    make_model("qwen3-moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.6.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks the tensor model\.layers\.1\.mlp\.experts\.6\.up_proj\.weight"):
        open_checkpoint(tmp_path)


def test_a_stack_of_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    make_model("qwen3-moe", tmp_path)
    save_file(stacked(load_file(tmp_path / "model.safetensors"), "qwen3-moe"), tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": 6}))
    with pytest.raises(ModelError):
        open_checkpoint(tmp_path)


def fp4(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns values [..., K], packed blocks and scales of random MXFP4 numbers, computed independently of the
    product."""
    noise = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, shape, generator=noise)
    exponents = torch.randint(120, 126, (*shape[:-1], shape[-1] // 32), generator=noise)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    values = table[codes] * torch.exp2(exponents - 127.0).repeat_interleave(32, -1)
    pairs = codes.view(*shape[:-1], -1, 16, 2)
    return values, (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8), exponents.to(torch.uint8)


def write_gpt_oss(folder: Path) -> dict[str, torch.Tensor]:
    """Writes a model with MXFP4 experts in the published layout. Returns the experts' weights by fp8serve's names."""
    make_model("gpt-oss", folder, overrides={"hidden_size": 64, "intermediate_size": 96})
    tensors, expected = load_file(folder / "model.safetensors"), dict[str, torch.Tensor]()
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        owner, _, leaf = name.rpartition(".")
        count, inner, outer = tensors.pop(name).shape
        values, tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = fp4((count, outer, inner))
        for e in range(count):
            if leaf == "down_proj":
                expected[f"{owner}.{e}.down_proj.weight"] = values[e]
            else:
                expected[f"{owner}.{e}.gate_proj.weight"] = values[e, ::2]
                expected[f"{owner}.{e}.up_proj.weight"] = values[e, 1::2]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    return expected


def test_mxfp4_experts_are_read_exactly_and_stay_in_4_bits(tmp_path: Path) -> None:
    expected, checkpoint = write_gpt_oss(tmp_path), open_checkpoint(tmp_path)
    assert len(expected) == 4 * 7 * 3
    assert {f"{linear}.weight" for linear in checkpoint.quantized_linears} == expected.keys()
    for name, values in expected.items():
        assert torch.equal(checkpoint[name].float(), values)
    served: Any = load_servable(tmp_path)
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        layer = getattr(served.model.layers[0].mlp.experts[3], leaf)
        assert layer.is_4bit
        assert layer.weight_q.is_contiguous()
        weight = layer.quantized_weight.dequantize()
        assert torch.equal(weight, expected[f"model.layers.0.mlp.experts.3.{leaf}.weight"])
    assert not [finding for finding in verify(tmp_path) if finding.severity == "error"]


def test_mxfp4_experts_are_converted_to_single_ones(tmp_path: Path) -> None:
    expected = write_gpt_oss(tmp_path / "m")
    convert_format(tmp_path / "m", tmp_path / "out", "compressed-tensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mxfp4-pack-quantized"
    assert "model.layers.0.self_attn.q_proj" in config["ignore"]
    checkpoint = open_checkpoint(tmp_path / "out")
    assert {f"{linear}.weight" for linear in checkpoint.quantized_linears} == expected.keys()
    assert all(torch.equal(checkpoint[name], values) for name, values in expected.items())
    before, after = (all_logits(load_servable(tmp_path / folder), IDS) for folder in ("m", "out"))
    assert torch.equal(before, after)
    estimates = [estimate_weight_memory(tmp_path / folder, "stored").served for folder in ("m", "out")]
    assert estimates[0] == estimates[1]
    wide = estimate_weight_memory(tmp_path / "m", "bf16").served
    elements = sum(values.numel() for values in expected.values())
    assert wide - estimates[0] == elements * 2 - elements * 17 // 32


def test_a_dequantized_gpt_oss_that_kept_its_configuration_is_served_in_bf16(tmp_path: Path) -> None:
    make_model("gpt-oss", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    assert not isinstance(load_servable(tmp_path).get_submodule("model.layers.0.mlp.experts.3.up_proj"), FrozenLinear)


DAMAGE: dict[str, tuple[str, Any, str, str]] = {
    "exponent NaN": ("gate_up_proj_scales", lambda t: t.index_fill(1, torch.tensor(5), 255), "NaN or an exp", "nan"),
    "exponent too large": (
        "down_proj_scales",
        lambda t: t.index_fill(1, torch.tensor(5), 254),
        "NaN or an exp",
        "impl",
    ),
    "type of scales": ("down_proj_scales", lambda t: t.bfloat16(), "is bfloat16; the scales of 4-bit", "missing"),
    "type of blocks": ("down_proj_blocks", lambda t: t.to(torch.int8), r"has the shape \[64, 48\]", ""),
    "no scales": ("down_proj_scales", lambda t: None, "which is not that of 7 experts", "missing"),
    "no blocks": ("down_proj_blocks", lambda t: None, "down_proj_scales', whose meaning is not known", "unknown"),
    "order": ("down_proj_blocks", lambda t: t & 0x99, "", "impl"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_mxfp4_stacks_are_refused_or_found(name: str, tmp_path: Path) -> None:
    """A changed order of codes is no error of reading; `verify` finds it."""
    suffix, change, message, check = DAMAGE[name]
    write_gpt_oss(tmp_path / "m")
    file, key = tmp_path / "m" / "model.safetensors", f"model.layers.1.mlp.experts.{suffix}"
    tensors = load_file(file)
    changed = change(tensors.pop(key))
    save_file(tensors | ({} if changed is None else {key: changed}), file, {"format": "pt"})
    errors = [finding for finding in verify(tmp_path / "m") if finding.severity == "error"]
    assert not check or any(finding.check.startswith(check) for finding in errors)
    if message:
        for work in (load_servable, lambda path: convert_format(path, tmp_path / "out", "compressed-tensors")):
            with pytest.raises(ModelError, match=message):
                work(tmp_path / "m")
        assert not (tmp_path / "out").exists()


def test_mxfp4_logits_are_those_of_transformers(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path)
    how: dict[str, Any] = {"dtype": torch.bfloat16, "experts_implementation": "eager"}
    quantization = transformers.Mxfp4Config(dequantize=True)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantization, **how)
    with torch.no_grad():  # in FP32, because transformers' BF16 logits differ from these by 0.1
        expected = theirs.float()(torch.tensor([IDS])).logits[0]
        actual = all_logits(load_servable(tmp_path, "bf16", dtype=torch.float32), IDS)
    assert (actual - expected).square().mean().sqrt() < 1e-5 * expected.square().mean().sqrt()


@pytest.mark.parametrize("broken", ["scales", "blocks"])
def test_an_incomplete_mxfp4_stack_is_refused(broken: str, tmp_path: Path) -> None:
    write_gpt_oss(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.1.mlp.experts.down_proj_{broken}"
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"down_proj_blocks has the shape .* which is not that of 7 experts"):
        open_checkpoint(tmp_path)
