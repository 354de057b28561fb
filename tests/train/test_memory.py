"""The plan of a job counts the parameters of every family, and predicts the memory that training takes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fp8serve.model.adapters import adaptable_linears
from fp8serve.model.config.decoder import read_config
from fp8serve.model.network.decoder import Decoder
from fp8serve.train.memory import memory_estimate, parameter_counts
from fp8serve.train.optimizer import Optimizer
from tests.compatibility.cases import KINDS
from tests.model.oracle import make_model

from .conftest import Configure


@pytest.mark.parametrize("family", KINDS)
def test_parameter_counts_equal_the_networks(family: str, tmp_path: Path) -> None:
    make_model(KINDS[family], tmp_path)
    config = read_config(tmp_path)
    with torch.device("meta"):
        model = Decoder(config)
    names = {f"{name}.weight" for name in model.linear_names()}
    sizes = {name: p.numel() for name, p in model.named_parameters() if not name.endswith("bias")}
    linears, others = parameter_counts(config)
    assert linears == sum(sizes[name] for name in names)
    rest = sum(size for name, size in sizes.items() if name not in names)
    assert others == pytest.approx(rest, rel=0.06)  # the estimate leaves out small norms


@pytest.mark.parametrize("masters", ["model", "optimizer"])
@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_estimate_matches_the_memory_of_weights_gradients_and_moments(
    family: str, masters: str, tmp_path: Path, configure: Configure
) -> None:
    make_model(KINDS[family], tmp_path)
    config: Any = configure(master_weights=masters)
    model = Decoder(read_config(tmp_path), dtype=torch.float32)
    parameters = dict(model.named_parameters())
    optimizer = Optimizer(parameters, config)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.accumulate_in_fp32()
    sizes = {id(p): p.nbytes for p in (*optimizer.masters.values(), *parameters.values())}
    grads = sum(p.grad.nbytes for p in optimizer.masters.values() if p.grad is not None)
    if masters == "optimizer":  # the BF16 gradients of a microbatch coexist with the FP32 sums
        grads += sum(p.nbytes for p in parameters.values())
    optimizer.step(1e-3)
    moments = sum(t.nbytes for t in optimizer.state().values() if t.dim())
    plan = memory_estimate(read_config(tmp_path), config, 0, 0.0)
    assert plan["weights"] == pytest.approx(sum(sizes.values()) + moments, rel=0.03)
    assert plan["gradients"] == pytest.approx(grads, rel=0.03)


@pytest.mark.parametrize(("recipe", "size"), [("bf16", 2), ("rowwise", 2), ("block", 1), ("nvfp4", 4)])
def test_casts_take_the_bytes_of_the_recipe(recipe: str, size: int, tmp_path: Path, configure: Configure) -> None:
    make_model(KINDS["llama"], tmp_path)
    config, job = read_config(tmp_path), configure(recipe=recipe, amax_history_len=None)
    linears, others = parameter_counts(config)
    assert memory_estimate(config, job, 0, 0.0)["casts"] == 2 * others + size * linears


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_estimate_matches_the_memory_of_an_adapter(family: str, tmp_path: Path, configure: Configure) -> None:
    make_model(KINDS[family], tmp_path)
    config = read_config(tmp_path)
    job: Any = configure(amax_history_len=None, lora_rank=8, dora=True)
    adapter = sum(8 * (rows + cols) + rows for rows, cols in adaptable_linears(config).values())
    linears, others = parameter_counts(config)
    plan = memory_estimate(config, job, 0, 0.0)
    assert plan["gradients"] == pytest.approx(4 * adapter, rel=0.06)
    assert plan["weights"] == pytest.approx(linears + 2 * others + 12 * adapter, rel=0.06)
