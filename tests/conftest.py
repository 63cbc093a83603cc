from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

PACKAGES = ("models", "schedules", "tuning_db", "pipeline")


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    """Undo what a command of the test configured: the command line owns its process, a test does not."""
    before = [(logging.getLogger(name), logging.getLogger(name).level) for name in PACKAGES]
    yield
    for logger, level in before:
        logger.handlers = []
        logger.setLevel(level)
