"""Parts of sharded training: gradients of every kind of layer, the rows of each rank, files written from the parts of
all ranks, and the memory estimate."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fp8serve.fp8.conversion import convert
from fp8serve.fp8.recipe import fp8_gather_obstacle
from fp8serve.model.checkpoint import load_trainable
from fp8serve.model.config.decoder import read_config
from fp8serve.model.storage.shards import TensorParts, save_tensors
from fp8serve.ranks import Ranks
from fp8serve.train.config import TrainConfig
from fp8serve.train.forward import Forward, collate, mean_loss
from fp8serve.train.memory import memory_estimate
from fp8serve.train.optimizer import Optimizer, global_norm
from fp8serve.train.sharded.building import ShardedModel
from fp8serve.train.sharded.shards import rows_of, sharded_norm
from fp8serve.train.state import load_scaling, scaling_tensors
from fp8serve.train.train_step import GradientExchange
from tests.compatibility.cases import KINDS
from tests.fp8.distributed.ranks import on_ranks
from tests.model.oracle import make_model
from tests.train.conftest import Configure
from tests.train.test_forward import row

pytestmark = pytest.mark.distributed
BATCHES = (((1, 20), (2, 9)), ((3, 14),))


def _loss(index: int) -> Any:
    return mean_loss(collate([row(*about) for about in BATCHES[index]], "cpu"))


def _sharded_gradients(rank: int, config: str, model: str) -> dict[str, Tensor]:
    """Returns the gradients of this rank's shards, the norm of all gradients, and the scaling state."""
    settings = TrainConfig.from_json(config)
    sharded = ShardedModel(settings, Path(model), (), Ranks(rank, 2, is_sharded=True))
    if settings.recipe == "delayed":
        second = sharded.in_high_precision()
        second.observe(_loss(0))
        load_scaling(sharded.forward, scaling_tensors(second))
    exchange = sharded.exchange()
    with sharded.forward.accumulated_update():
        exchange.start_round(2)
        _loss(rank)(sharded.forward.logits).backward()
    exchange.finish_step()
    grads = {name: master.grad for name, master in sharded.shards.masters.items() if master.grad is not None}
    norm = torch.tensor(sharded_norm(sharded.shards, grads), dtype=torch.float64)
    return {name: grad.clone() for name, grad in grads.items()} | {"norm": norm} | scaling_tensors(sharded.forward)


def _replicated_gradients(rank: int, config: str, model: str) -> dict[str, Tensor]:
    """Returns the same for data parallelism, with the gradients of whole parameters."""
    settings, ranks = TrainConfig.from_json(config), Ranks(rank, 2)
    decoder = load_trainable(model)
    convert(decoder)
    forward = Forward(decoder, settings.fp8_recipe, ranks=ranks)
    if settings.recipe == "delayed":
        forward.observe(_loss(0))
    masters = Optimizer(dict(decoder.named_parameters()), settings).masters
    exchange = GradientExchange(list(masters.values()), ranks)
    with forward.accumulated_update():
        _loss(rank)(forward.logits).backward()
        exchange.finish_round()
    exchange.finish_step()
    grads = {name: master.grad for name, master in masters.items() if master.grad is not None}
    norm = torch.tensor(global_norm(grads), dtype=torch.float64)
    return {**grads, "norm": norm, **scaling_tensors(forward)}


def _sharded_and_replicated(rank: int, config: str, model: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return _sharded_gradients(rank, config, model), _replicated_gradients(rank, config, model)


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("recipe", ["delayed", "block"])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "deepseek_v3", "gemma2", "apertus", "phi3"])
def test_sharded_and_replicated_gradients_are_equal_in_every_kind_of_layer(
    family: str, recipe: str, tmp_path: Path, configure: Configure
) -> None:
    make_model(KINDS[family], tmp_path / "model")
    config = configure(recipe=recipe, fsdp=True).to_json()
    by_rank = on_ranks(2, _sharded_and_replicated, config, str(tmp_path / "model"))
    copies = by_rank[0][1]
    for rank, (shards, _) in enumerate(by_rank):
        assert shards.keys() == copies.keys()
        for name, tensor in shards.items():
            whole = copies[name]
            is_part = tensor.dim() > 0 and name.startswith(("model.", "lm_head.")) and tensor.shape != whole.shape
            begin, end = rows_of(len(whole), rank, 2) if is_part else (0, 0)
            assert torch.equal(tensor, whole[begin:end] if is_part else whole), name


def _sizes(rank: int, config: str, model: str) -> tuple[int, int, int]:
    """Returns the bytes of masters, gradients and moments of this rank after a step."""
    settings = TrainConfig.from_json(config)
    sharded = ShardedModel(settings, Path(model), (), Ranks(rank, 2, is_sharded=True))
    masters = sharded.shards.masters
    optimizer = Optimizer(masters, settings, lambda grads: sharded_norm(sharded.shards, grads))
    for master in masters.values():
        master.grad = torch.ones_like(master)
    grads = sum(master.nbytes for master in masters.values())
    optimizer.step(1e-3)
    moments = sum(t.nbytes for t in optimizer.state().values() if t.dim())
    return sum(master.nbytes for master in masters.values()), grads, moments


def test_each_of_two_processes_holds_half_as_estimated(tmp_path: Path, configure: Configure) -> None:
    make_model(KINDS["llama"], tmp_path / "model")
    config: Any = configure(fsdp=True)
    model = read_config(tmp_path / "model")
    whole, half = (memory_estimate(model, config, 100, 0.5, processes) for processes in (1, 2))
    sizes = on_ranks(2, _sizes, config.to_json(), str(tmp_path / "model"))
    for masters, _, moments in sizes:
        assert half["weights"] == pytest.approx(masters + moments, rel=0.06)
        assert half["weights"] == pytest.approx(whole["weights"] / 2, rel=0.01)
    assert memory_estimate(model, configure(), 100, 0.5, 2) == whole  # without fsdp, each process has a copy


def test_the_estimate_counts_all_casts_of_recipes_not_gathered_in_fp8(configure: Configure, model_dir: Path) -> None:
    model = read_config(model_dir)
    casts = {
        recipe: memory_estimate(model, configure(recipe=recipe, fsdp=True), 0, 0.0, 4)["casts"]
        for recipe in ("delayed", "current", "rowwise", "bf16")
    }
    assert casts["delayed"] == casts["current"] < casts["bf16"] < casts["rowwise"]


@pytest.mark.parametrize(
    ("recipe", "options", "why"),
    [
        ("delayed", {}, None),
        ("current", {}, None),
        ("bf16", {}, "the recipe is bf16"),
        ("rowwise", {}, "the recipe has many scales for a weight"),
        ("block", {}, "the recipe has many scales for a weight"),
        ("delayed", {"override_linear_precision": [False, True, False]}, "fprop or dgrad is in high precision"),
        ("delayed", {"override_linear_precision": [False, False, True]}, None),
    ],
)
def test_recipes_say_whether_their_weights_are_gathered_in_fp8(
    recipe: str, options: dict[str, Any], why: str | None, configure: Configure
) -> None:
    assert fp8_gather_obstacle(configure(recipe=recipe, recipe_options=options).fp8_recipe) == why


@pytest.mark.parametrize(("length", "size"), [(64, 2), (5, 4), (1, 3), (0, 2), (7, 7)])
def test_rows_of_the_ranks_are_those_of_fsdp(length: int, size: int) -> None:
    parts = list(torch.chunk(torch.arange(length), size)) + [torch.empty(0, dtype=torch.int64)] * size
    for rank in range(size):
        assert list(range(*rows_of(length, rank, size))) == parts[rank].tolist()


@pytest.mark.smoke
def test_a_file_written_from_parts_has_the_same_bytes(tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.uint8, torch.bfloat16, torch.int64, torch.float64, torch.int32, torch.float16)
    whole = {f"b.{dtype}"[2:]: torch.arange(12).reshape(4, 3).to(dtype) for dtype in dtypes}
    whole |= {"a": torch.tensor(2.5), "empty": torch.empty(0, 3), "flag": torch.tensor([True, False])}
    whole |= {f"f8.{dtype}": torch.ones(5).to(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}
    tensors: dict[str, Any] = {
        name: TensorParts(t.dtype, tuple(t.shape), lambda t=t: [t[:1], t[1:1], t[1:]]) if t.dim() == 2 else t  # type: ignore[misc]
        for name, t in whole.items()
    }
    save_file(whole, tmp_path / "whole", {"format": "pt"})
    save_tensors(tmp_path / "parts", tensors, {"format": "pt"})
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "parts").read_bytes()


def test_missing_parts_of_a_tensor_are_detected(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="The parts of w are 4 bytes too short"):
        save_tensors(tmp_path / "parts", {"w": TensorParts(torch.float32, (2,), lambda: [torch.zeros(1)])}, {})


def _norms(rank: int) -> list[float]:
    """Returns norms of sharded gradients: uneven rows, a vector, and values whose squares overflow FP32."""
    torch.manual_seed(0)
    whole = {"matrix": torch.randn(5, 33), "vector": torch.randn(7), "cube": torch.randn(3, 4, 6)}
    shards = _Shards(whole, Ranks(rank, 2))
    norms = []
    for factor in (1.0, 1e30):
        grads = {name: tensor * factor for name, tensor in whole.items()}
        mine = {name: tensor[slice(*rows_of(len(tensor), rank, 2))] for name, tensor in grads.items()}
        norms += [sharded_norm(shards, mine), global_norm(grads)]
    return norms


class _Shards:
    """The part of `Shards` that computing a norm needs."""

    def __init__(self, whole: dict[str, Tensor], ranks: Ranks) -> None:
        self.shapes = {name: tensor.shape for name, tensor in whole.items()}
        self.ranks = ranks

    def shard_range(self, name: str, length: int, rank: int) -> tuple[int, int]:
        rows = self.shapes[name][0]
        begin, end = rows_of(rows, rank, self.ranks.size)
        return begin * length // rows, end * length // rows


def test_the_norm_of_shards_equals_that_of_the_whole() -> None:
    for sharded, whole, sharded_far, whole_far in on_ranks(2, _norms):
        assert sharded == whole
        assert sharded_far == pytest.approx(whole_far, rel=1e-12)


def _each(rank: int) -> list[list[int]]:
    items: list[int] = []

    def square(item: int) -> int:
        items.append(item)
        return item * item

    return [Ranks(rank, 2, is_sharded=True).map([1, 2, 3], square), items]


def test_ranks_in_step_do_equally_many_items() -> None:
    assert on_ranks(2, _each) == [[[1, 4, 9], [1, 3]], [[1, 4, 9], [2, 3]]]
