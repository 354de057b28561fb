"""Runs the commands of docs/commands.md on a tiny model, and checks links, names and the tree of folders."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fp8serve.cli import main
from tests.patience import PATIENCE
from tests.tiny import CHATS, write_tiny_model

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text()
COMMANDS = (ROOT / "docs" / "commands.md").read_text()


def blocks(language: str) -> list[str]:
    """Returns the fenced blocks of docs/commands.md in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", COMMANDS, flags=re.M | re.S)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ./model and chats.jsonl, as docs/commands.md describes them."""
    place = tmp_path_factory.mktemp("commands")
    write_tiny_model(place / "model")
    (place / "chats.jsonl").write_text(CHATS)
    return place


def run(place: Path, *command: str) -> str:
    process = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=PATIENCE)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.slow
def test_shell_commands_run_in_their_order(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that need no shell run in this process, which has imported torch already."""
    commands = [line.partition("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    assert {c.split()[1] for c in commands} >= {"calibrate", "inspect", "eval", "generate", "finetune", "doctor"}
    monkeypatch.chdir(workplace)
    for command in commands:
        assert command.startswith("fp8serve ")
        if re.search(r"[<>|&;$`]", command):
            run(workplace, "bash", "-c", command.replace("fp8serve", f"{sys.executable} -m fp8serve.cli", 1))
        else:
            assert main(shlex.split(command)[1:]) == 0, command


@pytest.mark.slow
def test_python_runs(workplace: Path) -> None:
    shutil.rmtree(workplace / "model-fp8", ignore_errors=True)
    for block in blocks("python"):
        run(workplace, sys.executable, "-c", block)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert link.startswith("https://") or (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_the_tests_that_pages_name_exist(page: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text()):
        assert (ROOT / file).is_file(), file
        assert f"def {name}(" in (ROOT / file).read_text() or not name, f"{file}::{name}"


def test_every_folder_in_the_tree_exists_and_the_other_way_round() -> None:
    tree = (ROOT / "docs" / "architecture.md").read_text().partition("## The tree")[2].split("```")[1].strip("\n")
    inside = {line.split("/")[0].strip() for line in tree.splitlines() if line.startswith("  ")}
    outside = {line.split("/")[0] for line in tree.splitlines() if not line.startswith("  ")}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout")
    folders = {p.split("/")[0] for p in tracked if "/" in p and not p.startswith(".")}
    assert outside == folders
    assert inside == {p.split("/")[1] for p in tracked if p.startswith("fp8serve/") and p.count("/") > 1}


def test_the_make_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    text = "\n".join(page.read_text() for page in PAGES)
    assert set(re.findall(r"^make ([\w-]+)", text, flags=re.M)) | set(re.findall(r"`make ([\w-]+)", text)) <= targets


def test_options_in_text_blocks_exist() -> None:
    """Commands that wait for ever, such as serve, are not run; their options are checked."""
    for command, options in re.findall(
        r"^fp8serve (\w+)[^\n]*?((?: --[a-z-]+(?: [^-\s]\S*)?)+)$", README + COMMANDS, flags=re.M
    ):
        output = run(ROOT, sys.executable, "-m", "fp8serve.cli", command, "--help")
        for option in re.findall(r"--[a-z-]+", options):
            assert option in output


def test_the_changelog_names_this_version() -> None:
    import fp8serve

    assert f"\n## {fp8serve.__version__} " in (ROOT / "CHANGELOG.md").read_text()
    assert f'\nversion = "{fp8serve.__version__}"\n' in (ROOT / "pyproject.toml").read_text()
