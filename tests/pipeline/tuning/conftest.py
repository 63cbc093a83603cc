from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from relaxtune.tuning_db.contract import TuningDatabase
from relaxtune.tuning_db.store import SqlDatabase


@pytest.fixture
def database(tmp_path: Path) -> Iterator[TuningDatabase]:
    with SqlDatabase.open(f"sqlite:///{tmp_path}/tuning.db") as opened:
        yield opened
