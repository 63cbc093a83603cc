from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from relaxtune.tuning_db.store import TuningDatabase


@pytest.fixture
def database(tmp_path: Path) -> Iterator[TuningDatabase]:
    with TuningDatabase.open(f"sqlite:///{tmp_path}/tuning.db") as opened:
        yield opened
