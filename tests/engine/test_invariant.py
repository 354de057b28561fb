"""Rows do not depend on each other, whatever the matrix routine does."""

import pytest
import torch
from torch import Tensor, nn

from fp8serve.engine import invariant
from fp8serve.engine.invariant import RowIndependent, make_row_independent, measure


def steady(x: Tensor) -> Tensor:
    """A product whose rows are computed one by one."""
    return torch.stack([row * 3 for row in x])


def by_height(x: Tensor) -> Tensor:
    """Rounds differently for one row and for more than 100: what matrix libraries do."""
    return x * (1 + 1e-3 * (len(x) == 1) + 2e-3 * (len(x) > 100))


def by_company(x: Tensor) -> Tensor:
    """One scale per tensor."""
    return x / x.abs().amax()


X = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("inner", "heights"), [(steady, ()), (by_height, (4, 16)), (by_company, (1,))])
def test_what_is_measured(inner: invariant.Rows, heights: tuple[int, ...]) -> None:
    assert measure(inner, X) == heights


class Wrapped(nn.Module):
    def __init__(self, inner: invariant.Rows) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("inner", [steady, by_height, by_company])
@pytest.mark.parametrize("rows", [1, 2, 4, 9, 15, 16, 17, 44, 127, 128])
def test_rows_come_out_as_they_do_alone(inner: invariant.Rows, rows: int) -> None:
    layer = RowIndependent(Wrapped(inner), measure(inner, X))
    alone = torch.cat([layer(X[i : i + 1]) for i in range(rows)])
    assert torch.equal(layer(X[:rows]), alone)


def test_no_rows() -> None:
    assert RowIndependent(nn.Linear(8, 5), (4, 16)).forward(X[:0]).shape == (0, 5)


@pytest.mark.parametrize(
    ("rows", "heights"), [(1, [4]), (5, [4, 4]), (9, [16]), (44, [16, 16, 16]), (300, [128, 128, 16, 16, 16])]
)
def test_tiles_cover_the_rows_without_much_padding(rows: int, heights: list[int]) -> None:
    parts = invariant._split(torch.zeros(rows, 1), invariant.TILES)
    assert [height for _, height in parts] == heights
    assert sum(len(part) for part, _ in parts) == rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torchs_own_linear_becomes_row_independent(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"head": nn.Linear(512, 3000, bias=False, dtype=dtype)})
    x = torch.randn(40, 512, dtype=dtype)
    make_row_independent(model, {"head": model["head"]}, dtype, most_rows=16)
    together = model["head"](x)
    for rows in (1, 2, 3, 5, 17):
        assert torch.equal(model["head"](x[:rows]), together[:rows])


def test_a_measurement_sees_one_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sums in another order for one row only, hidden by a BF16 result, like torch's BF16 linear."""

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        half = x.shape[1] // 2
        wide, other = x.float(), weight.float().t()
        if len(x) != 1:
            return (wide @ other).bfloat16()
        return (wide[:, half:] @ other[half:] + wide[:, :half] @ other[:half]).bfloat16()

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    layer = nn.Linear(96, 64, bias=False, dtype=torch.bfloat16)
    assert 1 not in measure(*invariant._sensitive(layer, torch.bfloat16, 16))
    assert measure(*invariant._sensitive(layer, torch.bfloat16, 16)) != ()
