import re
from xml.etree import ElementTree

import pytest

from fp8serve.calibration.charts import HEIGHT, WIDTH, Dot, dots, sparkline


def svg_of(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text[: text.index("</svg>") + 6])


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", [[5.0], [1e-3, 1e4], [2.0, 2.0, 2.0], [0.5, 0.6, 90.0]])
def test_every_dot_lies_inside_the_frame_and_higher_is_up(log: bool, values: list[float]) -> None:
    svg = svg_of(dots({"a": [Dot(i, v, str(v)) for i, v in enumerate(values)]}, "layer", log=log))
    circles = svg.findall("circle")
    assert len(circles) == len(values)
    heights = [float(c.attrib["cy"]) for c in circles]
    assert all(0 <= y <= HEIGHT for y in heights)
    assert all(0 <= float(c.attrib["cx"]) <= WIDTH for c in circles)
    assert sorted(range(len(values)), key=lambda i: values[i]) == sorted(range(len(values)), key=lambda i: -heights[i])


@pytest.mark.parametrize(
    ("low", "high", "log"),
    [
        (20, 40, False),
        (0.01, 300, True),
        (1.0, 1.3, True),
        (3.0, 3.0, True),
        (1, 1, False),
        (1e-9, 3e5, True),
        (0, 0.18, False),
        (0, 0, False),
    ],
)
def test_axes_have_a_few_round_ticks(low: float, high: float, log: bool) -> None:
    svg = svg_of(dots({"a": [Dot(0, low, ""), Dot(1, high, "")]}, "layer", log=log))
    ticks = [t.text for t in svg.findall("text") if t.attrib["class"] == "end"]
    assert 2 <= len(ticks) <= 9
    assert float(str(ticks[0])) <= low
    assert float(str(ticks[-1])) >= high
    assert all(re.fullmatch(r"-?[\d.e+-]{1,6}", str(t)) for t in ticks)


def test_nothing_to_draw_is_empty_text() -> None:
    assert dots({}, "layer") == dots({"a": []}, "layer") == sparkline([]) == sparkline([1.0]) == ""


def test_a_sparkline_runs_from_left_to_right_and_survives_zeros() -> None:
    points = svg_of(sparkline([1.0, 2.0, 0.0])).find("polyline")
    assert points is not None
    xs = [float(p.split(",")[0]) for p in points.attrib["points"].split()]
    assert xs == sorted(xs)
    assert len(xs) == 3
    assert sparkline([0.0, 0.0])
