"""Charts are well-formed SVG that fetches nothing; names are text in them, and a pointer shows what a mark is."""

from __future__ import annotations

import functools
from xml.etree import ElementTree

import pytest
from markupsafe import Markup

from relaxtune.pipeline.pages.charts import Bar, Line, Point, bars, curve, histograms, lines, roofline

SVG = "{http://www.w3.org/2000/svg}"
NAME = "<script>&$x_1$"
CHARTS = {
    "bars": lambda: bars([Bar(NAME, 0.5, "50.0%", title=NAME), Bar("b", 0.2, "20.0%")], "shares"),
    "curve": lambda: curve([(0, 3.0), (9_000, 2.0), (86_400, 1.0)], "seconds", "ms"),
    "roofline": lambda: roofline([Point(10, 1e10, 0.5, "#2b6cb0", NAME)], 2e10, {"float32": 1e11}),
    "histograms": lambda: histograms([(NAME, [90, 3, 0, 0]), ("b", [5, 0, 0, 1])], [0.0, 0.1, 1.0]),
    "lines": lambda: lines(
        {"ms": [Line("ours", [(16, 1.0), (64, 4.0)], "batch=1"), Line("ort", [(16, 2.0)])]}, "sequence", NAME
    ),
}


@functools.cache
def chart(name: str) -> Markup:
    return CHARTS[name]()


def texts(chart: Markup, tag: str = "text") -> list[str]:
    return [str(one.text) for one in ElementTree.fromstring(chart).iter(f"{SVG}{tag}")]


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_well_formed_fetches_nothing_and_has_no_style_for_the_page(name: str) -> None:
    drawn = chart(name)
    assert ElementTree.fromstring(drawn).get("aria-label")
    assert "<script" not in drawn
    assert "<style" not in drawn
    assert 'href="http' not in drawn
    assert "fill: #000000" not in drawn  # text takes the colour of the page


def test_several_charts_stand_in_one_page() -> None:
    every = ElementTree.fromstring(f"<page>{chart('bars')}{chart('curve')}{chart('roofline')}</page>")
    ids = [one.get("id") for one in every.iter() if one.get("id")]
    shapes = {one.get("id"): ElementTree.tostring(one) for one in every.iter() if one.get("id")}
    # One that is there twice is the same both times.
    assert all(ElementTree.tostring(one) == shapes[one.get("id")] for one in every.iter() if one.get("id") in ids)


def test_marks_have_titles() -> None:
    assert texts(chart("bars"), "title") == [NAME, "b"]
    assert texts(chart("roofline"), "title") == [NAME]
    told = texts(chart("histograms"), "title")
    assert told[:2] == ["90 elements, equal", "3 elements, off by 0 to 0.1 of the tolerance"]
    assert told[7] == "1 elements, off by more than 1 of the tolerance, or not finite"


def test_axes_and_lines_are_named() -> None:
    assert {"seconds", "ms"} <= {*texts(chart("curve"))}
    assert {"20 GB/s", "float32 100 GFLOP/s", "FLOP per byte"} <= {*texts(chart("roofline"))}
    assert {"ours", "ort", "sequence", "ms", "16", "64", "batch=1", NAME} <= {*texts(chart("lines"))}


def test_nothing_to_draw_is_nothing() -> None:
    assert bars([], "shares") == curve([(0, 1.0)], "s", "ms") == ""


def test_a_name_of_any_letters_is_drawn_and_obeyed_by_no_terminal() -> None:
    (bar,) = texts(bars([Bar("\u6a21\x1b[2J", 1.0, "")], "shares"), "title")
    assert bar == "\u6a21?[2J"


def test_long_names_are_cut() -> None:
    drawn = texts(bars([Bar("fused_" * 40, 1.0, "100%")], "shares"))
    assert max(map(len, drawn)) == 46
