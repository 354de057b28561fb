"""Runs every architecture through every stage, compared with transformers; docs/compatibility.md shows the results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from benchmarks.studies import parity
from fp8serve.calibration.pipeline import calibrate
from fp8serve.engine.engine import Engine
from fp8serve.engine.loading import FP8_CACHE_DIFFERS
from fp8serve.errors import RecipeError
from fp8serve.fp8.conversion import convert
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.recipe import DelayedScaling, from_name
from fp8serve.model.checkpoint import load_scales, load_servable, load_trainable, open_checkpoint
from fp8serve.model.config.wrappers import read_text_config
from fp8serve.model.export import write_calibrated, write_hf_directory
from fp8serve.model.formats import FORMATS
from fp8serve.model.network.experts import expert_row_counts
from fp8serve.train.forward import Forward, PackedBatch, summed_loss
from tests.compatibility.cases import NAMES, NOT_READ_BY_TRANSFORMERS, make
from tests.model.oracle import SIZES, all_logits, write_tokenizer

CONTEXT: int = SIZES["max_position_embeddings"]  # type: ignore[assignment]
NEW = 64
IDS = torch.randint(3, 256, (CONTEXT,), generator=torch.Generator().manual_seed(1))
RECIPES = ("delayed", "current", "rowwise", "block")
# Smoke tests: a dense family, a mixture, latent attention, and one that transformers computes.
SAMPLES = ("llama", "qwen3_moe", "deepseek_v3", "gpt2")
pytestmark = [
    pytest.mark.slow,
    # scope="module" runs all tests of one model before the next model
    pytest.mark.parametrize(
        "name",
        [pytest.param(name, marks=pytest.mark.smoke) if name in SAMPLES else name for name in NAMES],
        scope="module",
    ),
]
ModelDir = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelDir:
    """Returns (directory with a tokenizer, transformers' model) by name; tests must not change them."""
    cache: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in cache:
            cache.clear()
            out = tmp_path_factory.mktemp(name)
            cache[name] = out, make(name, out)
            write_tokenizer(out)
        return cache[name]

    return get


@pytest.fixture(scope="module")
def calibrated(model_of: ModelDir, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    cache: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in cache:
            cache[name] = tmp_path_factory.mktemp("out") / name
            recipe, sizes = DelayedScaling(amax_history_len=4), {"samples": 4, "seq_len": 48, "batch_size": 4}
            calibrate(model_of(name)[0], out=cache[name], recipe=recipe, kv_cache=True, all_experts=True, **sizes)
        return cache[name]

    return get


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Returns the root mean square of the difference, relative to that of the expected values."""
    return float((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@torch.no_grad()
def logits_of(theirs: Any, ids: Tensor = IDS[:60]) -> Tensor:
    logits: Tensor = theirs(ids[None]).logits[0].float()
    return logits


@torch.no_grad()
def ours(directory: Path, recipe: Any = "stored", dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return all_logits(load_servable(directory, recipe, dtype=dtype), IDS[:60].tolist())


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("files", ["single", "sharded"])
def test_logits(name: str, files: str, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = make(name, tmp_path, **({"max_shard_size": "50KB"} if files == "sharded" else {}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (files == "sharded")
    logits = ours(tmp_path, "bf16", dtype)
    assert (
        relative_error(logits, logits_of(theirs.to(dtype) if dtype is torch.float32 else theirs))
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


def test_calibrate_and_serve(name: str, model_of: ModelDir, calibrated: Callable[[str], Path]) -> None:
    (source, theirs), out = model_of(name), calibrated(name)
    state = load_scales(out / "scales.safetensors", out)
    names = load_servable(source, "bf16").linear_names()
    assert {f"{linear}.input" for linear in names} <= set(state.tensors)
    assert relative_error(ours(out), logits_of(theirs)) < 0.5
    engine = Engine(out, max_num_seqs=2, kv_cache_dtype="fp8")
    info = engine.loaded.info()
    assert (info["fp8_layers"], info["input_scales"]) == (len(names), "stored")
    sampling: dict[str, Any] = {"logprobs": 0, "prompt_logprobs": 0, "temperature": 0.0, "ignore_eos": True}
    completion = engine.generate([IDS[:100].tolist()], max_new_tokens=8, **sampling)[0]
    assert len(completion.token_ids) == 8
    row = [*IDS[:100].tolist(), *completion.token_ids]
    if engine.loaded.differences == [
        FP8_CACHE_DIFFERS
    ]:  # training has the bits of the server's log-probabilities, for prompt and answer
        logprobs = [item.logprob for part in (completion.prompt_logprobs, completion.logprobs) for item in part or ()]
        assert logprobs == parity.training(out, "delayed", "fp8")([row])[0].tolist()
    else:
        with pytest.raises(RecipeError, match="would differ from a server's"):
            parity.training(out, "delayed", "fp8")([row])


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


def test_formats(name: str, calibrated: Callable[[str], Path], tmp_path: Path) -> None:
    out = calibrated(name)
    expected, state = ours(out), load_scales(out / "scales.safetensors", out)
    for format_ in FORMATS:
        write_calibrated(tmp_path / format_, out, state, format=format_)
        assert torch.equal(ours(tmp_path / format_), expected)
        again = open_checkpoint(tmp_path / format_)
        assert all(torch.equal(again[key], tensor) for key, tensor in open_checkpoint(out).items())


def test_transformers_reads_what_is_written(
    name: str, model_of: ModelDir, calibrated: Callable[[str], Path], tmp_path: Path
) -> None:
    if name in NOT_READ_BY_TRANSFORMERS:
        pytest.skip("transformers reads the experts of this family stacked only, and they are written one by one")
    source, theirs = model_of(name)
    auto: Any = transformers.AutoModelForCausalLM
    write_hf_directory(tmp_path / "bf16", read_text_config(source), open_checkpoint(source))
    how = {f"{part}_implementation": getattr(theirs.config, f"_{part}_implementation") for part in ("attn", "experts")}
    again = auto.from_pretrained(tmp_path / "bf16", dtype=torch.bfloat16, **how).eval()
    assert torch.equal(logits_of(again), logits_of(theirs))
    quantization = transformers.CompressedTensorsConfig(dequantize=True)
    with pytest.warns(UserWarning, match="loading attributes .* will be overwritten"):
        fp8 = auto.from_pretrained(
            calibrated(name), dtype=torch.float32, quantization_config=quantization, **how
        ).eval()
    assert (
        relative_error(ours(calibrated(name), "bf16", torch.float32), logits_of(fp8))
        < 32 * torch.finfo(torch.float32).eps
    )
