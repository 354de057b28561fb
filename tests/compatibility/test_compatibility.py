"""Computes and trains with every architecture, compared with transformers; docs/compatibility.md shows the results."""

from pathlib import Path

import pytest
import torch

from fp8serve.engine.engine import Engine
from fp8serve.fp8.conversion import convert
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.recipe import from_name
from fp8serve.model.checkpoint import load_trainable
from fp8serve.model.network.experts import expert_row_counts
from fp8serve.train.forward import Forward, PackedBatch, summed_loss
from tests.compatibility.cases import make
from tests.compatibility.comparison import (
    CONTEXT,
    IDS,
    OF_EVERY_ARCHITECTURE,
    ModelDir,
    logits_of,
    ours,
    relative_error,
)

NEW = 64
RECIPES = ("delayed", "current", "rowwise", "block")
pytestmark = OF_EVERY_ARCHITECTURE


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("files", ["single", "sharded"])
def test_logits(name: str, files: str, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = make(name, tmp_path, **({"max_shard_size": "50KB"} if files == "sharded" else {}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (files == "sharded")
    actual = ours(tmp_path, "bf16", dtype)
    assert (
        relative_error(actual, logits_of(theirs.to(dtype) if dtype is torch.float32 else theirs))
        < 8 * torch.finfo(dtype).eps
    )


def test_greedy_tokens(name: str, model_of: ModelDir) -> None:
    directory, theirs = model_of(name)
    engine = Engine(directory, recipe="bf16", max_batch_tokens=48, max_num_seqs=2)
    prompt = IDS[: CONTEXT - NEW].tolist()
    tokens = engine.generate([prompt], max_new_tokens=NEW, temperature=0.0, ignore_eos=True)[0].token_ids
    assert len(tokens) == NEW
    expected = logits_of(theirs, torch.tensor([*prompt, *tokens]))[len(prompt) - 1 : -1]
    chosen = expected.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    assert ((expected.amax(-1) - chosen) < 0.15 * expected.std(-1)).all()


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_step(name: str, recipe: str, model_of: ModelDir) -> None:
    decoder = load_trainable(model_of(name)[0])
    convert(decoder, skip=(decoder.head_name,))
    forward, ids = Forward(decoder, from_name(recipe)), IDS[:64]
    positions = torch.arange(32).repeat(2)
    batch = PackedBatch(ids, positions, [32, 32], torch.arange(63), ids[1:])
    before = {n: p.detach().clone() for n, p in decoder.named_parameters()}
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-3, weight_decay=0.0)
    loss, _ = summed_loss(forward.logits(batch), batch.targets)
    (loss / 63).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert loss.isfinite()
    assert sum(isinstance(module, Linear) for module in decoder.modules()) == len(decoder.linear_names())
    rows = expert_row_counts(decoder)  # by linear; an expert without tokens does not change
    for parameter, weight in decoder.named_parameters():
        assert weight.isfinite().all(), parameter
        has_moved = not torch.equal(weight, before[parameter])
        is_trained = weight.requires_grad and rows.get(parameter.rpartition(".")[0]) != 0
        assert has_moved == is_trained, parameter
