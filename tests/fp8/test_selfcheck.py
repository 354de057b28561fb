"""The self-check of kernels, on the CPU: kernels broken in every way, stored verdicts, and the kernels that replace
broken ones."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from fp8serve.fp8 import ops, selfcheck, stateful
from fp8serve.fp8.conversion import convert
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.ops import reference, registry
from fp8serve.fp8.selfcheck import KernelResult, Machine, Verdict, VerdictError, verdict
from fp8serve.fp8.selfcheck.candidates import candidates, sample_cases
from fp8serve.fp8.selfcheck.child import describe_difference
from fp8serve.fp8.selfcheck.switches import CPU_FEATURE_CAPS, switch_off
from tests.fp8 import broken_kernel
from tests.fp8.broken_kernel import OP, OTHERS

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
BEST = ops.cpu_isa()
pytestmark = pytest.mark.skipif(BEST is None, reason="the CPU library was not built")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stores verdicts in a directory of the test; switches all kernels on again afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(selfcheck, "_prepared", set())
    yield tmp_path / "cache"
    registry.restore_library_kernels("cpu")
    torch.ops.fp8serve.cpu_isa("best")


@pytest.fixture
def warnings_log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "fp8serve.kernels")
    return caplog


def machine(**other: str) -> Machine:
    return Machine(**{"kind": "cuda", "name": "Test 1", "driver": "1.2", "library": "ab", "torch": "2.13", **other})


def verdict_of(kernels: dict[str, KernelResult], **other: str) -> Verdict:
    return Verdict(machine(**other), "2026-11-25T01:02:03+00:00", kernels)


def set_child(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(selfcheck, "CHILD_COMMAND", (sys.executable, *arguments))


def check_broken(monkeypatch: pytest.MonkeyPatch, how: str, where: str) -> Verdict:
    """Returns the verdict of a check whose child has a broken kernel. A hanging kernel gets one second only."""
    set_child(monkeypatch, "-m", "tests.fp8.broken_kernel", how, where)
    patience, start_child = selfcheck.MAX_KERNEL_SECONDS, selfcheck._start_child

    def start(errors: IO[str]) -> subprocess.Popen[str]:
        monkeypatch.setattr(selfcheck, "MAX_KERNEL_SECONDS", patience)
        return start_child(errors)

    def progress(name: str) -> None:
        hangs = how == "hangs" and name.startswith(f"{OP}.")
        monkeypatch.setattr(selfcheck, "MAX_KERNEL_SECONDS", 1.0 if hangs else patience)

    monkeypatch.setattr(selfcheck, "_start_child", start)
    monkeypatch.chdir(Path(__file__).parents[2])
    return selfcheck.run_check(CPU, machine(kind="cpu"), progress)


def best_variant() -> str:
    torch.ops.fp8serve.cpu_isa("best")
    return ops.cpu_kernels()[OP]["variant"]


def step_names(variants: set[str]) -> set[str]:
    return {f"{OP}.{variant}" for variant in variants}


def all_variants() -> set[str]:
    variants = set()
    for cap in CPU_FEATURE_CAPS:
        torch.ops.fp8serve.cpu_isa(cap)
        variants.add(ops.cpu_kernels()[OP]["variant"])
    torch.ops.fp8serve.cpu_isa("best")
    return variants


# --- the check -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_kernel_of_this_cpu_agrees_at_every_level() -> None:
    result = selfcheck.run_check(CPU, machine(kind="cpu"))
    assert result.unfinished == ""
    assert result.bad == {}
    assert {name.partition(".")[0] for name in result.kernels} == set(ops.cpu_kernels()) & set(ops.OPS)
    assert step_names(all_variants()) <= set(result.kernels)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("disagrees", "1 of "),
        ("throws", "RuntimeError: an illegal memory access was encountered"),
        ("hangs", "no answer within 1 s"),
        ("crashes", "its process was ended by signal 9"),
    ],
)
def test_a_broken_kernel_is_found_and_the_others_are_checked(
    monkeypatch: pytest.MonkeyPatch, how: str, why: str
) -> None:
    result = check_broken(monkeypatch, how, "everywhere")
    assert result.unfinished == ""
    assert set(result.bad) == step_names(all_variants())
    assert {finding.state for finding in result.bad.values()} == {how}
    assert all(why in finding.why for finding in result.bad.values()), result.bad
    assert {name.partition(".")[0] for name in result.kernels} == {OP, *OTHERS}


@pytest.mark.parametrize(
    ("child", "reason"),
    [
        (("-c", "raise SystemExit('no GPU here')"), "its process ended with status 1: no GPU here"),
        (("-c", "import os; os.abort()"), "its process was ended by signal 6"),
        (("-c", "print('hello'); print('[1]'); print('{}')"), "its process ended with status 0"),
    ],
)
def test_a_child_that_checks_no_kernel_leaves_the_check_unfinished(
    monkeypatch: pytest.MonkeyPatch, child: tuple[str, ...], reason: str
) -> None:
    set_child(monkeypatch, *child)
    result = selfcheck.run_check(CPU, machine())
    assert result.kernels == {}
    assert result.unfinished == reason


def test_a_child_that_cannot_be_started_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "CHILD_COMMAND", ("/nonexistent/python",))
    assert selfcheck.run_check(CPU, machine()).unfinished == "its process cannot be started (No such file or directory)"


def test_a_silent_child_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    set_child(monkeypatch, "-c", "import time; time.sleep(3600)")
    monkeypatch.setattr(selfcheck, "MAX_KERNEL_SECONDS", 0.5)
    assert selfcheck.run_check(CPU, machine()).unfinished == "its process was silent for too long"


def test_a_check_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = "while True:\n for what in ('trying', 'name'): print('{\"%s\": \"k\"}' % what, flush=True)"
    set_child(monkeypatch, "-c", endless)
    monkeypatch.setattr(selfcheck, "MAX_CHECK_SECONDS", 1.0)
    assert selfcheck.run_check(CPU, machine()).unfinished == "it took longer than 1 s"


def test_comparisons_find_wrong_values_and_allow_roundings() -> None:
    x = torch.tensor([[1.0, 2.0, torch.nan, torch.inf]])
    assert describe_difference("rms_norm", (), [x], [x.clone()]) is None
    assert describe_difference("rms_norm", (), [x + 1e-6], [x]) is None
    assert describe_difference("rms_norm", (), [x + 0.01], [x]) == "2 of 4 values, the first at [0, 0]: 1.01 for 1"
    assert describe_difference("rms_norm", (), [x.nan_to_num(0.0)], [x]) is not None
    assert describe_difference("rms_norm", (), [x.bfloat16()], [x]) == "results of another type or shape"
    assert describe_difference("rotary", (), [x + 1e-6], [x]) is not None, "this op must have the bits of the reference"
    q = torch.full((200,), 8.0).to(torch.float8_e4m3fn)
    near, far = (
        torch.cat([torch.full((n,), v), torch.full((200 - n,), 8.0)]).to(q.dtype) for n, v in ((3, 9), (1, 16))
    )
    assert describe_difference("rms_norm_quantize", (), [near], [q]) is None
    assert describe_difference("rms_norm_quantize", (), [far], [q]) is not None
    assert describe_difference("quantize", (), [near], [q]) is not None


def test_the_tolerance_of_a_product_depends_on_the_size_of_its_sums() -> None:
    case = ops.cases("scaled_mm")[12]
    expected = reference.scaled_mm(*case.make())
    changed = expected.clone()
    changed[0, 0] += (
        1e-2 * reference.scaled_mm(*(a.abs() if i in (2, 3) else a for i, a in enumerate(case.make()))).abs().max()
    )
    assert describe_difference("scaled_mm", case.make(), [expected], [expected]) is None
    assert describe_difference("scaled_mm", case.make(), [changed], [expected]) is not None


def test_at_most_thirty_cases_are_sampled_over_the_whole_list() -> None:
    every = ops.cases("quantize")
    assert 20 <= len(sample_cases(every)) <= 30
    assert sample_cases(every)[0] is every[0]
    assert all(len(candidate.cases) <= 30 for candidate in candidates("cpu"))


# --- replacements of broken kernels ----------------------------------------------------------------------------------


def is_correct() -> bool:
    gate, up = torch.randn(5, 70), torch.randn(5, 70)
    allowed = {"rtol": 1e-5, "atol": 1e-5}
    return torch.allclose(getattr(torch.ops.fp8serve, OP)(gate, up), reference.silu_mul(gate, up), **allowed)


def test_a_broken_variant_is_replaced_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BEST is not None
    if len(all_variants()) == 1:
        pytest.skip("this processor has one variant")
    result = check_broken(monkeypatch, "disagrees", BEST)
    assert set(result.bad) == {f"{OP}.{best_variant()}"}
    override = broken_kernel.register("disagrees", BEST)
    assert not is_correct()
    switch_off(CPU, result.bad)
    assert ops.cpu_kernels()[OP]["variant"] not in result.bad
    assert ops.cpu_isa() != BEST
    assert is_correct()
    assert ops.backends()["quantize"].startswith("cpu kernel"), "another variant of our kernel runs"
    override._destroy()


def test_an_op_whose_variants_are_all_broken_runs_the_reference() -> None:
    override = broken_kernel.register("disagrees", "everywhere")
    assert not is_correct()
    switch_off(CPU, step_names(all_variants()))
    assert is_correct()
    assert ops.backends()[OP] == "reference; its cpu kernel is switched off"
    assert ops.cpu_isa() == BEST, "the other ops keep their variants"
    registry.restore_library_kernels("cpu")
    assert ops.backends()[OP].startswith("cpu kernel (")
    override._destroy()


def test_switching_off_unknown_kernels_changes_nothing() -> None:
    before = ops.backends()
    switch_off(CPU, ["no_such_op.avx2", "quantize.sse9", "scaled_mm"])
    assert ops.backends() == before


# --- stored verdicts -------------------------------------------------------------------------------------------------


def test_a_verdict_is_stored_for_its_machine_only() -> None:
    original = verdict_of({"quantize": KernelResult("agrees"), "scaled_mm.mma": KernelResult("hangs", "no answer")})
    assert verdict.load(original.machine) is None
    path = verdict.save(original)
    assert verdict.load(original.machine) == original
    assert list(original.bad) == ["scaled_mm.mma"]
    for other in ({"name": "Test 2"}, {"driver": "1.3"}, {"library": "cd"}, {"torch": "2.14"}, {"kind": "cpu"}):
        assert verdict.load(machine(**other)) is None
    assert [p.name for p in path.parent.iterdir()] == [path.name], "no temporary file is left"


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[1, 2]",
        lambda text: text.replace('"version": 1', '"version": 2'),
        lambda text: text.replace('"driver": "1.2"', '"driver": "1.3"'),
        lambda text: text.replace('"hangs"', '"sulks"'),
        lambda text: text.replace('"why"', '"because"'),
        lambda text: text.replace('"kernels"', '"others"'),
    ],
)
def test_a_file_that_is_no_verdict_is_reported_and_ignored(change: Any, warnings_log: pytest.LogCaptureFixture) -> None:
    original = verdict_of({"quantize": KernelResult("hangs", "no answer")})
    path = verdict.save(original)
    path.write_text(change(path.read_text()))
    with pytest.raises(VerdictError, match="does not hold the verdict of a kernel check"):
        verdict.load(original.machine)
    assert selfcheck.stored_verdict(original.machine) is None
    assert warnings_log.records[0].message.startswith(f"{path} does not hold")


def fake_gpu(monkeypatch: pytest.MonkeyPatch, result: Verdict) -> list[str]:
    """Fakes a GPU whose check returns this verdict; returns a list that gets every check and switched-off kernel."""
    calls: list[str] = []

    def check(device: torch.device, machine: Machine, progress: selfcheck.KernelCallback) -> Verdict:
        calls.append(f"checked {device}")
        return result

    monkeypatch.setattr(selfcheck, "machine_of", lambda device: result.machine)
    monkeypatch.setattr(selfcheck, "run_check", check)
    monkeypatch.setattr(selfcheck, "switch_off", lambda device, names: calls.extend(names))
    return calls


def test_a_gpu_is_checked_at_its_first_use_and_never_again(
    monkeypatch: pytest.MonkeyPatch, warnings_log: pytest.LogCaptureFixture
) -> None:
    result = verdict_of({"quantize": KernelResult("agrees"), "scaled_mm.large": KernelResult("throws", "an error")})
    calls = fake_gpu(monkeypatch, result)
    selfcheck.prepare_device(GPU)
    selfcheck.prepare_device(GPU)
    assert calls == ["checked cuda:0", "scaled_mm.large"]
    assert [record.message for record in warnings_log.records] == [
        "1 kernel is switched off, because the check of 2026-11-25 on Test 1 found it wrong, and others take over:"
        " scaled_mm.large (throws); see `fp8serve doctor`."
    ]
    monkeypatch.setattr(selfcheck, "_prepared", set())  # as in another process
    selfcheck.prepare_device(GPU)
    assert calls[2:] == ["scaled_mm.large"]


def test_a_gpu_is_checked_when_a_converted_module_comes_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines and trainers check the GPU themselves; this is for users of plain modules."""
    prepared: list[torch.device] = []
    monkeypatch.setattr(stateful, "prepare_device", prepared.append)
    module = convert(torch.nn.Sequential(torch.nn.Linear(16, 16)))
    module.to(torch.bfloat16)
    assert prepared == []
    monkeypatch.setattr(Linear, "state_device", lambda self: GPU)  # as if it had been moved there
    module.to(torch.bfloat16)
    assert prepared == [GPU]


def test_a_cpu_is_not_checked_automatically(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_gpu(monkeypatch, verdict_of({OP: KernelResult("agrees")}, kind="cpu"))
    selfcheck.prepare_device(CPU)
    assert calls == []


def test_a_stored_verdict_of_this_cpu_is_used_by_later_processes(warnings_log: pytest.LogCaptureFixture) -> None:
    here = selfcheck.machine_of(CPU)
    assert here is not None
    bad = dict.fromkeys(step_names(all_variants()), KernelResult("disagrees", "3 of 4 values"))
    verdict.save(Verdict(here, "2026-11-25T01:02:03+00:00", bad))
    selfcheck.prepare_device(CPU)
    assert ops.backends()[OP] == "reference; its cpu kernel is switched off"
    assert len(warnings_log.records) == 1


def test_a_verdict_that_cannot_be_stored_is_still_used(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, warnings_log: pytest.LogCaptureFixture
) -> None:
    own_cache.write_text("a file where the directory should be")
    calls = fake_gpu(monkeypatch, verdict_of({"quantize": KernelResult("crashes", "signal 9")}))
    selfcheck.prepare_device(GPU)
    assert calls == ["checked cuda:0", "quantize"]
    messages = [record.message for record in warnings_log.records]
    assert any("cannot be stored" in message for message in messages)
    assert messages[-1].startswith("1 kernel is switched off")


def test_an_unfinished_check_is_reported_and_used_and_not_stored(
    monkeypatch: pytest.MonkeyPatch, warnings_log: pytest.LogCaptureFixture
) -> None:
    result = verdict_of({"quantize": KernelResult("hangs", "no answer")})
    result = Verdict(result.machine, result.date, result.kernels, unfinished="it took longer than 900 s")
    calls = fake_gpu(monkeypatch, result)
    selfcheck.prepare_device(GPU)
    assert calls == ["checked cuda:0", "quantize"]
    assert warnings_log.records[0].message == (
        "The check of the kernels on Test 1 did not finish: it took longer than 900 s; kernels that it has not"
        " tried are used."
    )
    assert verdict.load(result.machine) is None


def test_a_gpu_is_used_even_if_its_check_cannot_run(
    monkeypatch: pytest.MonkeyPatch, warnings_log: pytest.LogCaptureFixture
) -> None:
    """Starts the real child process, on a machine without a GPU."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(selfcheck, "machine_of", lambda device: machine())
    selfcheck.prepare_device(GPU)
    assert len(warnings_log.records) == 1
    assert "did not finish: its process ended with status 1: " in warnings_log.records[0].message


def test_an_exception_in_the_check_is_logged_and_all_kernels_are_used(
    monkeypatch: pytest.MonkeyPatch, warnings_log: pytest.LogCaptureFixture
) -> None:
    def broken_driver(device: torch.device) -> Machine:
        raise RuntimeError("the driver does not say its name")

    monkeypatch.setattr(selfcheck, "machine_of", broken_driver)
    selfcheck.prepare_device(GPU)
    assert [record.message for record in warnings_log.records] == [
        "The kernels on cuda:0 could not be checked (the driver does not say its name); all of them are used."
    ]


FIRST_USE = """
import sys, time
from pathlib import Path
import torch
from fp8serve.fp8 import selfcheck
from fp8serve.fp8.selfcheck import KernelResult, Machine, Verdict

def check(device, machine, progress):
    with Path(sys.argv[1]).open("a") as log:
        log.write("checked\\n")
    time.sleep(1)
    return Verdict(machine, "2026-11-25", {"quantize": KernelResult("agrees")})

selfcheck.run_check = check
selfcheck.machine_of = lambda device: Machine("cuda", "Test 1", "1.2", "ab", "2.13")
selfcheck.prepare_device(torch.device("cuda:0"))
"""


@pytest.mark.slow
def test_processes_that_start_together_check_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", FIRST_USE, str(log)]
    running = [subprocess.Popen(command, env={**os.environ}, cwd=Path(__file__).parents[2]) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert log.read_text() == "checked\n"
    result = verdict.load(machine())
    assert result is not None
    assert json.loads(verdict.path_of(machine()).read_text())["kernels"] == {"quantize": {"state": "agrees", "why": ""}}
