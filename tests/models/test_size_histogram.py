"""Files of the sizes of real calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from relaxtune.models.axis_profile import AxisProfile
from relaxtune.models.buckets import check_axes
from relaxtune.models.errors import ModelShapeError
from relaxtune.models.size_histogram import SizePoint, few_points, profile_of, read_histogram
from relaxtune.models.spec import TensorSpec


def write(folder: Path, text: str) -> Path:
    path = folder / "lengths.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_lines_of_equal_sizes_are_added_up_and_the_smallest_come_first(tmp_path: Path) -> None:
    found = read_histogram(write(tmp_path, "sequence, batch, count\n128,1,5\n16,8,3\n\n16,1,2\n128,1,4\n"))
    assert [(str(point), point.count) for point in found] == [
        ("sequence=16 batch=1", 2),
        ("sequence=16 batch=8", 3),
        ("sequence=128 batch=1", 9),
    ]
    assert profile_of(found) == {"sequence": AxisProfile(16, 128, 128), "batch": AxisProfile(1, 1, 8)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: expected the names of axes and 'count'"),
        ("128,5\n", "got '128,5'"),
        ("sequence,sequence,count\n", "expected the names of axes"),
        ("sequence,count\n128\n", "line 2: expected 2 whole numbers"),
        ("sequence,count\n16,1\n128,-5\n", "line 3: .*got '128,-5'"),
        ("sequence,count\n128,0\n", "line 2: expected 2 whole numbers from 1 on"),
        ("sequence,count\n", "has a header and no sizes"),
    ],
)
def test_file_of_another_form_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ModelShapeError, match=message):
        read_histogram(write(tmp_path, text))


def test_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelShapeError, match="cannot be read"):
        read_histogram(tmp_path / "none.csv")


def test_axis_that_the_inputs_do_not_have_is_refused() -> None:
    with pytest.raises(ModelShapeError, match=r"axis 'length' of the lengths .* expected one of sequence"):
        check_axes(["length"], [TensorSpec("x", "int64", ("sequence",))], "the lengths")


def test_few_points_stand_for_all_calls() -> None:
    points = [SizePoint((("sequence", size),), count) for size, count in ((1, 10), (2, 10), (3, 60), (4, 10), (5, 10))]
    assert few_points(points, 5) == tuple(points)
    few = few_points(points, 3)
    assert [(dict(point.sizes)["sequence"], point.count) for point in few] == [(1, 20), (3, 60), (4, 20)]
