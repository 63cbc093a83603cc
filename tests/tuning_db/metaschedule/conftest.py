"""A database in memory."""

from __future__ import annotations

import pytest
import tvm
import tvm_ffi

from relaxtune.tuning_db.store import TuningDatabase


@pytest.fixture
def database():
    """Return a database in memory: other tests hold its contract over every dialect."""
    with TuningDatabase.open("sqlite://") as opened:
        yield opened


@pytest.fixture(scope="module")
def environment(samples):
    return samples.environment(tvm_version=tvm.__version__, tvm_ffi_version=tvm_ffi.__version__)
