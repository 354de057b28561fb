"""config.json: the key names of transformers 4 and 5, and refusal of unsupported features."""

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import transformers

from fp8serve.errors import ModelError
from fp8serve.model.config.decoder import parse_config, read_config
from fp8serve.model.config.families import FAMILIES
from fp8serve.model.config.model_config import LatentSizes, ModelConfig
from fp8serve.model.config.reader import is_harmless
from tests.model.oracle import REQUIRED
from tests.model.published import CONFIGS

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": 64,
         "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "rms_norm_eps": 1e-5}  # fmt: skip
LINEAR = {"type": "linear", "factor": 2.0}


def qwen2(**values: Any) -> dict[str, Any]:
    return LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 2} | values


def test_key_names_of_transformers_4_and_5_give_the_same_config() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling | {"type": "llama3"}, "torch_dtype": "float16"}
    new = LLAMA | {"rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 5e5}, "dtype": "float16"}
    assert parse_config(old) == parse_config(new)
    rope = parse_config(new).layer_ropes[0]
    assert rope is not None
    assert rope.theta == 5e5
    assert parse_config(new).dtype == "float16"
    assert parse_config(old | new) == parse_config(new)


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family: str) -> None:
    theirs: Any = transformers.AutoConfig.for_model(family, hidden_size=4096, num_attention_heads=32)
    raw = {"model_type": family, "hidden_size": 4096, "intermediate_size": 1, "num_hidden_layers": 6,
           "num_attention_heads": 32}  # fmt: skip
    ours = parse_config(raw | REQUIRED.get(family, {}))
    names = {"num_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "rms_norm_eps": FAMILIES[family].eps_key}
    same = ("vocab_size", "max_position_embeddings", "tie_word_embeddings", "bos_token_id")
    if ours.latent is not None:
        assert ours.latent == latent(theirs)
        del names["num_kv_heads"], names["head_dim"]
    for name, their_name in (names | dict(zip(same, same, strict=True))).items():
        expected = getattr(theirs, their_name, None)
        assert getattr(ours, name) == (128 if (their_name, expected) == ("head_dim", None) else expected), name
    assert smallest_window(ours) == window_of(theirs)
    assert {rope.theta for rope in ours.layer_ropes if rope} == thetas(theirs)
    eos = theirs.eos_token_id
    assert ours.eos_token_ids == (tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,))
    rotary_fractions = {rope.get("partial_rotary_factor", 1.0) for rope in ropes(theirs)}
    assert ours.latent or {(ours.rotary_dim or ours.head_dim) / ours.head_dim} == rotary_fractions


def window_of(theirs: Any) -> int | None:
    """transformers' window, where a layer has it."""
    is_used = "sliding_attention" in (getattr(theirs, "layer_types", None) or ["sliding_attention"])
    return (getattr(theirs, "sliding_window", None) or None) if is_used else None


def latent(theirs: Any) -> LatentSizes:
    sizes = theirs.kv_lora_rank, theirs.qk_nope_head_dim, theirs.qk_rope_head_dim, theirs.v_head_dim
    return LatentSizes(theirs.q_lora_rank, *sizes)


def test_eos_of_generation_config_takes_precedence() -> None:
    assert parse_config(LLAMA | {"eos_token_id": 2}, {"eos_token_id": [7, 8]}).eos_token_ids == (7, 8)
    assert parse_config(LLAMA | {"eos_token_id": [2, 3]}, {}).eos_token_ids == (2, 3)
    assert parse_config(LLAMA | {"eos_token_id": None}, {}).eos_token_ids == ()


def ropes(theirs: Any) -> list[dict[str, Any]]:
    """transformers' rotary parameters, of each type of layer where these differ."""
    parameters = theirs.rope_parameters
    return [parameters] if "rope_theta" in parameters else list(parameters.values())


def thetas(theirs: Any) -> set[float]:
    return {rope["rope_theta"] for rope in ropes(theirs)}


def softmax_scale(theirs: Any, head_dim: int) -> float:
    scalar = getattr(theirs, "query_pre_attn_scalar", head_dim)
    return float(getattr(theirs, "attention_multiplier", scalar**-0.5))


def smallest_window(config: ModelConfig) -> int | None:
    return min((w for w in config.layer_windows if w is not None), default=None)


def test_windows_per_layer() -> None:
    on = {"use_sliding_window": True, "sliding_window": 8}
    assert parse_config(qwen2(**on, max_window_layers=1)).layer_windows == (None, 8)
    assert parse_config(qwen2(**on, layer_types=["sliding_attention", "full_attention"])).layer_windows == (8, None)
    assert parse_config(qwen2(sliding_window=8, max_window_layers=0)).layer_windows == (None, None)
    assert parse_config(LLAMA).layer_windows == (None, None)
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_key_value_heads": 2}
    assert parse_config(LLAMA | mistral | {"sliding_window": 8}).layer_windows == (8, 8)


def test_harmless_keys_are_ignored() -> None:
    notes = {"use_cache": True, "attention_dropout": 0.1, "_name_or_path": "x", "transformers_version": "5",
             "auto_map": {"AutoModel": "evil.py"}, "pretraining_tp": 2, "logit_scale": 1.0,
             "clip_qkv": None}  # fmt: skip
    assert parse_config(LLAMA | notes) == parse_config(LLAMA)


@pytest.mark.parametrize("repository", CONFIGS)
def test_published_models_are_read_as_transformers_reads_them(repository: str) -> None:
    raw = CONFIGS[repository]
    ours = parse_config(raw)
    theirs: Any = transformers.AutoConfig.for_model(**deepcopy(raw))  # transformers changes its argument
    if ours.latent is not None:
        assert (ours.num_layers, ours.latent) == (theirs.num_hidden_layers, latent(theirs))
        return
    assert (ours.num_layers, ours.num_kv_heads) == (theirs.num_hidden_layers, theirs.num_key_value_heads)
    assert ours.head_dim == getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    used = [rope for rope in ours.layer_ropes if rope]
    assert {rope.theta for rope in used} == thetas(theirs)
    assert {rope.scaling.kind if rope.scaling else "default" for rope in used} == {
        r["rope_type"] for r in ropes(theirs)
    }
    assert [rope is not None for rope in ours.layer_ropes] == [
        bool(x) for x in getattr(theirs, "no_rope_layers", ours.layer_ropes)
    ]
    assert ours.softmax_scale == softmax_scale(theirs, ours.head_dim)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert smallest_window(ours) == window_of(theirs)
    assert ours.max_position_embeddings == theirs.max_position_embeddings


def test_the_published_table_has_fifty_models_and_covers_every_family() -> None:
    assert len(CONFIGS) >= 50
    assert {c["model_type"] for c in CONFIGS.values()} == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_key_that_transformers_code_reads_is_ignored(family: str) -> None:
    """Reads the keys from transformers' modeling files. Only keys that matter in training may be ignored."""
    module = family.removesuffix("_text")
    source = Path(transformers.__path__[0], "models", module, f"modeling_{module}.py").read_text()
    keys = set(re.findall(r"config\.([a-z]\w*)", source)) | set(re.findall(r'config, "([a-z]\w*)"', source))
    assert {FAMILIES[family].eps_key, "num_hidden_layers"} <= keys
    in_training = {"use_cache", "resid_pdrop", "embd_pdrop", "hidden_dropout", "initializer_range",
                   "router_aux_loss_coef", "output_router_logits", "input_jitter_noise"}  # fmt: skip
    in_training |= {"router_jitter_noise"} - FAMILIES[family].optional
    ignored = {key for key in keys - FAMILIES[family].optional if is_harmless(key, "anything")}
    assert ignored == {"attention_dropout", "pad_token_id"} | (keys & in_training)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_mrope", True),
        ("rope_interleaved", True),
        ("is_causal", False),
        ("use_rope", False),
        ("scale_attn_weights", False),
        ("attention_multiplier", 1.0),
        ("residual_multiplier", 0.22),
        ("logit_scale", 0.0),
        ("activation", "gelu"),
        ("norm_type", "layernorm"),
        ("position_embedding_type", "alibi"),
        ("attn_logit_softcapping", 50.0),
        ("dual_chunk_attention_config", {"chunk_size": 262144}),
        ("quantization", {"bits": 4, "group_size": 64}),
        ("num_experts", 8),
        ("never_heard_of", 1),
    ],
)
def test_an_unknown_key_of_the_computation_is_refused_in_every_family(family: str, key: str, value: Any) -> None:
    if key in FAMILIES[family].optional:
        value = "not a number"
    raw = LLAMA | {"architectures": [FAMILIES[family].architecture], "model_type": family, "num_key_value_heads": 2}
    raw |= REQUIRED.get(family, {})
    parse_config(raw)
    with pytest.raises(ModelError, match=rf"(the key '{key}'|{key}) is"):
        parse_config(raw | {key: value})


def test_layer_types_that_match_the_windows_are_accepted() -> None:
    full, sliding = ["full_attention"] * 2, ["sliding_attention"] * 2
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_key_value_heads": 2}
    assert parse_config(LLAMA | {"layer_types": full}) == parse_config(LLAMA)
    windowed, plain = mistral | {"sliding_window": 8}, mistral | {"sliding_window": None}
    assert parse_config(windowed | {"layer_types": sliding}) == parse_config(windowed)
    assert parse_config(plain | {"layer_types": full}) == parse_config(plain)


@pytest.mark.parametrize(
    "raw",
    [
        LLAMA | {"layer_types": ["full_attention", "sliding_attention"]},
        LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_key_value_heads": 2}
        | {"sliding_window": 8, "layer_types": ["full_attention"] * 2},
        qwen2(use_sliding_window=False, sliding_window=8, layer_types=["sliding_attention"] * 2),
    ],
)  # fmt: skip
def test_layer_types_that_contradict_the_window_are_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="layer_types contradicts sliding_window"):
        parse_config(raw)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported; supported are LlamaForCausalLM"),
        ({"model_type": "gemma"}, "'LlamaForCausalLM', but its model_type builds GemmaForCausalLM"),
        ({"architectures": ["MistralForCausalLM"]}, "'MistralForCausalLM' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"final_logit_softcapping": 30.0}, "'final_logit_softcapping' is 30.0, which fp8serve does not implement"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "type 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 1.0}}, r"\['mscale'\]"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per layer type"),
        ({"rope_parameters": 3}, "rotary parameters are 3 where an object was expected"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope factor is null"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            "not above low_freq_factor",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": LINEAR},
            "rope_parameters and rope_scaling differ; remove one of them",
        ),
        ({"rope_theta": -1}, "rope_theta is -1"),
        (
            {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "rope_theta is 500000.0, and 10000.0 in rope_parameters; remove one of them",
        ),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0 where a positive whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers is true"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"hidden_size": None}, "hidden_size is null"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"hidden_size": 66}, "not a multiple of num_attention_heads"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes' where true or false"),
        ({"eos_token_id": "</s>"}, "where a token id was expected"),
        ({"eos_token_id": [-1]}, "where a token id was expected"),
        ({"torch_dtype": "int8"}, "dtype 'int8'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ],
)
def test_unsupported_features_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config(LLAMA | change)


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("phi3", {"rope_scaling": LONG | {"long_factor": [2.0] * 7}}, "rope long_factor is .* a list of 8 numbers"),
        ("phi3", {"rope_scaling": LONG | {"short_factor": [0.0] * 8}}, "rope short_factor is 0.0"),
        ("phi3", {"rope_scaling": LONG | {"short_factor": None}}, "rope short_factor is null"),
        ("phi3", {"rope_scaling": LONG | {"short_mscale": 1.1}}, "short_mscale"),
        ("phi3", {"partial_rotary_factor": 0.2}, "partial_rotary_factor 0.2 of heads of 16 elements is not supported"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5"),
        ("phi3", {"partial_rotary_factor": 0.01}, "partial_rotary_factor 0.01"),
        ("phi3", {"partial_rotary_factor": "half"}, "partial_rotary_factor is 'half'"),
        ("phi3", {"attention_bias": True}, "'attention_bias' is true"),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"partial_rotary_factor": 0.5}}},
            "partial_rotary_factor 0.5",
        ),
        ("cohere", {"use_parallel_block": False}, "'use_parallel_block' is false"),
        ("cohere", {"position_embedding_type": "rope"}, "'position_embedding_type' is 'rope'"),
        ("cohere", {"layer_switch": 3}, "'layer_switch' is 3"),
        ("cohere", {"use_qk_norm": "yes"}, "use_qk_norm is 'yes'"),
        ("cohere2", {"use_qk_norm": True}, "'use_qk_norm' is true"),
        (
            "apertus",
            {"hidden_act": "silu"},
            "hidden_act is 'silu'; for ApertusForCausalLM fp8serve supports 'xielu'",
        ),
        ("apertus", {"qk_norm": False}, "'qk_norm' is false"),
        ("apertus", {"post_norm": True}, "'post_norm' is true"),
        ("llama", {"hidden_act": "xielu"}, "hidden_act is 'xielu'; for LlamaForCausalLM"),
        ("phimoe", {"num_experts_per_tok": 3}, "is 3 where 2, the number of experts that sparsemixer chooses,"),
        ("phimoe", {"router_jitter_noise": -0.1}, "router_jitter_noise is -0.1 where a number from 0"),
        ("phimoe", {"lm_head_bias": "yes"}, "lm_head_bias is 'yes' where true or false"),
        ("phimoe", {"rope_scaling": LONG}, "rope short_mscale is null where a positive number was"),
        ("llama", {"lm_head_bias": True}, "'lm_head_bias' is true"),
        ("dots1", {"n_routed_experts": None}, "n_routed_experts is null where a positive whole number"),
        ("dots1", {"n_shared_experts": None}, "n_shared_experts is null where a positive whole number"),
        ("dots1", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1 where a whole number from 0 on"),
        ("glm4_moe", {"num_local_experts": 64}, "'num_local_experts' is 64"),
        ("glm4_moe", {"topk_group": 2}, "topk_group is 2 where at most n_group 1"),
        ("glm4_moe", {"use_qk_norm": 1}, "use_qk_norm is 1 where true or false"),
        ("stablelm", {"qk_layernorm": True}, "'qk_layernorm' is true"),
        ("stablelm", {"use_parallel_residual": 1}, "use_parallel_residual is 1"),
        ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": "x"}}, "llama_4_scaling_beta is 'x'"),
        ("llama", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
    ],
)
def test_features_that_a_family_does_not_support_are_refused(
    model_type: str, change: dict[str, Any], message: str
) -> None:
    raw = LLAMA | {"architectures": [FAMILIES[model_type].architecture], "model_type": model_type, "head_dim": 16}
    raw |= {"num_key_value_heads": 2} | REQUIRED.get(model_type, {})
    parse_config(raw)
    with pytest.raises(ModelError, match=message):
        parse_config(raw | change)


def test_wrong_layer_types_are_refused() -> None:
    with pytest.raises(ModelError, match="layer_types is not 2 of"):
        parse_config(qwen2(layer_types=["full_attention"]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "a list where an object"),
        ('{"hidden_size": 1, "hidden_size": 2}', "'hidden_size' appears twice"),
        ("[" * 100_000, "not valid JSON"),
        ("\udcff", "cannot be read"),
    ],
)
def test_an_invalid_config_is_refused_in_one_sentence(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=message) as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_directories_and_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist; give the path"):
        read_config(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelError, match="is not a directory"):
        read_config(tmp_path / "file")
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        read_config(tmp_path)


def test_generation_config_is_read_from_the_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 5]}))
    assert read_config(tmp_path).eos_token_ids == (4, 5)


def test_the_error_recognizes_mistrals_own_format(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text('{"dim": 64, "n_layers": 2}')
    with pytest.raises(ModelError, match=r"no config\.json; params\.json .* are Mistral's own layout, so download"):
        read_config(tmp_path)
