"""The hosted workflows agree with the Makefile, the marks of the tests and the pinned packages."""

import itertools
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
MARKS = ("smoke", "slow", "exhaustive", "emulator", "distributed", "browser")


def workflow(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())
    return document


def pinned(package: str) -> str:
    match = re.search(rf"^{package}==(.+)$", (ROOT / "constraints.txt").read_text(), flags=re.M)
    assert match, package
    return match[1]


def test_every_test_runs_in_exactly_one_job() -> None:
    quick = re.search(r"^QUICK = (.+)$", MAKEFILE, flags=re.M)
    assert quick
    jobs = [quick[1], *workflow("tests")["jobs"]["long"]["strategy"]["matrix"]["marks"]]
    for bits in itertools.product([False, True], repeat=len(MARKS)):
        has_mark = dict(zip(MARKS, bits, strict=True))
        runs = [job for job in jobs if eval(job, {"__builtins__": {}}, has_mark)]
        assert len(runs) == 1, (has_mark, runs)


def test_cuda_kernels_are_compiled_when_one_of_their_files_changed() -> None:
    """`.ci/run` compares these files with main; the hosted workflow starts for each of them."""
    files = re.search(r"^cuda_files=\((.+)\)$", (ROOT / ".ci/run").read_text(), flags=re.M)
    assert files
    compared = [name for name in files[1].split() if not name.startswith('":!')]
    assert all((ROOT / name).exists() for name in compared)
    triggers = workflow("cuda")[True]  # YAML reads the key `on` as true
    for event in ("push", "pull_request"):
        for name in compared:
            path = f"{name}/x" if (ROOT / name).is_dir() else name
            assert any(fnmatch(path, pattern) for pattern in triggers[event]["paths"]), (event, name)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_a_workflow_may_only_read_and_runs_pinned_actions(path: Path) -> None:
    text = path.read_text()
    content = yaml.safe_load(text)
    assert content["permissions"] == {"contents": "read"}
    for action in re.findall(r"uses: (\S.*)", text):
        assert action.startswith("./") or re.search(r"@[0-9a-f]{40} # v\d+(\.\d+){2}$", action), action
    for job in content["jobs"].values():
        assert "timeout-minutes" in job or "uses" in job


def test_versions_are_those_of_the_project() -> None:
    """The formatters of pre-commit, the Pythons of the tests and the image of the CUDA compiler are stated twice."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    revisions = {repo["repo"].rsplit("/", 1)[1]: repo["rev"] for repo in hooks}
    assert revisions["ruff-pre-commit"] == f"v{pinned('ruff')}"
    assert revisions["mirrors-clang-format"] == f"v{pinned('clang-format')}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    assert workflow("tests")["jobs"]["quick"]["strategy"]["matrix"]["python"] == named
    image = workflow("cuda")["jobs"]["compile"]["container"]
    assert f"FROM {image} AS build" in (ROOT / "docker/Dockerfile.cuda").read_text()
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])
