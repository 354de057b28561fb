"""Curves in a terminal."""

from fp8serve.charts import text_chart


def test_a_falling_line_goes_from_the_upper_left_to_the_lower_right() -> None:
    lines = text_chart({"training": [(0, 4.0), (7, 0.0)]}, width=8, height=4).splitlines()
    plot = [line.split("│")[1] for line in lines[:4]]
    assert [line.split("│")[0].strip() for line in lines[:4]] == ["4", "", "", "0"]
    assert [len(row) - len(row.lstrip()) for row in plot] == sorted(len(row) - len(row.lstrip()) for row in plot)
    assert plot[0][0] != " "
    assert len(plot[3]) == 8
    assert lines[4].split() == ["step", "0", "step", "7"]
    assert lines[5].split()[1] == "training"


def test_further_curves_are_drawn_as_letters_over_the_first() -> None:
    curves = {"training": [(1, 2.0), (2, 1.0)], "validation": [(1, 2.0), (2, 2.0)]}
    lines = text_chart(curves, width=10, height=5).splitlines()
    top = lines[0].split("│")[1]
    assert (len(top), top[0], top[-1], "o" in top[1:-1]) == (10, "o", "o", False)
    assert lines[-1].split()[1:] == ["training", "o", "validation"]


def test_one_point_and_equal_values_are_drawn() -> None:
    lines = text_chart({"a": [(3, 1.5)]}, width=9, height=3).splitlines()
    assert "".join(line.split("│")[1] for line in lines[:3]).strip()
    assert lines[3].split() == ["step", "3", "step", "3"]
    flat = text_chart({"a": [(n, 1e-300) for n in range(50)]}, width=9, height=3).splitlines()
    assert len(flat[1].split("│")[1]) == 9
