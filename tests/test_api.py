"""The public API, where it says more than the functions that it calls."""

from __future__ import annotations

from pathlib import Path

import pytest

import relaxtune
from relaxtune.api import _request
from relaxtune.models.axis_profile import AxisProfile


def test_lengths_of_real_calls_are_a_profile(tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("sequence,count\n16,1\n128,5\n512,1\n")
    request = _request("bert-tiny", {"lengths": file})
    assert request.profile == {"sequence": AxisProfile(16, 128, 512)}
    assert [point.count for point in request.lengths] == [1, 5, 1]
    with pytest.raises(relaxtune.UsageError, match="leave profile out, or lengths"):
        relaxtune.inspect("bert-tiny", lengths=file, profile={"sequence": (1, 2, 3)})
