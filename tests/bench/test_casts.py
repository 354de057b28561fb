"""`bench casts`: the values that it covers, the errors that it finds, and the command."""

import json

import numpy as np
import pytest
import torch

from fp8serve.bench import casts
from fp8serve.cli import main
from fp8serve.errors import JobError
from fp8serve.fp8 import ops
from fp8serve.fp8.ops import arithmetic, reference
from tests.fp8.test_casts import magnitudes

needs_library = pytest.mark.skipif(ops.LIBRARIES["cpu"] is None, reason="libfp8serve_cpu.so was not built")


def no_progress(what: str, completed: int, total: int) -> None:
    """A progress callback that does nothing."""


def test_the_stratified_values_include_every_boundary() -> None:
    values = casts.stratified()
    bits = values.view(torch.int32).numpy()
    assert bits.shape == (2**24,)
    assert (np.bincount((bits >> 23) + 256) == casts.STRATIFIED_MANTISSAS).all()
    bits.sort()
    boundaries = [next(casts.all_values(torch.bfloat16)).float()]
    for dtype in arithmetic.FP8_MAX:
        values = torch.from_numpy(magnitudes(dtype)).float()
        middle = (values[1:] + values[:-1]) / 2
        boundaries += [values, middle, middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(torch.inf))]
    for points in boundaries:
        for signed in (points, -points):
            expected_bits = signed.view(torch.int32).numpy()
            assert (bits[np.searchsorted(bits, expected_bits)] == expected_bits).all()


def test_all_values_has_every_value_once() -> None:
    values = torch.cat(list(casts.all_values(torch.float16)))
    assert torch.equal(values.view(torch.int16).int().sort()[0], torch.arange(-(2**15), 2**15, dtype=torch.int32))
    chunks = casts.all_values(torch.float32)
    first, second = next(chunks), next(chunks)
    assert second.view(torch.int32)[0] - first.view(torch.int32)[-1] == 1


class OneWrongCode:
    """The ops of the reference, with one wrong code in every result."""

    def __getattr__(self, name):
        def op(*args):
            q, other = getattr(reference, name)(*args)
            q.view(torch.uint8).flatten()[77] ^= 1
            return q, other

        return op


def test_one_wrong_code_is_found() -> None:
    x = torch.linspace(-500, 500, 4096)
    findings = casts.compare(iter([x]), 4096, no_progress, probes=["quantize"], at=["wrong"], kernels=OneWrongCode())
    assert [(f.differing, f.values) for f in findings] == [(1, 4096), (1, 4096)]
    assert findings[0].first is not None
    assert (-500.0).hex() in findings[0].first
    assert casts.count_differing([torch.zeros(3)], [torch.zeros(4)]) == 3


@needs_library
def test_the_command_writes_its_findings_and_fails_on_a_difference(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(casts, "stratified", lambda: torch.linspace(-500, 500, 1 << 14))
    assert main(["bench", "casts", "--op", "quantize", "--out", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert "portable" in table
    findings = json.loads((tmp_path / "casts.json").read_text())["findings"]
    assert {f["differing"] for f in findings} == {0}
    assert {f["source"] for f in findings} == {"float32", "bfloat16", "float16"}
    monkeypatch.setitem(casts.PROBES, "quantize", lambda ops, x, dtype: (
        OneWrongCode() if ops is reference else ops).quantize(x, torch.tensor(1.0), dtype))  # fmt: skip
    assert main(["bench", "casts", "--op", "quantize", "--json"]) == 1
    assert all(f["differing"] >= 1 for f in json.loads(capsys.readouterr().out)["findings"])


def test_unknown_ops_and_missing_kernels_are_refused(monkeypatch) -> None:
    with pytest.raises(JobError, match="No op that casts is called 'gelu'; there are: quantize; "):
        casts.study(no_progress, exhaustive=False, probes=["gelu"])
    monkeypatch.setitem(ops.LIBRARIES, "cuda", None)
    with pytest.raises(JobError, match="There are no cuda kernels here"):
        casts.study(no_progress, exhaustive=False, device="cuda")
