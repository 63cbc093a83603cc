"""Features of candidates, over every dialect."""

from __future__ import annotations

import math

import numpy as np
import pytest

from relaxtune.tuning_db.errors import InvalidRecordError, NotFoundError
from relaxtune.tuning_db.exchange.pruning import PruneRules, prune
from relaxtune.tuning_db.features import list_features, record_features
from relaxtune.tuning_db.records import Status
from relaxtune.tuning_db.sql.schema import FeatureRow

VERSION = "per-store/164/0.27.0.post1"


def matrix(seed: int, stores: int = 3) -> np.ndarray:
    """Return features as MetaSchedule's are: most of the 164 are zero."""
    rng = np.random.default_rng(seed)
    values = rng.random((stores, 164), dtype=np.float32)
    return np.where(rng.random(values.shape) < 0.7, 0, values).astype(np.float32)


@pytest.fixture
def ids(database, samples):
    database.record_workload(samples.workload())
    return database.record_measurements(
        [samples.record(latencies_us=(5.0,)), samples.failure(), samples.record(target=samples.target(arch="znver3"))]
    )


def test_features_come_back_bit_for_bit_with_what_was_measured(database, samples, ids):
    given = {id_: matrix(id_) for id_ in ids}
    record_features(database, VERSION, given)
    found = list_features(database, VERSION, samples.target())
    assert [candidate.record_id for candidate in found] == ids[::-1]
    for candidate in found:
        assert candidate.values.dtype == np.float32
        np.testing.assert_array_equal(candidate.values, given[candidate.record_id])
    assert [(c.status, c.latency_us, c.workload_hash) for c in found[1:]] == [
        (Status.BUILD_ERROR, None, "hash1"),
        (Status.OK, 5.0, "hash1"),
    ]
    assert len(list_features(database, VERSION, samples.target(), limit=2)) == 2


def test_versions_and_targets_are_told_apart(database, samples, ids):
    record_features(database, VERSION, {ids[0]: matrix(1), ids[2]: matrix(2)})
    record_features(database, "other", {ids[0]: matrix(3)})
    assert [c.record_id for c in list_features(database, "other", samples.target())] == [ids[0]]
    # A lower architecture of the family teaches the higher one, and not the other way round.
    assert [c.record_id for c in list_features(database, VERSION, samples.target(arch="znver3"))] == [ids[2]]
    assert list_features(database, VERSION, samples.target("cuda", "sm_90a")) == ()


def test_features_written_again_are_replaced(database, samples, ids):
    for seed in (1, 2):
        record_features(database, VERSION, {ids[0]: matrix(seed, stores=seed)})
    (found,) = list_features(database, VERSION, samples.target())
    np.testing.assert_array_equal(found.values, matrix(2, stores=2))
    record_features(database, VERSION, {})


def test_nothing_is_kept_when_one_of_them_has_no_record(database, samples, ids):
    with pytest.raises(NotFoundError, match="Record the candidates first"):
        record_features(database, VERSION, {ids[0]: matrix(1), 999: matrix(2)})
    assert list_features(database, VERSION, samples.target()) == ()


@pytest.mark.parametrize("values", [np.zeros(3), np.full((1, 2), math.nan), np.full((1, 2), 1e300)])
def test_what_is_no_finite_matrix_is_refused(database, ids, values):
    with np.errstate(over="ignore"), pytest.raises(InvalidRecordError, match="must be a finite matrix"):
        record_features(database, VERSION, {ids[0]: values})


@pytest.mark.parametrize("version", ["", "x" * 129])
def test_version_without_or_with_too_many_characters_is_refused(database, ids, version):
    with pytest.raises(InvalidRecordError, match="1 to 128 characters"):
        record_features(database, version, {ids[0]: matrix(1)})


def test_features_go_with_their_record(database, samples, ids):
    record_features(database, VERSION, {id_: matrix(id_) for id_ in ids})
    database.record_measurement(samples.record(latencies_us=(1.0,)))
    assert prune(database, PruneRules(dominated=True)).removed == 1
    assert [c.record_id for c in list_features(database, VERSION, samples.target())] == ids[:0:-1]


def test_features_of_a_candidate_take_some_hundred_bytes(database, ids):
    record_features(database, VERSION, {ids[0]: matrix(1)})
    stored = database.read(lambda session: len(session.query(FeatureRow).one().data))
    assert 0 < stored < 1200 < matrix(1).nbytes
