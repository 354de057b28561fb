"""The transformers backend, for models without a family: what a class of transformers needs is detected, and classes
that need unsupported features are refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fp8serve.calibration.checks import check_model
from fp8serve.calibration.options import CalibrationOptions
from fp8serve.calibration.pipeline import calibrate
from fp8serve.cli import main
from fp8serve.doctor import examine
from fp8serve.engine.engine import Engine
from fp8serve.errors import ModelError, RecipeError
from fp8serve.fp8.recipe import from_name
from fp8serve.inspection import inspect
from fp8serve.model.checkpoint import load_servable, open_checkpoint
from fp8serve.model.config.decoder import parse_config, read_config
from fp8serve.model.config.model_config import COMPUTED_BY
from fp8serve.model.transformers_backend import class_trace as check
from fp8serve.model.transformers_backend.experts import TESTED_MIXTURES
from tests.compatibility.cases import BY_TRANSFORMERS, make
from tests.model.oracle import SIZES, all_logits, class_of, make_random, write_tokenizer


def parse(model_type: str, **more: Any) -> Any:
    return parse_config({"model_type": model_type, **SIZES, "pad_token_id": 2, **more})


def test_windows_heads_and_scales_are_those_of_the_class() -> None:
    config = parse("exaone4", num_hidden_layers=4, sliding_window=8, sliding_window_pattern=4)
    assert config.layer_windows == (8, 8, 8, None)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert parse("starcoder2", sliding_window=1024).layer_windows == (
        None,
        None,
    )  # the window is longer than the context
    assert parse("gpt_bigcode").num_kv_heads == 1
    assert parse("opt").softmax_scale == 1.0  # its queries are already scaled


OWN_ATTENTION = "computes its attention or its positions in a way of its own"


@pytest.mark.parametrize(
    ("model_type", "more", "why"),
    [
        ("bloom", {}, OWN_ATTENTION),
        ("mpt", {}, OWN_ATTENTION),
        ("gptj", {}, OWN_ATTENTION),
        ("xglm", {}, OWN_ATTENTION),
        ("codegen", {}, OWN_ATTENTION),
        ("falcon", {}, OWN_ATTENTION),
        ("mamba", {}, "in a MambaMixer"),
        ("mamba", {"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000 where at most 2000"),
        ("exaone4", {"num_hidden_layers": 10**10}, "num_hidden_layers is 10000000000 where at most 2000"),
        ("gpt2", {"n_layer": 10**8}, "n_layer is 100000000 where at most 2000"),
        ("falcon_h1", {}, "in a Conv1d"),
        ("granitemoe", {}, "is a mixture of experts without a model family"),
        ("flex_olmo", {}, "is a mixture of experts without a model family"),
        ("jetmoe", {}, "only of the types ernie4_5_moe and olmoe"),
        ("t5", {}, "transformers 5.* has no causal language model"),
        ("kimi_k2", {"architectures": ["DeepseekV3ForCausalLM"]}, "the model_type 'kimi_k2', which neither fp8serve"),
        ("gemma3n_text", {"num_kv_shared_layers": 0}, "changes the logits after"),
        (
            "granitemoehybrid",
            {"layer_types": ["attention"] * 2, "num_local_experts": 0, "num_experts_per_tok": 0},
            "control flow of transformers' class depends on the values",
        ),
        ("granitemoehybrid", {"layer_types": ["attention"] * 2}, "is a mixture of experts without a model family"),
        ("nanochat", {}, "changes the logits after"),
        ("modernbert-decoder", {}, "changes the hidden states before its head"),
        ("diffllama", {}, "4 times in 2 layers"),
        ("minicpm3", {}, "heads of"),
        ("helium", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        (
            "helium",
            {"architectures": ["HeliumForSequenceClassification"]},
            "but its model_type builds HeliumForCausalLM",
        ),
        (
            "my_own",
            {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}},
            r"'my_own', which neither .* transformers 5\S* knows; code",
        ),
    ],
)
def test_unsupported_models_are_refused_in_one_sentence(model_type: str, more: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=why) as refused:
        parse(model_type, **more)
    assert "\n" not in str(refused.value)
    assert str(refused.value).count(". ") == 0
    assert not re.search(
        r"[Tt]ensor\b(?! of)|torch|meta\b|NoneType|Error", str(refused.value).replace("its tensors", "")
    )


def test_every_supported_mixture_is_in_the_compatibility_tests() -> None:
    tested = {name for name, (_, options, _) in BY_TRANSFORMERS.items() if "num_experts_per_tok" in options}
    assert tested == set(TESTED_MIXTURES)


def test_a_class_that_changes_logits_is_refused_on_loading(tmp_path: Path) -> None:
    torch.manual_seed(0)
    options = SIZES | {"head_dim": 16, "pad_token_id": 2, "final_logit_softcapping": 5.0}
    model = transformers.VaultGemmaForCausalLM(transformers.VaultGemmaConfig(**options))
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="changes the logits"):
        load_servable(tmp_path, "bf16")


def test_a_class_whose_files_hold_buffers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If they were read as weights, they would be rounded, and trained."""
    mlp = transformers.models.helium.modeling_helium.HeliumMLP
    plain = mlp.__init__

    def with_buffer(self: Any, config: Any) -> None:
        plain(self, config)
        self.register_buffer("limit", torch.tensor(0.5))

    monkeypatch.setattr(mlp, "__init__", with_buffer)
    make("helium", tmp_path)
    with pytest.raises(ModelError, match=r"\S+\.mlp\.limit is a buffer in the checkpoint, which the transformers"):
        load_servable(tmp_path, "bf16")


def test_a_class_that_mixes_tokens_outside_attention_is_refused_on_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The MLP of this class reads the previous token, so that the first token of a sequence reads another sequence."""
    make("helium", tmp_path)
    mlp = transformers.models.helium.modeling_helium.HeliumMLP
    plain = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: plain(self, x + 3 * x.roll(1, 1)))
    with pytest.raises(ModelError, match="its hidden states with fp8serve's attention differ"):
        load_servable(tmp_path, "bf16")


def test_the_check_on_loading_compares_every_token_of_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token in fourteen is wrong: the first token of the second sequence reads the last one of the first."""
    make("ernie4_5_moe", tmp_path)
    mixture = transformers.models.ernie4_5_moe.modeling_ernie4_5_moe.Ernie4_5_MoeSparseMoeBlock
    plain, (first, _) = mixture.forward, check.CHECK_LENGTHS

    def leaking(self: Any, x: torch.Tensor) -> Any:
        before = torch.zeros_like(x)
        if x.shape[1] > max(check.CHECK_LENGTHS):
            before[:, first] = 3 * x[:, first - 1]
        return plain(self, x + before)

    monkeypatch.setattr(mixture, "forward", leaking)
    with pytest.raises(ModelError, match="its hidden states with fp8serve's attention differ"):
        load_servable(tmp_path, "bf16")


def test_the_check_on_loading_detects_another_choice_of_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router of this class chooses the smallest logits for packed sequences."""
    make("ernie4_5_moe", tmp_path)
    router = transformers.models.ernie4_5_moe.modeling_ernie4_5_moe.Ernie4_5_MoeTopKRouter
    plain = router.forward
    packed = sum(check.CHECK_LENGTHS)
    monkeypatch.setattr(router, "forward", lambda self, x: plain(self, -x if len(x) == packed else x))
    with pytest.raises(ModelError, match="its hidden states with fp8serve's attention differ"):
        load_servable(tmp_path, "bf16")


@torch.no_grad()
def test_a_mixture_with_few_active_experts_equals_its_class_in_fp32(tmp_path: Path) -> None:
    """In FP32, rounding does not change the choice of experts: logits are equal to rounding, and the 64 greedy tokens
    of the class are those that fp8serve would choose."""
    options = SIZES | {"num_experts": 7, "num_experts_per_tok": 2, "pad_token_id": 2}
    theirs = make_random("Olmoe", options, tmp_path, torch.float32)
    prompt = torch.randint(3, 256, (1, 60), generator=torch.Generator().manual_seed(1))
    ids = theirs.generate(prompt, max_new_tokens=64, min_new_tokens=64, do_sample=False)
    expected = theirs(ids).logits[0]
    actual = all_logits(load_servable(tmp_path, "bf16", dtype=torch.float32), ids[0].tolist())
    assert torch.equal(actual[59:-1, 2:].argmax(-1), expected[59:-1, 2:].argmax(-1))
    assert float((actual - expected).norm() / expected.norm()) < 8 * torch.finfo(torch.float32).eps


def test_without_transformers_an_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8serve.model.config.decoder.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"'helium' is not supported; .*pip install 'fp8serve\[transformers\]'"):
        parse("helium")


def test_a_family_imports_no_transformers(tmp_path: Path) -> None:
    import subprocess
    import sys

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    code = f"import sys; from fp8serve.model.config.decoder import read_config; read_config({str(tmp_path)!r});"
    code += "sys.exit('transformers' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_files_under_older_names_and_without_the_head_are_read(tmp_path: Path) -> None:
    make("gpt_neox", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "embed_out.weight" in tensors  # renamed in the class
    before = {name: tensor.clone() for name, tensor in open_checkpoint(tmp_path).items()}
    assert "lm_head.weight" in before
    bare = {name.removeprefix("gpt_neox."): tensor for name, tensor in tensors.items()}
    bare["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(2)  # of old files
    save_file(bare, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert all(torch.equal(checkpoint[name], tensor) for name, tensor in before.items())


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    make("helium", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.layers.0.mlp.extra.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"holds the tensor model\.layers\.0\.mlp\.extra\.weight"):
        open_checkpoint(tmp_path)


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("name", ["gpt_neox", "starcoder2", "opt", "gpt2", "olmoe", "ernie4_5_moe"])
@pytest.mark.parametrize("recipe", ["bf16", "current", "block"])
def test_an_answer_does_not_depend_on_its_neighbours(name: str, recipe: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    write_tokenizer(tmp_path)
    prompts = [[5, 6, 7], list(range(3, 150)), [9] * 40]
    options = {"max_new_tokens": 30, "temperature": 0.0, "ignore_eos": True, "logprobs": 3}
    together = Engine(tmp_path, recipe=recipe, max_batch_tokens=64).generate(prompts, **options)
    engine = Engine(tmp_path, recipe=recipe)
    alone = [engine.generate([prompt], **options)[0] for prompt in prompts]
    assert [completion.token_ids for completion in together] == [completion.token_ids for completion in alone]
    assert [completion.logprobs for completion in together] == [completion.logprobs for completion in alone]


def test_every_command_says_whether_transformers_computes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    make("helium", tmp_path)
    assert Engine(tmp_path, recipe="rowwise").info()["computed_by"] == "transformers"
    assert "fp8serve has no layers for HeliumForCausalLM" in caplog.text
    make("llama", tmp_path / "llama")
    by = {"transformers": tmp_path, "fp8serve": tmp_path / "llama"}
    for who, path in by.items():
        assert inspect(path)["computed_by"] == who
        assert examine(tmp_path, str(path))["model"]["computed_by"] == who
        capsys.readouterr()
        for command in ("inspect", "doctor"):
            assert main([command, str(path)]) == 0
        assert capsys.readouterr().out.count(COMPUTED_BY[who]) == 2  # type: ignore[index]
    assert Engine(tmp_path / "llama", recipe="rowwise").info()["computed_by"] == "fp8serve"


@pytest.mark.parametrize("name", ["gpt_neox", "gpt2"])
def test_scales_are_renamed_as_their_weights_are(name: str, tmp_path: Path) -> None:
    """transformers renames every "weight_g", with which the name "weight_global_scale" begins."""
    make(name, tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    calibrate(tmp_path / "model", out=tmp_path / "fp8", recipe=from_name("nvfp4-w4a16"), samples=2, seq_len=16)
    (completion,) = Engine(tmp_path / "fp8").generate([[5, 6, 7]], max_new_tokens=2, ignore_eos=True)
    assert len(completion.token_ids) == 2


def test_smoothing_is_refused(tmp_path: Path) -> None:
    make("opt", tmp_path)
    with pytest.raises(RecipeError, match=r"needs a model family, .* and OPTForCausalLM has none"):
        check_model(read_config(tmp_path), CalibrationOptions.of({"smoothing": 0.5}))


@pytest.mark.parametrize("name", ["opt", "gpt2"])
def test_gptq_is_nearer_than_rounding_to_nearest(name: str, tmp_path: Path) -> None:
    theirs, ids = make(name, tmp_path / "model"), list(range(3, 60))
    write_tokenizer(tmp_path / "model")
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].float()
    errors = []
    for rounding in ("nearest", "gptq"):
        out = tmp_path / rounding
        calibrate(tmp_path / "model", out=out, rounding=rounding, samples=16, seq_len=96, batch_size=4)
        errors.append(float((all_logits(load_servable(out), ids) - expected).norm()))
    assert errors[1] < errors[0]


def test_every_row_of_the_page_has_a_class() -> None:
    assert all(class_of(family) for family, *_ in BY_TRANSFORMERS.values())
    assert check.TOLERANCE < 1
