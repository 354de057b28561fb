"""Generates docs/compatibility.md by running the tests of every architecture: `make compatibility`."""

import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

from tests.compatibility.cases import BY_TRANSFORMERS, NAMES, NOT_READ_BY_TRANSFORMERS, architecture, repository

TESTS = [Path(__file__).with_name(f"test_{name}.py") for name in ("compatibility", "calibrated")]
# Name of a test -> (title of its column, description).
CHECKS = {
    "test_logits": ("logits", "equal transformers' to rounding, in BF16 and in FP32, from one file and from several"),
    "test_greedy_tokens": (
        "64 tokens",
        "greedy, through the paged engine, up to the end of the context and beyond every window: each is the best by "
        "transformers' logits, to rounding",
    ),
    "test_calibrate_and_serve": (
        "calibrate, serve",
        "static scales of every linear and of the KV cache; what is written is served, with an FP8 cache",
    ),
    "test_training_step": (
        "train",
        "a step in FP8 under delayed, current, rowwise and block scaling: finite, and every weight moves",
    ),
    "test_formats": (
        "formats",
        "compressed-tensors, `fp8` and ModelOpt hold the same numbers, and are served with the same logits",
    ),
    "test_transformers_reads_what_is_written": (
        "read back",
        "transformers reads the BF16 and compressed-tensors directories, and gives the same logits",
    ),
}
HEAD = """# Architectures

Made by `make compatibility`, which runs `tests/compatibility` on a tiny random model of each architecture, written by
transformers' own class. A cell says whether all of its tests passed. Every key that a family's `config.json`
may hold is honoured, or refused in one sentence.

Where "computed by" says transformers there is no family: transformers' own class runs, with our linear layers and our
attention. These rows are examples of such classes; docs/formats.md says which classes cannot run.
"""
Outcomes = Mapping[tuple[str, str], bool]  # (test, name of the model) -> whether all of it passed


def page(outcomes: Outcomes) -> str:
    """Returns the text of the page."""
    titles = ["architecture, `model_type`", "such as", "computed by", *(title for title, _ in CHECKS.values())]
    rows = [titles, ["---"] * len(titles), *(_row(name, outcomes) for name in NAMES)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    meanings = "\n".join(f"* **{title}**: {meaning}." for title, meaning in CHECKS.values())
    return f"{HEAD}\n{table}\n\n{meanings}\n"


def _row(name: str, outcomes: Outcomes) -> list[str]:
    cells = ["yes" if outcomes.get((check, name)) else "no" for check in CHECKS]
    by = "transformers" if name in BY_TRANSFORMERS else "fp8serve"
    return [f"{architecture(name)}, `{name}`", repository(name), by, *cells]


def complete() -> Outcomes:
    """Returns the outcomes if every test that is not skipped passes."""
    left_out = {("test_transformers_reads_what_is_written", name) for name in NOT_READ_BY_TRANSFORMERS}
    return {(check, name): (check, name) not in left_out for check in CHECKS for name in NAMES}


def tested() -> Outcomes:
    """Runs the tests; returns the outcome of every test and model."""
    outcomes: dict[tuple[str, str], list[bool]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = ("-q", "-n0", "-p", "no:cacheprovider", f"--junit-xml={report}")
        subprocess.run([sys.executable, "-m", "pytest", *map(str, TESTS), *options], stdout=sys.stderr, check=False)
        for case in ElementTree.parse(report).iter("testcase"):
            test, _, parameters = case.attrib["name"].partition("[")
            name = next(name for name in parameters.rstrip("]").split("-") if name in NAMES)
            outcomes[test, name].append(all(child.tag not in ("failure", "error", "skipped") for child in case))
    return {key: all(passed) for key, passed in outcomes.items()}


if __name__ == "__main__":
    print(page(tested()), end="")
