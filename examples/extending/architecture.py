"""Add an architecture: Seed-OSS, as a row of the table of families, held to transformers' own logits.

Seed-OSS is a Llama whose q, k and v have a bias and whose o has none. Here it has no family, so transformers' class
computes it; with this row fp8serve's own decoder does. docs/extending/architecture.md explains each step.

    python examples/extending/architecture.py
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from fp8serve.fp8.attention import causal_attention
from fp8serve.model.checkpoint import open_checkpoint
from fp8serve.model.config.decoder import read_config
from fp8serve.model.config.families import _COMMON, FAMILIES, Family
from fp8serve.model.network.decoder import Decoder, make_attend

# The row. In the library it stands in fp8serve/model/config/families.py.
SEED_OSS = Family(
    "SeedOssForCausalLM",
    _COMMON | {"vocab_size": 155136, "max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128,
               "attention_bias": True, "bos_token_id": 0, "eos_token_id": 2},
    optional=frozenset({"attention_bias", "mlp_bias"}),
    fixed={"attention_out_bias": False, "residual_dropout": 0.1},
    out_bias=False,
)  # fmt: skip

IDS = list(range(3, 40))


def write_random_model(directory: Path) -> Any:
    """A tiny random model, written by transformers' own class, which is returned. Norms and biases start at 1 and 0,
    where a missing term would not show, so they are moved."""
    torch.manual_seed(0)
    config = transformers.SeedOssConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
    )  # fmt: skip
    model = transformers.SeedOssForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return model


def our_logits(directory: Path) -> torch.Tensor:
    """FP32 [T, vocab]: the directory read and computed by fp8serve's own decoder."""
    model = Decoder(read_config(directory), dtype=torch.float32)
    missing, unexpected = model.load_state_dict(dict(open_checkpoint(directory)), strict=False)
    assert not missing, missing
    assert not unexpected, unexpected  # a bias that the row denies would be here

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return causal_attention(q, k, v, [len(q)], *model.attention_options(layer))

    with torch.no_grad():
        return model.logits(model(torch.tensor(IDS), torch.arange(len(IDS)), make_attend(attend)))


def main() -> None:
    FAMILIES["seed_oss"] = SEED_OSS
    with TemporaryDirectory() as folder:
        theirs = write_random_model(Path(folder))
        ours = our_logits(Path(folder))
        with torch.no_grad():
            expected = theirs(torch.tensor([IDS])).logits[0]
    print(f"largest difference of a logit {float((ours - expected).abs().max()):.1e}")
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()
