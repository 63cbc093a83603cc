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


@pytest.mark.parametrize("call", [relaxtune.tune, relaxtune.compile])
def test_an_option_that_is_not_there_is_refused_and_a_near_one_is_named(call, tmp_path: Path) -> None:
    with pytest.raises(relaxtune.UsageError, match=r"no option 'precison'; did you mean precision\?; expected one of"):
        call("bert-tiny", tmp_path / "artifact", target="llvm", precison="fp16")
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_cannot_sign_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    for call in (relaxtune.tune, relaxtune.compile):
        with pytest.raises(relaxtune.UsageError, match=r"no-key\.pem cannot be read"):
            call("bert-tiny", tmp_path / "artifact", target="llvm", sign="no-key.pem")
    assert list(tmp_path.iterdir()) == []
