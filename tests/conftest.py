from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    """Undo what a command of the test configured: the command line owns its process, a test does not."""
    logger = logging.getLogger("relaxtune")
    level = logger.level
    yield
    logger.handlers = []
    logger.setLevel(level)
