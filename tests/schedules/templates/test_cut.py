"""How few kernels serve all points, and how few lines name them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from relaxtune.schedules.templates.cut import Line, cover, cut_lines, nearest

LOSSES = {"small": [0.0, 0.1, 2.0], "large": [2.0, 0.1, 0.0], "middle": [0.5, 0.0, 0.5]}


def test_kernels_are_taken_until_it_is_enough() -> None:
    assert cover(LOSSES, lambda _, after: True) == []
    assert cover(LOSSES, lambda before, _: max(before) < 1) == ["middle"]
    assert cover(LOSSES, lambda before, _: max(before) < 0.2, ["small"]) == ["small", "large"]
    assert nearest(LOSSES, ["small", "large"]) == ["small", "small", "large"]


def test_no_more_than_five_kernels_are_taken() -> None:
    losses = {number: [float(number != point) for point in range(9)] for number in range(9)}
    assert len(cover(losses, lambda *_: False)) == 5


def test_neighbours_of_one_kernel_share_a_line() -> None:
    axes = {"rows": (16, 64, 256, 1024)}
    points = [{"rows": most} for most in axes["rows"]]
    found = cut_lines(axes, points, [0, 1, 1, 0])
    assert found == (Line((("rows", 16),), 0), Line((("rows", 256),), 1), Line((), 0))


@given(kernels=st.lists(st.integers(0, 2), min_size=12, max_size=12))
def test_each_point_finds_its_kernel(kernels: list[int]) -> None:
    axes = {"batch": (1, 4, 16), "length": (16, 64, 256, 1024)}
    points = [dict(zip(axes, sizes, strict=True)) for sizes in itertools.product(*axes.values())]

    def found(lines: tuple[Line, ...]) -> list[int]:
        keeps = [[all(point[name] <= most for name, most in line.most) for line in lines] for point in points]
        return [lines[each.index(True)].kernel for each in keeps]

    lines = cut_lines(axes, points, kernels)
    assert found(lines) == kernels
    assert lines[-1].most == ()
    assert len(lines) <= len(points)


@pytest.mark.parametrize("count", [1, 3])
def test_one_kernel_is_one_line(count: int) -> None:
    axes = {"rows": tuple(16 * (n + 1) for n in range(count))}
    assert cut_lines(axes, [{"rows": most} for most in axes["rows"]], [0] * count) == (Line((), 0),)
