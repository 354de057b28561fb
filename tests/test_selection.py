"""`--pairwise` and `--changed-since` never leave out the only test of a pair of values or of a changed file."""

import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import selection
from tests.selection import affected_files, changed_files, covering, name_axes, outside_sample, too_expensive

ROOT = Path(__file__).resolve().parent.parent


def pairs(rows: Sequence[tuple[object, ...]]) -> set[tuple[object, ...]]:
    columns = list(itertools.combinations(range(len(rows[0])), 2))
    return {(a, row[a], b, row[b]) for row in rows for a, b in columns}


@pytest.mark.parametrize("sizes", [(3, 3, 3), (4, 9, 4, 4), (2, 2), (5,), (11, 4, 6), (2, 2, 2, 2, 2, 2)], ids=str)
def test_a_covering_has_every_pair_and_few_rows(sizes: tuple[int, ...]) -> None:
    rows = list(itertools.product(*map(range, sizes)))
    chosen = [rows[index] for index in covering(rows)]
    assert pairs(chosen) == pairs(rows)
    least = sizes[0] if len(sizes) == 1 else max(a * b for a, b in itertools.combinations(sizes, 2))
    assert least <= len(chosen) <= 2 * least


def test_a_covering_of_strength_1_has_every_value_in_turn() -> None:
    rows = list(itertools.product(range(8), range(4), range(2)))
    chosen = [rows[index] for index in covering(rows, 1)]
    assert [a for a, _, _ in chosen] == [*range(8)]
    assert Counter(b for _, b, _ in chosen) == dict.fromkeys(range(4), 2)
    assert Counter(c for *_, c in chosen) == dict.fromkeys(range(2), 4)


def test_a_covering_includes_the_only_row_with_a_value() -> None:
    rows = [(a, b, c) for a in range(3) for b in range(3) for c in range(3) if (a, b) != (1, 1)] + [(1, 1, 7)]
    assert rows[covering(rows)[-1]] == (1, 1, 7)


def test_case_names_are_split_if_all_have_the_same_number_of_parts() -> None:
    assert name_axes(["(3, 64) plain scale 1.0", "(3, 65) norm scale 2.0"])[0] == ["(3", "64)", "plain", "scale", "1.0"]
    assert name_axes(["tiles 67x300, e4m3", "hostile, e5m2"]) == [["tiles 67x300", "e4m3"], ["hostile", "e5m2"]]
    assert name_axes(["a, b", "c"]) == [["a, b"], ["c"]]


def test_pairwise_does_not_count_skipped_cases_as_covered(tmp_path: Path) -> None:
    """Cases are skipped if, for example, this machine lacks their instruction set."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "A = [0, 1, pytest.param(2, marks=pytest.mark.skip)]\n"
        "@pytest.mark.pairwise\n"
        "@pytest.mark.parametrize('a', A)\n"
        "@pytest.mark.parametrize('b', [0, 1])\n"
        "@pytest.mark.parametrize('c', [0, 1])\n"
        "def test_sweep(a, b, c): print('ran', a, b, c)\n"
    )
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    for option, count in (("--pairwise", 4), ("-q", 8)):
        process = subprocess.run(
            [*command, option, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
        )
        rows = [tuple(line.split()[1:]) for line in process.stdout.splitlines() if "ran" in line]
        assert len(rows) == count, process.stdout
        assert len(pairs([row[-3:] for row in rows])) == 12


@dataclass
class Item:
    """A test as `too_expensive` sees it."""

    nodeid: str

    def get_closest_marker(self, name: str) -> bool:
        return f"_{name}" in self.nodeid


def test_the_quickest_functions_run_with_all_their_cases() -> None:
    names = ["slow", *(f"quick[{case}]" for case in range(4)), "smoke", "new"]
    items: Any = [Item(f"test_it.py::test_{name}") for name in names]
    means = {"test_it.py::test_slow": 2.0, "test_it.py::test_quick": 0.5, "test_it.py::test_smoke": 3.0}
    for seconds, left_out in ((2, names[:5]), (4.9, names[:5]), (5.1, ["slow"]), (9, [])):
        chosen = [item.nodeid.removeprefix("test_it.py::test_") for item in too_expensive(items, seconds, means)]
        assert chosen == sorted(left_out, key=lambda name: name == "slow")


def test_a_change_of_the_common_setup_affects_every_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "affected_tests", lambda changed: {f"tests of {file}" for file in changed})
    for changed in (None, ["README.md", "tests/conftest.py"], ["constraints.txt"], ["README.md", "deleted.py"]):
        monkeypatch.setattr(selection, "changed_files", lambda _, changed=changed: changed)
        assert affected_files("main") is None
    monkeypatch.setattr(selection, "changed_files", lambda _: ["README.md", "LICENSE"])
    assert affected_files("main") == ["tests of LICENSE", "tests of README.md"]


def test_the_sample_of_an_unaffected_file_runs() -> None:
    @dataclass
    class Test:
        path: Path
        marks: tuple[str, ...]

        def get_closest_marker(self, name: str) -> bool:
            return name in self.marks

    paths = [ROOT / "tests/cuda/test_gemm.py", ROOT / "tests/server/test_live.py"]
    marks = [(), ("emulator",), ("emulator", "smoke"), ("smoke",)]
    items: Any = [Test(path, each) for path in paths for each in marks]
    assert outside_sample(items, ["tests/cuda/test_gemm.py", "tests/server/test_live.py"]) == []
    assert outside_sample(items, ["tests/server/test_live.py"]) == items[:3]
    assert outside_sample(items, []) == items[:3] + items[4:7]


def test_changed_files_are_those_of_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(selection, "ROOT", tmp_path)
    assert changed_files("main") is None  # no repository
    git("init", "--initial-branch", "main")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    assert changed_files("main") is None  # HEAD is the common ancestor
    assert changed_files("origin/main") is None  # no such branch
    git("checkout", "-b", "change")
    (tmp_path / "b").write_text("2")
    git("add", "b")
    git("mv", "a", "c")
    git("commit", "-m", "b")
    (tmp_path / "b").write_text("3")
    assert changed_files("main") == ["a", "b", "c"]
