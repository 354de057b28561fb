"""Standalone SVGs: well formed, curves inside their frame, larger values higher, gaps at non-finite values."""

import math
from xml.etree import ElementTree

import pytest

from fp8serve.charts import FILE_LEFT, FILE_RIGHT, FILE_TOP, FILE_WIDTH, Panel, svg_file

NAMESPACE = "{http://www.w3.org/2000/svg}"


def lines(text: str) -> list[list[tuple[float, float]]]:
    polylines = ElementTree.fromstring(text).findall(f"{NAMESPACE}polyline")
    pairs = [[p.split(",") for p in line.attrib["points"].split()] for line in polylines]
    return [[(float(x), float(y)) for x, y in line] for line in pairs]


@pytest.mark.parametrize("log", [False, True])
def test_curves_lie_inside_and_larger_is_higher(log: bool) -> None:
    (line,) = lines(svg_file("t", [Panel("y", {"a": [(0, 1.0), (5, 30.0), (9, 2.0)]}, log)], "x"))
    (x0, y0), (x1, y1), (x2, y2) = line
    assert FILE_LEFT <= x0 < x1 < x2 <= FILE_WIDTH - FILE_RIGHT
    assert FILE_TOP <= y1 < y2 < y0


def test_non_finite_values_are_gaps() -> None:
    points = [(0, 1.0), (1, 2.0), (2, math.nan), (3, 1.0), (4, math.inf), (5, 2.0), (6, 1.0)]
    assert [len(line) for line in lines(svg_file("t", [Panel("y", {"a": points})], "x"))] == [2, 1, 2]


def test_panels_do_not_overlap_and_share_their_colours() -> None:
    curves = {"<a>": [(0, 1.0), (1, 2.0)], "b": [(0, 2.0), (1, 1.0)]}
    text = svg_file('"t" & more', [Panel("upper", curves), Panel("lower", {"b": [(0, 5.0), (1, 9.0)]})], "x")
    root = ElementTree.fromstring(text)
    upper_a, upper_b, lower_b = lines(text)
    assert max(y for _, y in upper_a + upper_b) < min(y for _, y in lower_b)
    colours = [line.attrib["stroke"] for line in root.findall(f"{NAMESPACE}polyline")]
    assert colours[1] == colours[2] != colours[0]
    assert {"<a>", "b", '"t" & more', "upper", "lower", "x"} <= {t.text for t in root.findall(f"{NAMESPACE}text")}
