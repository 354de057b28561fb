"""Pages of docs/ that quote the code: error messages, worked examples, commands, and pages generated from code."""

import ast
import os
import re
import shlex
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

import fp8serve
from benchmarks.studies import concepts
from docs import numerics_page, routes_page
from fp8serve.cli import app
from fp8serve.fp8.numerics_classes import ROWS
from fp8serve.fp8.ops.registry import OPS
from fp8serve.model.config.families import FAMILIES

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
UNKNOWN = "…"


def pages_of(*folders: str) -> list[Path]:
    return [page for page in PAGES if page.parent.name in folders]


# -- error messages ----------------------------------------------------------------------------------------------------


@cache
def messages() -> str:
    """Every string of the code on a line of its own; "…" replaces each inserted value."""
    texts = []
    for path in [*(ROOT / "fp8serve").rglob("*.py"), *(ROOT / "calibrate").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else UNKNOWN for p in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(" ".join(text.split()) for text in texts)


def quoted_messages() -> list[str]:
    return re.findall(r'^### "(.+)"$', (DOCS / "troubleshooting.md").read_text(), flags=re.M)


@pytest.mark.parametrize("message", quoted_messages())
def test_an_explained_message_occurs_in_the_code(message: str) -> None:
    parts = [re.escape(part) for part in message.split(UNKNOWN)]
    assert re.search("[^\n]*?".join(parts), messages()), message


# -- code --------------------------------------------------------------------------------------------------------------


def excerpts() -> list[tuple[str, Path, str]]:
    """Returns (page, file, code): a block of code under a line "From [`file`](path):"."""
    pattern = r"From \[`[^`]+`\]\(([^)]+)\)[^\n]*:\n\n```\w+\n(.*?)^```"
    return [
        (page.name, (page.parent / path).resolve(), code)
        for page in pages_of("extending")
        for path, code in re.findall(pattern, page.read_text(), flags=re.M | re.S)
    ]


@pytest.mark.parametrize(("page", "file", "code"), excerpts(), ids=lambda value: getattr(value, "name", None))
def test_an_excerpt_is_part_of_its_file(page: str, file: Path, code: str) -> None:
    assert code in file.read_text()


def test_every_way_to_extend_shows_code_that_is_run() -> None:
    pages = {page for page, file, _ in excerpts() if file.is_relative_to(ROOT / "examples")}
    assert pages == {page.name for page in pages_of("extending")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_in_a_page_compiles(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S):
        compile(textwrap.dedent(block), str(page), "exec")


# -- commands ----------------------------------------------------------------------------------------------------------


def commands(page: Path) -> list[list[str]]:
    """The words of every `fp8serve ...` in a block of shell, with or without a prompt, with continued lines joined.

    A word in capitals stands for a value that the reader inserts, OPTIONS for several.
    """
    blocks = re.findall(r"^```(?:sh|console)?\n(.*?)^```", page.read_text(), flags=re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    matches = [re.match(r"(?:\$ )?(fp8serve [a-z].*)", line) for line in lines]
    return [_words(match[1]) for match in matches if match]


def _words(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    ends = [i for i, word in enumerate(words) if word in {"&", "|", "<", ">", "<<<", ";", "&&"}]
    return [word for word in words[1 : min(ends, default=len(words))] if word != "OPTIONS"]


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=lambda page: page.stem)
def test_commands_and_their_options_exist(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line parses each with its options and values, and does not run it."""
    monkeypatch.chdir(tmp_path)
    root: Any = typer.main.get_command(app)
    for words in commands(page):
        command, name, rest = root, "fp8serve", list(words)
        while hasattr(command, "commands"):
            name = rest.pop(0)
            assert name in command.commands, words
            command = command.commands[name]
        command.make_context(name, rest).close()


# -- pages made from code ----------------------------------------------------------------------------------------------


def test_the_page_of_routes_is_up_to_date() -> None:
    assert routes_page.page() == (DOCS / "routes.md").read_text(), "run: make routes"


def test_the_page_of_numerics_classes_is_up_to_date() -> None:
    assert numerics_page.page() == (DOCS / "numerics-classes.md").read_text(), "run: make numerics"


def test_kernels_for_gpus_name_a_row_of_what_has_run_where() -> None:
    """A row whose classes on a GPU are all PyTorch's, or follow from no kernel, names none."""
    table = (DOCS / GPU_STATUS).read_text().partition("## What has run where")[2].partition("\n## ")[0]
    works = re.findall(r"^\| ([^|]+) \|", table, flags=re.M)
    assert {row.evidence for row in ROWS} - {""} <= set(works)
    for row in ROWS:
        has_kernel = any("cuda" in OPS[op].kernel_devices for op in row.ops)
        assert has_kernel <= bool(row.evidence), row


def test_the_python_reference_names_everything_that_is_public() -> None:
    named = re.findall(r"auto(?:class|function):: fp8serve\.(\w+)", (DOCS / "api.md").read_text())
    assert sorted(named) == sorted(set(fp8serve.__all__) - {"__version__"})


def test_the_pictures_of_the_concepts_are_up_to_date(tmp_path: Path) -> None:
    """Text and curves are equal; coordinates may differ by one pixel, since sums depend on the processor."""
    concepts.draw(tmp_path)
    number = re.compile(r"-?\d+\.\d+")
    for path in tmp_path.iterdir():
        drawn, recorded = path.read_text(), (DOCS / "concepts" / path.name).read_text()
        assert number.sub("", drawn) == number.sub("", recorded), "run: make pictures"
        values = [list(map(float, number.findall(text))) for text in (drawn, recorded)]
        assert values[0] == pytest.approx(values[1], abs=1.0)
    assert sorted(os.listdir(tmp_path)) == sorted(os.listdir(DOCS / "concepts"))


# -- GPU status, and counts --------------------------------------------------------------------------------------------

GPU_STATUS = "cuda.md"
HISTORY = ("performance-log.md", "CHANGELOG.md")
STATUS = re.compile(
    r"\b[AHB][12]00\b"  # the name of a GPU
    r"|(?i:emulator here|only on an emulator|needs a GPU"
    r"|(?:has|have|had|was|were|been|nothing)\s+(?:(?:not|never|yet|been|has|since)\s+)*(?:run|ran|tried|tested)\s+on\s+an?\s+(?:real\s+)?"
    r"(?:GPU|one\b|NVIDIA)"
    r"|(?:run|tried|tested)\s+on\s+a\s+real)"
)


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("Its kernels have run on an\nH200.", True),
        ("nothing has run on a GPU", True),
        ("This has not been run on a GPU.", True),
        ("kernels have not run on a GPU yet", True),
        ("nothing has run on a real one yet", True),
        ("CUDA runs on an emulator here.", True),
        ("whether they can be captured has not been tried on a GPU", True),
        ("On a GPU the weight is widened in every call.", False),
        ("`--device cuda` runs it on a GPU.", False),
    ],
)
def test_statements_of_gpu_status_are_recognized(text: str, matches: bool) -> None:
    assert bool(STATUS.search(text)) == matches


@pytest.mark.parametrize(
    "page",
    [page for page in [*PAGES, *ROOT.glob("*.md")] if page.name not in {GPU_STATUS, *HISTORY}],
    ids=lambda page: page.stem,
)
def test_only_one_page_states_what_has_run_on_which_gpu(page: Path) -> None:
    """All other pages link to its table, so that pages cannot contradict each other."""
    assert not STATUS.findall(page.read_text()), f"say it in docs/{GPU_STATUS}, and link to #what-has-run-where"


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", DOCS / "questions.md", DOCS / "promises.md"], ids=lambda p: p.stem
)
def test_pages_that_mention_gpus_link_to_what_has_run_where(page: Path) -> None:
    assert f"{GPU_STATUS}#what-has-run-where" in page.read_text()


def test_the_page_of_gpus_names_the_ops_without_a_kernel_there() -> None:
    paragraph = re.search(r"^These ops have no CUDA kernel;.*?\n\n", (DOCS / GPU_STATUS).read_text(), flags=re.M | re.S)
    assert paragraph is not None
    without = [name for name, op in OPS.items() if "cuda" not in op.kernel_devices]
    assert sorted(re.findall(r"`(\w+)`", paragraph[0])) == sorted(without)


def test_the_readme_counts_the_families_and_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert f"| {len(FAMILIES)} decoders of its own" in text
    assert text.count("\n") <= 150


# -- links -------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub and the site give to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    titles = [title.strip().lower() for title in re.findall(r"^#+ (.+)$", text, flags=re.M)]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for path, anchor in re.findall(r"\]\((?![a-z]+:)([^)#\s]*)#?([^)\s]*)\)", prose):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        if anchor:
            assert anchor in anchors(target), f"{path}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_site_shows_every_picture_and_line(page: Path) -> None:
    """The site omits pictures in raw HTML, and treats a line that begins with % as a comment."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    assert not re.findall(r"<img\b|^\s*%.*", prose, flags=re.M)


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"^([a-z][\w/-]*)$", (DOCS / "index.md").read_text(), flags=re.M)
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in PAGES} - {"index"}
    assert sorted(listed) == sorted(pages)
