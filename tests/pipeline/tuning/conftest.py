from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from relaxtune.pipeline.environment import detect_environment, target_key
from relaxtune.schedules.targets import resolve_target
from relaxtune.tuning_db.contract import TuningDatabase
from relaxtune.tuning_db.store import SqlDatabase
from tests.pipeline.tuning.tuning_cases import Place


@pytest.fixture(scope="session")
def place() -> Place:
    target = resolve_target("llvm")
    return Place(target, detect_environment(target), target_key(target))


@pytest.fixture
def database(tmp_path: Path) -> Iterator[TuningDatabase]:
    with SqlDatabase.open(f"sqlite:///{tmp_path}/tuning.db") as opened:
        yield opened
