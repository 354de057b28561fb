"""256 greedy tokens equal those of the reference ops for every instruction set, recipe and cache type, with fused and
plain layers."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fp8serve.fp8.batch_invariant import has_batch_invariant_products
from fp8serve.fp8.ops import LEVELS

from .long_greedy import CONTEXT, MODES, NEW, PROMPTS, TEXT, engine, tokens
from .tiny import call_each_layer, write_model, write_scales

pytestmark = pytest.mark.skipif(not has_batch_invariant_products("cpu"), reason="the CPU kernels are not built")
# Before torch loads the library, so that every op is the reference.
WITHOUT_KERNELS = """
import runpy, sys, torch
torch.ops.load_library = lambda path: None
sys.argv = ["long_greedy", sys.argv[1]]
runpy.run_module("tests.engine.long_greedy", run_name="__main__")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has memorized TEXT at every position that the tests reach."""
    path = tmp_path_factory.mktemp("sure")
    write_model(path, max_position_embeddings=CONTEXT, intermediate_size=128)
    pupil = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():  # the random weights of tests are too large to train
        for parameter in pupil.parameters():
            parameter.mul_(0.4 if parameter.dim() > 1 else 1.0)
    optimizer, steps = torch.optim.AdamW(pupil.parameters()), 160
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    text = torch.tensor(list(TEXT * 5))
    torch.manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(0, len(TEXT), (4,)).tolist()
        batch = torch.stack([text[at : at + NEW + 64] for at in starts])
        pupil(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
    pupil.to(torch.bfloat16).save_pretrained(path)
    write_scales(path, path / "made-up", kv=True)
    return path


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[list[int]]]:
    command = [sys.executable, "-c", WITHOUT_KERNELS, str(model)]
    process = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert process.returncode == 0, process.stderr
    answers: dict[str, list[list[int]]] = json.loads(process.stdout)
    return answers


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    if torch.ops.fp8serve.cpu_isa(request.param) != request.param:
        torch.ops.fp8serve.cpu_isa("best")
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    torch.ops.fp8serve.cpu_isa("best")


@pytest.mark.slow
@pytest.mark.pairwise(strength=1)  # tests/csrc compares every op at every level
@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_the_same_in_a_batch_alone_and_with_a_cached_prefix(
    level: str, mode: str, model: Path, expected: dict[str, list[list[int]]]
) -> None:
    """Eight prompts in a batch, prefilled in chunks; one alone; and one whose prefix is cached."""
    assert [len(row) for row in expected[mode]] == [NEW] * len(PROMPTS)
    runner = engine(model, mode)
    assert tokens(runner, PROMPTS) == expected[mode]
    before = runner.stats()["prefix_hit_tokens_total"]
    assert tokens(runner, PROMPTS[3:4], tenant="a stranger") == expected[mode][3:4]
    assert runner.stats()["prefix_hit_tokens_total"] == before
    assert tokens(runner, PROMPTS[3:4]) == expected[mode][3:4]
    assert runner.stats()["prefix_hit_tokens_total"] > before


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_tokens_of_layers_called_one_by_one(mode: str, model: Path, expected: dict[str, list[list[int]]]) -> None:
    """No projections are joined and no ops fused."""
    runner = engine(model, mode)
    call_each_layer(runner)
    assert tokens(runner, PROMPTS[:2]) == expected[mode][:2]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_the_memorized_text(mode: str, expected: dict[str, list[list[int]]]) -> None:
    """A model that has memorized a text has no near ties, which rounding could change."""
    for prompt, answer in zip(PROMPTS, expected[mode], strict=True):
        at = (TEXT * 2).index(bytes(prompt)) + len(prompt)
        assert bytes(answer) == (TEXT * 5)[at : at + NEW]
