"""An adapter over a database in memory."""

from __future__ import annotations

import pytest
import tvm
import tvm_ffi

from relaxtune.tuning_db.metaschedule import (
    MetaScheduleAdapter,
)
from relaxtune.tuning_db.store import TuningDatabase
from tests.tuning_db.metaschedule.matmul_case import TARGET


@pytest.fixture
def database():
    """Return a database in memory: the adapter talks to the contract, which other tests hold over every dialect."""
    with TuningDatabase.open("sqlite://") as opened:
        yield opened


@pytest.fixture(scope="module")
def environment(samples):
    return samples.environment(tvm_version=tvm.__version__, tvm_ffi_version=tvm_ffi.__version__)


@pytest.fixture
def adapter(database, samples, environment):
    return MetaScheduleAdapter(database, samples.target(), environment, tvm_target=TARGET, seed=5)
