from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tuning_db.new_schema import schema_is_migrated


@pytest.fixture(autouse=True)
def _every_database_is_migrated() -> Iterator[None]:
    with schema_is_migrated():
        yield
