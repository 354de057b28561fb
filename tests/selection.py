"""Selects which of the collected tests run, for `make test` and for the build server, through hooks of pytest.

* Without a CUDA device, tests marked `gpu` are deselected. `-m gpu` still collects them.
* With `--pairwise`, a function marked `pairwise` runs on a subset of its cases (pairwise testing): every pair of values
  of two different parameters occurs in at least one selected case. A fault of a kernel depends on one value, or on two
  together (a tail and a format), hardly ever on three. The parts of the name of a `Case` count as parameters. With
  `pairwise(strength=1)`, every single value occurs in at least one selected case. This is enough for parameters that
  other tests cover one by one, such as recipes and architectures.
* With `--changed-since REF`, all tests of a file run if a file that it depends on (tests/dependencies.py) has changed
  since the common ancestor of HEAD and REF; otherwise only its tests marked `smoke`. If git cannot compare, or one of
  EVERYTHING has changed, the tests of all files run.
* With `--within SECONDS`, the fastest functions run, as many as fit by their recorded seconds (tests/durations.json).
  Tests marked `smoke`, and functions without recorded seconds, always run.
* With `--reruns N`, only tests of servers and browsers are repeated: a kernel or a race that fails once is wrong.

The summary states how many tests each rule left out and, for tests that -m left out, how many of each mark.
"""

import itertools
import json
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.dependencies import affected_tests, matches

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests/durations.json"
LONG_MARKS = ("emulator", "distributed", "browser", "exhaustive", "slow")
REASON = pytest.StashKey[str]()
LEFT_OUT = pytest.StashKey[Counter[str]]()
AFFECTED = pytest.StashKey[list[str] | None]()


# --- sweeps -----------------------------------------------------------------------------------------------------------


def name_axes(names: Sequence[str]) -> list[list[str]]:
    """Splits names such as "67x300, e4m3, scale 1.0" at their commas and spaces.

    If the names do not have equal numbers of parts, each whole name is one part.
    """
    for separator in (r"[,:]? ", r"[,:] "):
        parts = [re.split(separator, name) for name in names]
        if len({len(words) for words in parts}) == 1:
            return parts
    return [[name] for name in names]


def axes(items: Sequence[pytest.Function]) -> list[tuple[object, ...]]:
    """Returns a row of values for every item of one test function, with one value for each parameter (axis)."""
    from fp8serve.fp8.ops.registry import Case  # not above: tests/conftest.py sets the threads of torch first

    columns: list[Iterable[object]] = []
    for argument in items[0].callspec.params:
        values = [item.callspec.params[argument] for item in items]
        if isinstance(values[0], Case):
            columns += zip(*name_axes([case.name for case in values]), strict=True)
        else:
            columns.append([id(value) for value in values])
    return list(zip(*columns, strict=True))


def covering(rows: Sequence[tuple[object, ...]], strength: int = 2) -> list[int]:
    """Returns indices of a few rows (a greedy covering): each combination of values that any row has in `strength`
    columns is in at least one of them. With `strength` 1, ties go to the row whose values were chosen least often."""
    columns = list(itertools.combinations(range(len(rows[0])), strength))
    groups = [{(at, tuple(row[column] for column in at)) for at in columns} for row in rows]
    if not columns:
        return list(range(len(rows)))
    missing, chosen, uses = set().union(*groups), list[int](), Counter[tuple[int, object]]()

    def gain(index: int) -> tuple[int, int]:
        new = len(groups[index] & missing)
        return new, -sum(uses[value] for value in enumerate(rows[index])) if new and strength == 1 else 0

    while missing:
        best = max(range(len(rows)), key=gain)
        missing -= groups[best]
        uses.update(enumerate(rows[best]))
        chosen.append(best)
    return sorted(chosen)


def outside_pairs(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Returns the items of sweeps that the pairwise coverings leave out.

    The mark's `each` names arguments, such as the op of a case; every value of them gets a covering of its own. An item
    marked `skip` covers no pair and is not left out.
    """
    sweeps: dict[tuple[Any, ...], list[pytest.Function]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("pairwise")
        if mark is None or item.get_closest_marker("skip") or not isinstance(item, pytest.Function):
            continue
        each = tuple(str(item.callspec.params[argument]) for argument in mark.kwargs.get("each", ()))
        sweeps[item.nodeid.partition("[")[0], each, mark.kwargs.get("strength", 2)].append(item)
    left_out: list[pytest.Item] = []
    for (*_, strength), sweep in sweeps.items():
        chosen = set(covering(axes(sweep), strength))
        left_out += [item for index, item in enumerate(sweep) if index not in chosen]
    return left_out


# --- time limit ------------------------------------------------------------------------------------------------------


def too_expensive(items: Sequence[pytest.Item], seconds: float, means: Mapping[str, float]) -> list[pytest.Item]:
    """Returns the items to leave out: all cases of the slowest functions, until the rest takes at most `seconds`.

    `means` has the mean seconds of a case by function. Functions that it lacks, and items marked `smoke`, are never
    left out, even if they take longer than `seconds`; a case of the former counts as 0.01 seconds.
    """

    def cost(item: pytest.Item) -> float:
        return means.get(item.nodeid.partition("[")[0], 0.01)

    others = [i for i in items if i.nodeid.partition("[")[0] in means and not i.get_closest_marker("smoke")]
    others.sort(key=cost)
    fixed = sum(map(cost, items)) - sum(map(cost, others))
    sums = itertools.accumulate(map(cost, others), initial=fixed)
    total_at = dict(zip([0.0, *map(cost, others)], sums, strict=True))  # items that cost at most so much
    most = max((each for each, total in total_at.items() if total <= seconds), default=0.0)
    return [item for item in others if cost(item) > most]


# --- what changed -----------------------------------------------------------------------------------------------------


EVERYTHING = ("pyproject.toml", "constraints.txt", "Makefile", ".ci/*", "tests/conftest.py", "tests/selection.py",
              "tests/dependencies.py", "tests/durations.py")  # fmt: skip


def changed_files(reference: str) -> list[str] | None:
    """Returns the files that differ from the common ancestor of HEAD and `reference`.

    Returns None if git cannot compare them, and if HEAD is that ancestor: then it is unknown which change to test.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    try:
        ancestor = git("merge-base", reference, "HEAD").strip()
        if ancestor == git("rev-parse", "HEAD").strip():
            return None
        return git("diff", "--name-only", "--no-renames", ancestor).splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None


def affected_files(reference: str) -> list[str] | None:
    """Returns the test files that the change since `reference` can affect. Returns None if it can affect all."""
    changed = changed_files(reference)
    if changed is None or matches(changed, EVERYTHING) or not all((ROOT / file).exists() for file in changed):
        return None  # what a deleted file affected cannot be read from the sources any more
    return sorted(affected_tests(changed))


def outside_sample(items: Iterable[pytest.Item], affected: Sequence[str]) -> list[pytest.Item]:
    """Returns the items of other files than `affected`, except their samples: tests marked `smoke` that need no
    emulated GPU. The emulator takes 90 seconds to compile on one core."""
    files = {ROOT / file for file in affected}

    def is_sample(item: pytest.Item) -> bool:
        return bool(item.get_closest_marker("smoke")) and not item.get_closest_marker("emulator")

    return [item for item in items if item.path not in files and not is_sample(item)]


# --- pytest -----------------------------------------------------------------------------------------------------------


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection", "which tests run (tests/selection.py)")
    group.addoption("--pairwise", action="store_true", help="sweeps marked pairwise: every pair of values, not all")
    group.addoption("--within", metavar="SECONDS", type=float, help="the quickest tests, by tests/durations.json")
    group.addoption("--changed-since", metavar="REF", help="only samples of files that the change cannot affect")


def find_affected(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # under xdist the controller has read the sources
        config.stash[AFFECTED] = config.workerinput["affected"]
    elif config.option.changed_since:
        config.stash[AFFECTED] = affected_files(config.option.changed_since)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["affected"] = node.config.stash.get(AFFECTED, None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    def leave_out(tests: Sequence[pytest.Item], why: str) -> None:
        for item in tests:
            item.stash[REASON] = why
        items[:] = [item for item in items if REASON not in item.stash]
        config.hook.pytest_deselected(items=tests)

    config.stash[LEFT_OUT] = Counter()
    if not torch.cuda.is_available() and "gpu" not in config.option.markexpr:
        leave_out([item for item in items if item.get_closest_marker("gpu")], "need a CUDA device (make gpu)")
    if config.option.pairwise:
        leave_out(outside_pairs(items), "covered by other cases of their sweep")
    if config.option.within and RECORD.exists():
        means = json.loads(RECORD.read_text())["cases"]
        leave_out(too_expensive(items, config.option.within, means), "take longest")
    if getattr(config.option, "reruns", None):  # pytest-rerunfailures
        for item in items:
            if not (item.path.is_relative_to(ROOT / "tests/server") or item.get_closest_marker("browser")):
                item.add_marker(pytest.mark.flaky(reruns=0))
    if (affected := config.stash.get(AFFECTED, None)) is not None:
        leave_out(outside_sample(items, affected), "of files that the change cannot affect")


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:  # by the rules above, or by -m and -k
        mark = next((mark for mark in LONG_MARKS if item.get_closest_marker(mark)), "others")
        item.config.stash[LEFT_OUT][item.stash.get(REASON, mark)] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # under xdist every worker collects, and another process reports
        session.config.workeroutput["left_out"] = dict(session.config.stash.get(LEFT_OUT, Counter()))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Takes the counts of one worker; all workers have the same counts."""
    node.config.stash[LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    left_out = config.stash.get(LEFT_OUT, Counter())
    if numbers := [f"{count:,} {why}" for why, count in left_out.items() if count]:
        terminalreporter.write_line(f"Left out: {', '.join(numbers)}. `make test-all` runs all that can run here.")
