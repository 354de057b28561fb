"""The invariant mode from end to end: an engine's answers do not depend on batch or chunks, and its log-probabilities
are those of training. On the emulated GPU, the CPU's Python calls the CUDA kernels."""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from fp8serve.engine import loading
from fp8serve.engine.engine import Engine
from fp8serve.engine.output import Completion
from fp8serve.fp8 import batch_invariant, frozen, fused
from fp8serve.fp8.conversion import convert
from fp8serve.fp8.ops import OPS, compiled_for
from fp8serve.fp8.ops.fused_casts import rms_norm_quantize_rows, silu_mul_quantize_rows
from fp8serve.fp8.ops.libraries import INVARIANT_SWITCH
from fp8serve.fp8.recipe import DelayedScaling, Recipe, from_name
from fp8serve.model.checkpoint import load_trainable
from fp8serve.train import state
from fp8serve.train.data import Row
from fp8serve.train.forward import Forward, collate
from tests.cuda import emulated
from tests.cuda.conftest import DEVICES, kernels_on
from tests.engine.tiny import write_model, write_scales

SIZES = {"hidden_size": 256, "intermediate_size": 1280, "num_attention_heads": 4, "num_key_value_heads": 2}
PROMPTS = [[5, 250, 7, 7, 9, 100, 3], list(range(70)), [8, 9], list(range(20, 0, -1))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_model(tmp_path_factory.mktemp("invariant") / "model", **SIZES)
    write_scales(path, path / "scales.safetensors", kv=True, shared=False)
    return path


def use_emulated_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every module call the emulated CUDA kernels, and takes the paths of a GPU where they differ."""
    compiled, kernels = compiled_for("cuda"), emulated.ops()
    for module in [m for name, m in sys.modules.items() if name.startswith("fp8serve.") and "selfcheck" not in name]:
        for name, value in list(vars(module).items()):
            if isinstance(value, torch._ops.OpOverload) and value.namespace == "fp8serve":
                op = value._opname
                if op in compiled and op in OPS:
                    monkeypatch.setattr(module, name, getattr(kernels, op).default)
    for name, cast_rows in (("_norm_rows", rms_norm_quantize_rows), ("_silu_mul_rows", silu_mul_quantize_rows)):
        monkeypatch.setattr(frozen, name, partial(cast_rows, kernels))
    monkeypatch.setattr(loading, "modules_to_pack", lambda *models: [])  # packed weights are for a CPU
    monkeypatch.setattr(frozen, "_is_on_gpu", lambda x: True)
    monkeypatch.setattr(fused, "_is_on_gpu", lambda x: True)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    kernels = kernels_on(request.param)
    here = torch.zeros(1, device=kernels.device)
    default = kernels.ops.gemm_kernels(here, "")
    if kernels.device == "cuda":
        batch_invariant.use_invariant_kernels("cuda")
    else:
        emulated.emulator().set_chip(90, 4, 227 * 1024)
        use_emulated_kernels(monkeypatch)
        kernels.ops.gemm_kernels(here, "+".join([default, INVARIANT_SWITCH]).strip("+"))
    yield kernels.device
    kernels.ops.gemm_kernels(here, default or "none")
    batch_invariant._invariant_devices.discard("cuda")
    if kernels.device == "cpu":
        emulated.emulator().set_chip(89, 4, 99 * 1024)


def complete(model: Path, device: str, prompts: list[list[int]], **options: Any) -> list[Completion]:
    engine = Engine(model, device=device, invariant=True, num_blocks=64, max_num_seqs=4, **options)
    return engine.generate(prompts, max_new_tokens=5, temperature=0.0, logprobs=3, prompt_logprobs=0, ignore_eos=True)


def scores(completion: Completion) -> list[float]:
    """Returns the log-probabilities of all tokens after the first."""
    return [item.logprob for item in (*(completion.prompt_logprobs or ()), *(completion.logprobs or ()))]


def trained(recipe: Recipe | None, model: Path, device: str, ids: list[int], *, grad: bool) -> list[float]:
    """Returns the log-probabilities in a training batch that also has other rows."""
    decoder = load_trainable(model)
    if recipe is not None:
        convert(decoder)
    forward = Forward(decoder.to(device), recipe)
    state.seed_scaling(forward, model)
    assert forward.differences() == []
    rows = [Row(np.array(row, np.int32), np.ones(len(row), bool)) for row in (PROMPTS[3], ids, PROMPTS[1])]
    with torch.set_grad_enabled(grad):
        values = forward.log_probs(collate(rows, device))
    begin = len(PROMPTS[3]) - 1
    return values[begin : begin + len(ids) - 1].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("recipe", "cache"), [("stored", "bf16"), ("stored", "fp8"), ("rowwise", "bf16")])
def test_answers_do_not_depend_on_batch_or_chunks(device: str, model: Path, recipe: str, cache: Any) -> None:
    options = {"recipe": recipe, "kv_cache_dtype": cache}
    if device == "cpu":
        emulated.emulator().launches()
    together = complete(model, device, PROMPTS, max_batch_tokens=256, max_prefill_tokens=256, **options)
    if device == "cpu":
        names = " ".join(name for name, _ in emulated.emulator().launches())
        assert "multiply_tall" in names
        assert "gemm_stream" in names
        assert "gemm_tile" not in names
    chunked = complete(model, device, PROMPTS, max_batch_tokens=20, max_prefill_tokens=20, **options)
    alone = [complete(model, device, [prompt], max_batch_tokens=256, **options)[0] for prompt in PROMPTS]
    assert together == chunked == alone


@pytest.mark.parametrize("name", ["stored", "rowwise"])
def test_log_probabilities_are_those_of_training(device: str, model: Path, name: str) -> None:
    recipe = DelayedScaling() if name == "stored" else from_name(name)
    completions = complete(model, device, PROMPTS, recipe=name, max_batch_tokens=256, kv_cache_dtype="bf16")
    for prompt, served in zip(PROMPTS, completions, strict=True):
        for grad in (False, True):
            assert trained(recipe, model, device, [*prompt, *served.token_ids], grad=grad) == scores(served)
