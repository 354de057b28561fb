"""256 greedy tokens are those of the reference ops, whatever the instruction set, the recipe, the cache, the path."""

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
    """Knows TEXT by heart, at every position that the tests reach."""
    path = tmp_path_factory.mktemp("sure")
    write_model(path, max_position_embeddings=CONTEXT, intermediate_size=128)
    pupil = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():  # the tests' weights are too large to learn from
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
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    found: dict[str, list[list[int]]] = json.loads(done.stdout)
    return found


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    if torch.ops.fp8serve.cpu_isa(request.param) != request.param:
        torch.ops.fp8serve.cpu_isa("best")
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    torch.ops.fp8serve.cpu_isa("best")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_all_at_once_alone_and_from_the_cache(
    level: str, mode: str, model: Path, expected: dict[str, list[list[int]]]
) -> None:
    """Eight in a batch, their prompts cut into chunks; one alone; and one whose beginning is in the cache."""
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
def test_every_layer_by_itself(mode: str, model: Path, expected: dict[str, list[list[int]]]) -> None:
    """Op by op, where serving runs joined ones."""
    runner = engine(model, mode)
    call_each_layer(runner)
    assert tokens(runner, PROMPTS[:2]) == expected[mode][:2]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_it_is_what_the_model_learnt(mode: str, expected: dict[str, list[list[int]]]) -> None:
    """So the tokens are sure: there is no tie that rounding could turn."""
    for prompt, said in zip(PROMPTS, expected[mode], strict=True):
        at = (TEXT * 2).index(bytes(prompt)) + len(prompt)
        assert bytes(said) == (TEXT * 5)[at : at + NEW]
