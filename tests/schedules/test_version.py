from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import relaxtune.schedules
from relaxtune.schedules.version import fallback_version

SOURCES = Path(relaxtune.schedules.__file__).parent


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(SOURCES, tmp_path / "schedules")


def test_version_is_that_of_the_source_wherever_it_lies(copy):
    assert fallback_version("llvm", copy) == fallback_version("llvm")
    assert len(fallback_version("llvm")) == 16


@pytest.mark.parametrize(
    ("changed", "llvm", "cuda"),
    [
        ("fallback.py", True, True),
        ("cpu/vector_math.py", True, True),
        ("cpu/matmul.py", True, False),
        ("gpu/dlight_rules.py", False, True),
        ("templates/base.py", False, False),
        ("search/llvm_rules.py", False, False),
    ],
)
def test_version_changes_with_the_code_that_makes_the_fallback(copy, changed, llvm, cuda):
    path = copy / changed
    path.write_text(path.read_text() + "\nTILE = 7\n")
    assert (fallback_version("llvm", copy) != fallback_version("llvm")) is llvm
    assert (fallback_version("cuda", copy) != fallback_version("cuda")) is cuda


def test_version_changes_when_a_rule_is_renamed_or_added(copy):
    (copy / "cpu" / "plain.py").rename(copy / "cpu" / "simple.py")
    renamed = fallback_version("llvm", copy)
    assert renamed != fallback_version("llvm")
    (copy / "cpu" / "new.py").write_text("")
    fallback_version.cache_clear()
    assert fallback_version("llvm", copy) != renamed
