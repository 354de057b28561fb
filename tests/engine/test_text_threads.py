"""The texts of a batch are divided among threads: which texts each thread gets, that the vectors are bitwise the same,
and that other threads keep their settings."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp8serve.calibration.pipeline import calibrate_encoder
from fp8serve.engine.embedding import Embedder
from fp8serve.engine.text_encoder import MIN_THREAD_TOKENS, TextThreads, partition
from fp8serve.fp8.batch_invariant import has_batch_invariant_products
from fp8serve.model.network.encoder import Encoder
from tests.model.encoders import BERT, ids_of, make, pooled


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_shares_are_even_and_keep_the_order() -> None:
    assert partition([10, 10, 10, 10], 2) == [[0, 2], [1, 3]]
    assert partition([3, 50, 4, 40, 9], 2) == [[0, 1], [2, 3, 4]]
    assert partition([5, 6, 6], 3) == [[1], [2], [0]]


def test_workers_use_one_torch_thread_and_other_threads_keep_their_count() -> None:
    workers: list[tuple[str, int, bool]] = []
    both = threading.Barrier(2)

    def compute(indexes: Sequence[int]) -> Tensor:
        both.wait(60)  # wait until the other thread runs
        workers.append((threading.current_thread().name, torch.get_num_threads(), torch.is_grad_enabled()))
        return torch.tensor([[float(i)] for i in indexes])

    assert TextThreads().run([MIN_THREAD_TOKENS, MIN_THREAD_TOKENS + 1, MIN_THREAD_TOKENS + 2], compute)[
        :, 0
    ].tolist() == [0.0, 1.0, 2.0]
    assert {name for name, _, _ in workers} == {"texts_0", "texts_1"}
    assert all(count == 1 and not graded for _, count, graded in workers)
    later: list[int] = []
    other = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert (torch.get_num_threads(), later) == (2, [2])


@pytest.mark.parametrize(
    "lengths", [[MIN_THREAD_TOKENS, MIN_THREAD_TOKENS - 1], [10 * MIN_THREAD_TOKENS]], ids=["few tokens", "one text"]
)
def test_a_batch_too_small_for_every_thread_is_not_divided(lengths: list[int]) -> None:
    batches: list[Sequence[int]] = []

    def compute(indexes: Sequence[int]) -> Tensor:
        batches.append(list(indexes))
        return torch.zeros(len(indexes), 1)

    TextThreads().run(lengths, compute)
    assert batches == [list(range(len(lengths)))]


def test_an_exception_of_a_thread_is_raised() -> None:
    def compute(indexes: Sequence[int]) -> Tensor:
        raise ValueError(f"no {list(indexes)}")

    with pytest.raises(ValueError, match=r"no \[0\]"):
        TextThreads().run([MIN_THREAD_TOKENS, MIN_THREAD_TOKENS], compute)


@pytest.mark.parametrize("recipe", ["stored", "rowwise", "bf16"])
def test_vectors_keep_their_bits(tmp_path: Path, recipe: str) -> None:
    make(tmp_path / "m", BERT)
    pooled(tmp_path / "m", "mean_tokens")
    calibrate_encoder(tmp_path / "m", out=tmp_path / "fp8", samples=12, seq_len=24)
    folder = tmp_path / ("m" if recipe == "bf16" else "fp8")
    texts = [ids_of(n, seed=n).tolist() for n in (1, 40, 3, 24, 17, 40, 31, 9, 20)]
    divided = Embedder(folder, recipe=recipe)
    alone = Embedder(folder, recipe=recipe, threads=1)
    assert torch.equal(divided.embed(texts).vectors, alone.embed(texts).vectors)


@pytest.mark.skipif(not has_batch_invariant_products("cpu"), reason="the CPU kernels are not built")
@pytest.mark.parametrize("recipe", ["stored", "rowwise", "block"])
def test_joined_projections_keep_the_bits(tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "m", BERT)
    pooled(tmp_path / "m", "mean_tokens")
    calibrate_encoder(tmp_path / "m", out=tmp_path / "fp8", samples=12, seq_len=24)
    texts = [ids_of(n, seed=n).tolist() for n in (1, 40, 3)]
    joined = Embedder(tmp_path / "fp8", recipe=recipe)
    assert joined.encoder.model.get_submodule("encoder.layer.0.attention.self").qkv._joined is not None
    monkeypatch.setattr(Encoder, "join", lambda self: None)
    apart = Embedder(tmp_path / "fp8", recipe=recipe)
    assert torch.equal(joined.embed(texts).vectors, apart.embed(texts).vectors)
