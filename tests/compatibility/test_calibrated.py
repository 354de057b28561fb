"""Calibrates every architecture, serves it and writes it in every format; docs/compatibility.md shows the results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.studies import parity
from fp8serve.engine.engine import Engine
from fp8serve.engine.loading import FP8_CACHE_DIFFERS
from fp8serve.errors import RecipeError
from fp8serve.model.checkpoint import load_scales, load_servable, open_checkpoint
from fp8serve.model.config.wrappers import read_text_config
from fp8serve.model.export import write_calibrated, write_hf_directory
from fp8serve.model.formats import FORMATS, FileFormat
from tests.compatibility.cases import NOT_READ_BY_TRANSFORMERS
from tests.compatibility.comparison import IDS, OF_EVERY_ARCHITECTURE, ModelDir, logits_of, ours, relative_error

pytestmark = OF_EVERY_ARCHITECTURE


def test_calibrate_and_serve(name: str, model_of: ModelDir, calibrated: Callable[[str], Path]) -> None:
    (source, theirs), out = model_of(name), calibrated(name)
    state = load_scales(out / "scales.safetensors", out)
    names = load_servable(source, "bf16").linear_names()
    assert {f"{linear}.input" for linear in names} <= set(state.tensors)
    assert relative_error(ours(out), logits_of(theirs)) < 0.5
    engine = Engine(out, max_num_seqs=2, kv_cache_dtype="fp8")
    info = engine.loaded.info()
    assert (info["quantized_layers"], info["input_scales"]) == (len(names), "stored")
    sampling: dict[str, Any] = {"logprobs": 0, "prompt_logprobs": 0, "temperature": 0.0, "ignore_eos": True}
    done = engine.generate([IDS[:100].tolist()], max_new_tokens=8, **sampling)[0]
    assert len(done.token_ids) == 8
    row = [*IDS[:100].tolist(), *done.token_ids]
    if engine.loaded.differences == [
        FP8_CACHE_DIFFERS
    ]:  # training has the bits of the server's log-probabilities, for prompt and answer
        logprobs = [item.logprob for part in (done.prompt_logprobs, done.logprobs) for item in part or ()]
        assert logprobs == parity.training(out, "delayed", "fp8")([row])[0].tolist()
    else:
        with pytest.raises(RecipeError, match="would differ from a server's"):
            parity.training(out, "delayed", "fp8")([row])


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("format_", FORMATS)
def test_formats(name: str, format_: FileFormat, calibrated: Callable[[str], Path], tmp_path: Path) -> None:
    out = calibrated(name)
    expected, state = ours(out), load_scales(out / "scales.safetensors", out)
    write_calibrated(tmp_path / "out", out, state, format=format_)
    assert torch.equal(ours(tmp_path / "out"), expected)
    again = open_checkpoint(tmp_path / "out")
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
