import re
from xml.etree import ElementTree

import pytest

from fp8serve.calibration.reports.sections import _histogram
from fp8serve.calibration.result import CastReport
from fp8serve.charts import HEIGHT, WIDTH, Dot, curve, dots, heat, sparkline


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


def test_a_sparkline_runs_from_left_to_right_and_may_be_all_zero() -> None:
    points = svg_of(sparkline([1.0, 2.0, 0.0])).find("polyline")
    assert points is not None
    xs = [float(p.split(",")[0]) for p in points.attrib["points"].split()]
    assert xs == sorted(xs)
    assert len(xs) == 3
    assert sparkline([0.0, 0.0])


# -- the page's own drawings ---------------------------------------------------------------------------------------


def areas(svg: ElementTree.Element) -> dict[str, float]:
    """Returns the total area of the cells by color (class and opacity), in square pixels."""
    result = {}
    for path in svg.findall("path"):
        cells = re.findall(r"M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)H", path.attrib["d"])
        key = path.attrib["class"] + path.attrib.get("fill-opacity", "")
        result[key] = sum((float(x2) - float(x)) * (float(y2) - float(y)) for x, y, x2, y2 in cells)
    return result


def test_a_heat_map_has_a_cell_for_every_value() -> None:
    svg = svg_of(heat([[0.0, -1.0, -9.0], [0.5, 0.0, None]], ["first", "second"], "batch"))
    area = areas(svg)
    cell = area["hot"]  # cells with a value above 0
    assert area["h1.00"] == pytest.approx(2 * cell, rel=0.01)
    assert sum(area.values()) == pytest.approx(5 * cell, rel=0.01)
    assert [r.findtext("title") for r in svg.findall("rect")] == ["first", "second"]


def test_a_shorter_row_of_a_heat_map_ends_at_the_right() -> None:
    svg = svg_of(heat([[0.0, 0.0, 0.0, 0.0], [1.0]], ["", ""], "batch"))
    (hot,) = (p.attrib["d"] for p in svg.findall("path") if p.attrib["class"] == "hot")
    assert hot.split("H")[1].startswith("460")


def test_one_batch_gives_no_heat_map() -> None:
    assert heat([[0.0]], ["one"], "batch") == heat([], [], "batch") == ""


def test_bars_are_as_high_as_their_shares() -> None:
    shares = [0.0] * 16
    shares[0], shares[8] = 0.1, 0.4
    histogram, _, caption = _histogram(CastReport(30.0, 0.0, 0.2, tuple(shares), 0.0)).partition("<small>")
    svg = svg_of(histogram)
    assert caption.startswith("zero 20 %, subnormal 10 %")
    drawn = [(r.attrib["class"], float(r.attrib["height"])) for r in svg.findall("rect")]
    assert len(drawn) == 17
    assert [look for look, _ in drawn] == ["hot", "hot", *["h"] * 15]
    assert drawn[0][1] == pytest.approx(drawn[9][1] / 2, abs=0.1)
    assert drawn[1][1] == pytest.approx(drawn[9][1] / 4, abs=0.1)
    assert svg.findall("rect")[9].findtext("title") == "2^1 to 2^2: 40 %"


def test_weights_of_4_bits_have_a_bar_for_each_exponent_of_e2m1() -> None:
    histogram, _, caption = _histogram(CastReport(19.0, 0.0, 0.1, (0.2, 0.3, 0.25, 0.15), 0.05)).partition("<small>")
    bars = svg_of(histogram).findall("rect")
    assert [bar.attrib["class"] for bar in bars] == ["hot", "hot", "h", "h", "h"]
    assert [bar.findtext("title") for bar in bars][1:3] == ["0.5, the subnormal value: 20 %", "1 and 1.5: 30 %"]
    assert caption.startswith("zero 10 %, subnormal 20 %, largest value 5 %")


def test_a_curve_shows_its_limit_and_stays_below_the_frame() -> None:
    svg = svg_of(curve([1.0, 3.0], "batch", 2.0))
    (line,) = svg.findall("polyline")
    (limit,) = (x for x in svg.findall("line") if x.attrib["class"] == "zero")
    heights = [float(p.split(",")[1]) for p in line.attrib["points"].split()]
    assert heights[1] < float(limit.attrib["y1"]) < heights[0]
    assert "limit 2" in [t.text for t in svg.findall("text")]
    assert curve([1.0], "batch") == ""
    assert curve([0.0, 0.0], "batch")
