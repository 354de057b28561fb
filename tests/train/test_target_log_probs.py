"""`target_log_probs` computes a few rows at a time, and returns the same bits as `log_softmax` over all rows at once.
Its gradients and `summed_loss` are compared with `cross_entropy`."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from fp8serve.train import forward as module
from fp8serve.train.forward import summed_loss, target_log_probs


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOGITS_PER_CHUNK", 1000)  # three rows of 300 logits each


def make_case(rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns random logits [rows, 300] and a random target token for each row."""
    numbers = torch.Generator().manual_seed(rows)
    logits = 8 * torch.randn(rows, 300, generator=numbers)
    return logits.to(dtype).requires_grad_(), torch.randint(300, (rows,), generator=numbers)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rows", [0, 1, 3, 10])
def test_log_probs_in_chunks_equal_log_softmax_bit_for_bit(rows: int, temperature: float) -> None:
    logits, targets = make_case(rows)
    expected = torch.log_softmax(logits.float() / temperature, -1).gather(1, targets[:, None])[:, 0]
    actual = target_log_probs(logits, targets, temperature)
    assert torch.equal(actual, expected)
    assert actual.dtype == torch.float32


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradient_equals_that_of_cross_entropy(dtype: torch.dtype, temperature: float) -> None:
    logits, targets = make_case(10, dtype)
    loss_weights = torch.linspace(-1, 1, 10)
    (target_log_probs(logits, targets, temperature) * loss_weights).sum().backward()  # type: ignore[no-untyped-call]
    logits_fp64 = logits.detach().double().requires_grad_()
    losses = cross_entropy(logits_fp64 / temperature, targets, reduction="none")
    (-losses * loss_weights).sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits_fp64.grad is not None
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(
        logits.grad, logits_fp64.grad.to(dtype), rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
    )


def test_backward_may_run_twice_through_the_same_graph() -> None:
    logits, targets = make_case(7)
    loss = summed_loss(logits, targets)[0]
    grads = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*grads)


def test_hits_count_targets_that_are_the_most_probable_token() -> None:
    logits, targets = make_case(10)
    targets[:4] = logits[:4].argmax(-1)
    loss, hits = summed_loss(logits, targets)
    assert int(hits) == int((logits.argmax(-1) == targets).sum())
    torch.testing.assert_close(loss, cross_entropy(logits.float(), targets, reduction="sum"))
