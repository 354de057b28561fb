"""docs/upgrading.md states the layout version of every file that the code writes."""

import re
from pathlib import Path

from fp8serve.model.formats import scales
from fp8serve.server.finetuning import schema
from fp8serve.train import checkpoint

PAGE = (Path(__file__).resolve().parent.parent / "docs/upgrading.md").read_text()


def test_the_layouts_are_those_of_the_code() -> None:
    stated = dict(re.findall(r"^\| (?:a |the )?`?(\w+)[^|]*\| (\d+)\b", PAGE, flags=re.M))
    assert stated == {
        "scales": scales.VERSION,
        "checkpoint": str(checkpoint.VERSION),
        "job": str(schema.SCHEMA_VERSION),
    }
