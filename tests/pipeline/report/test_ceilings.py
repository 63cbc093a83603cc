"""A device's ceilings: read from a file, known, or measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.report.ceilings import (
    KNOWN_CEILINGS,
    Ceilings,
    known_ceilings,
    measure_cpu_ceilings,
    read_ceilings,
)

CEILINGS = Ceilings("test", {"float32": 1e12}, 10e9, 1.0, "made up")


def test_ceilings_are_read_from_their_own_json(tmp_path: Path) -> None:
    path = tmp_path / "ceilings.json"
    path.write_text(json.dumps(CEILINGS.to_json()))
    assert read_ceilings(path) == CEILINGS


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"device": "x", "flops_per_s": {"float32": "fast"}}', '{"device": "x", "flops_per_s": 3}'],
)
def test_a_file_that_is_no_ceilings_is_refused_with_the_form(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ceilings.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"cannot be used .* expected \{\"device\": NAME"):
        read_ceilings(path)


def test_a_rate_of_zero_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ceilings.json"
    path.write_text(json.dumps({**CEILINGS.to_json(), "bytes_per_s": 0}))
    with pytest.raises(UsageError, match="holds a rate that is not above 0"):
        read_ceilings(path)


def test_known_ceilings_name_their_source_and_no_other_device_has_any() -> None:
    assert all(one.source and name == one.device for name, one in KNOWN_CEILINGS.items())
    assert known_ceilings("another GPU") is None
    assert known_ceilings(None) is None


@pytest.mark.slow
def test_this_cpus_ceilings_are_measured() -> None:
    ceilings = measure_cpu_ceilings()
    assert ceilings.flops_per_s["float32"] > 1e9
    assert (ceilings.bytes_per_s or 0.0) > 1e8
    assert "measured on this machine" in ceilings.source
