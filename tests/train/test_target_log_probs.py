"""Log-probabilities some rows at a time: the bits of one op over all of them, and its gradient."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from fp8serve.train import forward as module
from fp8serve.train.forward import summed_loss, target_log_probs


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOGITS_PER_CHUNK", 1000)  # three rows of 300


def case(rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(rows)
    logits = 8 * torch.randn(rows, 300, generator=numbers)
    return logits.to(dtype).requires_grad_(), torch.randint(300, (rows,), generator=numbers)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rows", [0, 1, 3, 10])
def test_a_row_has_the_bits_of_log_softmax(rows: int, temperature: float) -> None:
    logits, targets = case(rows)
    whole = torch.log_softmax(logits.float() / temperature, -1).gather(1, targets[:, None])[:, 0]
    found = target_log_probs(logits, targets, temperature)
    assert torch.equal(found, whole)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_is_that_of_log_softmax(dtype: torch.dtype, temperature: float) -> None:
    logits, targets = case(10, dtype)
    shares = torch.linspace(-1, 1, 10)
    (target_log_probs(logits, targets, temperature) * shares).sum().backward()  # type: ignore[no-untyped-call]
    wide = logits.detach().double().requires_grad_()
    losses = cross_entropy(wide / temperature, targets, reduction="none")
    (-losses * shares).sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert wide.grad is not None
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(
        logits.grad, wide.grad.to(dtype), rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
    )


def test_a_graph_may_be_run_twice() -> None:
    logits, targets = case(7)
    loss = summed_loss(logits, targets)[0]
    grads = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*grads)


def test_hits_count_the_likeliest_tokens() -> None:
    logits, targets = case(10)
    targets[:4] = logits[:4].argmax(-1)
    loss, hits = summed_loss(logits, targets)
    assert int(hits) == int((logits.argmax(-1) == targets).sum())
    torch.testing.assert_close(loss, cross_entropy(logits.float(), targets, reduction="sum"))
