from __future__ import annotations

import pytest

from relaxtune.tuning_db.errors import DatabaseOpenError, DatabaseUrlError, DatabaseWriteError, NotFoundError
from relaxtune.tuning_db.exchange.archive import merge
from relaxtune.tuning_db.layers import LayeredDatabase
from relaxtune.tuning_db.lookup import Question
from relaxtune.tuning_db.records import Mode, RecordFilter, Status
from relaxtune.tuning_db.store import NO_FILTER, TuningDatabase


def question(samples, **changes) -> Question:
    workload = samples.workload()
    keys = {"workload_hash": workload.workload_hash, "signature_key": workload.signature_key}
    return Question(**{**keys, "target": samples.target(), "environment": samples.environment(), **changes})


def put(database, samples, *records):
    database.record_workload(samples.workload())
    database.record_measurements(records)


@pytest.fixture
def shared(tmp_path, samples):
    """Return the path of a shared database whose best is 5 us here, and 1 us on another device."""
    path = tmp_path / "shared.db"
    with TuningDatabase.open(path) as database:
        other = samples.environment(device_name="EPYC 9124")
        put(database, samples, samples.record(latencies_us=(5.0,)))
        put(database, samples, samples.record(latencies_us=(1.0,), environment=other))
    return path


class TestLayers:
    def test_hit_says_which_layer_it_comes_from(self, database_url, shared, samples):
        with LayeredDatabase.open_layers([database_url, shared]) as layers:
            assert layers.find_best(question(samples)).latency_us == 5.0
            put(layers, samples, samples.record(latencies_us=(7.0,)), samples.record(latencies_us=(4.0,)))
            found = layers.list_top(question(samples), k=10)
            assert [(record.latency_us, record.layer) for record in found] == [
                (4.0, layers.layers[0]),
                (5.0, layers.layers[1]),
                (7.0, layers.layers[0]),
                # The best of all, but on another device.
                (1.0, layers.layers[1]),
            ]
            assert layers.list_top(question(samples), k=2) == found[:2]
        with TuningDatabase.open(shared) as below:
            assert below.count_records() == 2

    def test_upper_layer_wins_when_latencies_are_equal(self, path, shared, samples):
        with LayeredDatabase.open_layers([path, shared]) as layers:
            put(layers, samples, samples.record(latencies_us=(5.0,), seed=9))
            assert layers.find_best(question(samples)).layer == layers.url

    def test_record_of_both_layers_is_found_once(self, path, shared, samples):
        with LayeredDatabase.open_layers([path, shared]) as layers:
            with TuningDatabase.open(shared, mode=Mode.READ_ONLY) as below:
                merge(layers, below)
            found = layers.list_top(question(samples), k=10)
            assert [(record.latency_us, record.layer) for record in found] == [(5.0, layers.url), (1.0, layers.url)]

    def test_workload_is_found_in_any_layer(self, path, shared, samples):
        with LayeredDatabase.open_layers([path, shared]) as layers:
            assert layers.get_workload("hash1") == samples.workload()
            assert not layers.has_workload("hash2")
            assert layers.info().records == 0

    def test_known_records_come_from_all_layers_each_once(self, path, shared, samples):
        with LayeredDatabase.open_layers([path, shared]) as layers:
            with TuningDatabase.open(shared, mode=Mode.READ_ONLY) as below:
                layers.record_workload(samples.workload())
                layers.record_measurement(below.list_records()[0])
            put(layers, samples, samples.failure(seed=3))
            known = layers.list_known(NO_FILTER, workload_hashes=["hash1", "hash2"])
            assert [(record.latency_us, record.layer) for record in known] == [
                (5.0, layers.layers[0]),
                (None, layers.layers[0]),
                (1.0, layers.layers[1]),
            ]
            failed = RecordFilter(status=Status.BUILD_ERROR)
            assert [record.seed for record in layers.list_known(failed, workload_hashes=["hash1"])] == [3]
            assert layers.list_known(NO_FILTER, workload_hashes=["hash2"]) == []
            assert layers.list_known(NO_FILTER, workload_hashes=[]) == []

    def test_record_takes_along_the_workload_that_only_a_lower_layer_has(self, database_url, shared, samples):
        with LayeredDatabase.open_layers([database_url, shared]) as layers:
            for seed in (1, 2):
                layers.record_measurement(samples.record(seed=seed))
            with pytest.raises(NotFoundError, match="Call record_workload first"):
                layers.record_measurement(samples.record(samples.workload(2)))
            assert layers.record_measurements([]) == []
            assert [workload.workload_hash for workload in layers.list_workloads()] == ["hash1"]
            assert layers.info().records == 2
            assert layers.count_records() == 4

    def test_read_only_layers_refuse_writes(self, path, shared, samples):
        TuningDatabase.open(path).close()
        with LayeredDatabase.open_layers([path, shared], mode=Mode.READ_ONLY) as layers:
            with pytest.raises(DatabaseWriteError, match="read-only"):
                layers.record_workload(samples.workload())
            assert layers.find_best(question(samples)).latency_us == 5.0

    def test_layers_are_refused_when_one_is_missing_or_twice(self, path, tmp_path):
        with pytest.raises(DatabaseOpenError, match="There is no database"):
            LayeredDatabase.open_layers([path, tmp_path / "no.db"])
        with pytest.raises(DatabaseUrlError, match="each once"):
            LayeredDatabase.open_layers([path, path])
        with pytest.raises(DatabaseUrlError, match="one database or more"):
            LayeredDatabase.open_layers([])
