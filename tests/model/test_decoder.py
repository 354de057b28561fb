"""The decoder against transformers on random models.

With the reference ops logits are equal bit for bit, because fp8serve rounds where transformers rounds. The kernels sum
the squares of a norm in another order and have their own exponential, so that their logits are equal up to rounding.
In a few families, logits of the reference ops also differ by rounding (`ROUNDED`).
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses

from fp8serve.fp8.ops import reference
from fp8serve.model.checkpoint import open_checkpoint
from fp8serve.model.config.decoder import read_config
from fp8serve.model.network import fusion, norms
from fp8serve.model.network.decoder import Decoder
from tests.model.oracle import MODELS, MSCALES, all_logits, make_model

# OLMo and Cohere rotate queries and keys in FP32, Ministral 3 scales queries after that; where pairs are neighbours or
# only a part of a head is rotated, a product of a query and a key is summed in another order. DeepSeek's product
# is summed over latent vectors.
ROUNDED = ("olmo", "cohere", "ministral3", "glm", "stablelm", "phi3-long", "deepseek")
IDS = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def load(directory: Path, dtype: torch.dtype) -> Decoder:
    model = Decoder(read_config(directory), dtype=dtype)
    missing, unexpected = model.load_state_dict(dict(open_checkpoint(directory)), strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    return model.eval()


def both_logits(kind: str, dtype: torch.dtype, path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logits of fp8serve and of transformers, each FP32 [T, vocab]."""
    theirs: Any = make_model(kind, path, dtype)
    with torch.no_grad():
        return all_logits(load(path, dtype), IDS), theirs(torch.tensor([IDS])).logits[0].float()


# transformers keeps gpt-oss' scores in BF16.
EXACT = [(kind, torch.bfloat16) for kind in MODELS if kind != "gpt-oss" and not kind.startswith(ROUNDED)]
# transformers computes an expert's gate and up as one product, whose FP32 sums have another order.
EXACT += [(kind, torch.float32) for kind, _ in EXACT if "num_experts_per_tok" not in MODELS[kind][1]]


@pytest.mark.parametrize(("kind", "dtype"), EXACT, ids=str)
def test_logits_of_the_reference_equal_transformers(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norms, "rms_norm", reference.rms_norm)
    monkeypatch.setitem(fusion.GATED_ACTIVATIONS, "silu", reference.silu_mul)
    monkeypatch.setitem(fusion.GATED_ACTIVATIONS, "gelu_tanh", lambda gate, up: F.gelu(gate, approximate="tanh") * up)
    actual, expected = both_logits(kind, dtype, tmp_path)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kind", MODELS)
def test_logits_equal_transformers_to_rounding(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    actual, expected = both_logits(kind, dtype, tmp_path)
    apart = (actual - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert apart < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_greedy_tokens_equal_transformers(kind: str, tmp_path: Path) -> None:
    theirs: Any = make_model(kind, tmp_path)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "use_cache": False}
    expected = theirs.generate(torch.tensor([IDS[:7]]), **options)[0].tolist()
    model, ids = load(tmp_path, torch.bfloat16), IDS[:7]
    with torch.no_grad():
        while len(ids) < len(expected):
            ids = [*ids, int(all_logits(model, ids)[-1].argmax())]
    assert ids == expected


def test_linear_names_are_the_seven_projections_of_each_layer(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    names = Decoder(read_config(tmp_path), device="meta").linear_names()
    assert len(names) == 14
    assert names[0] == "model.layers.0.self_attn.q_proj"
    assert names[-1] == "model.layers.1.mlp.down_proj"


def test_meta_decoder_allocates_nothing_and_has_the_same_parameters(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    config = read_config(tmp_path)
    real, meta = Decoder(config), Decoder(config, device="meta")
    assert {n: p.shape for n, p in real.named_parameters()} == {n: p.shape for n, p in meta.named_parameters()}
    assert {p.device.type for p in meta.parameters()} == {"meta"}


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    make_model("llama-tied", tmp_path)
    model = Decoder(read_config(tmp_path))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("longest", [64, 65])
def test_phi_moe_takes_long_factors_beyond_the_trained_context(
    longest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publisher's code does so; transformers' class uses the short factors, with the cos scale of the long ones."""
    parameters = MSCALES | {"long_factor": [1.5, 2.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0]}
    theirs: Any = make_model("phimoe", tmp_path, torch.float32, {"rope_parameters": parameters})
    rotary = theirs.model.rotary_emb
    plain = rotary.rope_init_fn
    monkeypatch.setattr(rotary, "rope_init_fn", lambda config: plain(config, seq_len=longest))
    ids = torch.randint(3, 256, (longest,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.no_grad():
        actual, expected = all_logits(load(tmp_path, torch.float32), ids), theirs(torch.tensor([ids])).logits[0]
    assert (actual - expected).norm() < 8 * torch.finfo(torch.float32).eps * expected.norm()
    assert read_config(tmp_path).layer_ropes[0].scaling.long_attention_factor == 1.3  # type: ignore[union-attr]
