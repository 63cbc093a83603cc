"""Archives, merging and pruning, over every dialect."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from relaxtune.tuning_db.errors import InvalidRecordError
from relaxtune.tuning_db.exchange.archive import import_archive, merge, read_archive
from relaxtune.tuning_db.exchange.entries import COVERED_TABLES, DERIVED_TABLES, merge_jobs, merge_workloads
from relaxtune.tuning_db.exchange.pruning import PruneRules, prune
from relaxtune.tuning_db.jobs import Job
from relaxtune.tuning_db.records import RecordFilter, Route, Status
from relaxtune.tuning_db.sql.schema import Base
from relaxtune.tuning_db.store import TuningDatabase
from tests.tuning_db.exchange.filled import START, content, export, fill


def test_archive_covers_every_table():
    # Batches are what one host did with its plans, tags and gates are one store's: they mean nothing elsewhere.
    of_one_host = {"batches", "cells", "attempts", "tag_moves", "gates"}
    assert set(Base.metadata.tables) == COVERED_TABLES | DERIVED_TABLES | of_one_host
    assert not COVERED_TABLES & DERIVED_TABLES


class TestArchive:
    def test_everything_comes_back_in_another_database(self, database, samples, tmp_path):
        fill(database, samples)
        before = content(database, tmp_path / "one")
        with TuningDatabase.open("sqlite://") as other:
            done = import_archive(other, tmp_path / "one")
            assert (done.workloads, done.jobs, done.records, done.new_records) == (3, 1, 13, 13)
            assert (done.artifacts, done.validations, done.benchmarks) == (1, 1, 1)
            assert content(other, tmp_path / "two") == before
            ours = sorted(other.list_records(), key=lambda r: (r.created_at, r.key))
            theirs = sorted(database.list_records(), key=lambda r: (r.created_at, r.key))
            assert [r.key for r in ours] == [r.key for r in theirs]

    def test_archive_comes_back_into_each_dialect(self, database, samples, tmp_path):
        with TuningDatabase.open("sqlite://") as source:
            fill(source, samples)
            before = content(source, tmp_path / "one")
        import_archive(database, tmp_path / "one")
        assert content(database, tmp_path / "two") == before
        assert import_archive(database, tmp_path / "one").new_records == 0
        assert content(database, tmp_path / "two") == before

    def test_filter_takes_the_records_and_what_they_refer_to(self, database, samples, tmp_path):
        fill(database, samples)
        export(database, tmp_path / "part", RecordFilter(workload_hash="hash1", status=Status.OK))
        with TuningDatabase.open("sqlite://") as other:
            done = import_archive(other, tmp_path / "part")
            assert (done.workloads, done.records, done.artifacts) == (1, 2, 0)
            assert {record.workload_hash for record in other.list_records()} == {"hash1"}


class TestMerge:
    def test_merge_takes_everything_of_the_source(self, database, samples, tmp_path):
        with TuningDatabase.open(tmp_path / "source.db") as source:
            fill(source, samples)
            assert merge(database, source).new_records == 13
            assert content(database, tmp_path / "a") == content(source, tmp_path / "b")
            assert merge(database, source).new_records == 0

    def test_merge_is_commutative_associative_and_idempotent(self, samples, tmp_path):
        parts = [range(4), range(2, 6), range(3, 8)]
        sources = []
        for number, part in enumerate(parts):
            source = TuningDatabase.open("sqlite://")
            fill(source, samples, part)
            # The same workload, told differently by each.
            source.record_workload(samples.workload(2, name=f"name{number}", flops=float(number)))
            sources.append(source)
        results = set()
        for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2, 1, 0)):
            with TuningDatabase.open("sqlite://") as database:
                for number in order:
                    merge(database, sources[number])
                results.add(content(database, tmp_path / "a"))
        assert len(results) == 1
        for source in sources:
            source.close()

    def test_known_family_and_present_ir_win(self, samples):
        known = samples.workload(ir_json=None)
        unknown = samples.workload(family="unknown", name="main")
        for merged in (merge_workloads(known, unknown), merge_workloads(unknown, known)):
            assert (merged.family, merged.name, merged.ir_json) == ("matmul", "matmul1", '{"ir":1}')

    def test_finished_job_wins(self, samples):
        running = Job("j", "m", "0", samples.target(), "{}", START)
        done = Job("j", "m", "0", samples.target(), "{}", START, START, "done")
        assert merge_jobs(running, done) == merge_jobs(done, running) == done

    @settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_merge_of_any_two_databases_is_the_same_both_ways(self, samples, tmp_path, data):
        record = st.builds(
            lambda number, seed, ok, error, us: (
                samples.record(samples.workload(number), seed=seed, latencies_us=(us,), created_at=START)
                if ok
                else samples.failure(samples.workload(number), seed=seed, error=error, created_at=START)
            ),
            number=st.integers(0, 2),
            seed=st.integers(-(2**63), 2**63 - 1) | st.none(),
            ok=st.booleans(),
            error=st.text(max_size=20),
            us=st.floats(1e-3, 1e12),
        )
        some = data.draw(st.lists(record, max_size=6))
        sides = [data.draw(st.lists(st.sampled_from(some), max_size=6)) if some else [] for _ in range(2)]
        databases = []
        for side, records in enumerate(sides):
            database = TuningDatabase.open("sqlite://")
            for number in range(3):
                name = data.draw(st.sampled_from(["a", "b"]))
                database.record_workload(samples.workload(number, name=name, flops=float(side)))
            database.record_measurements(records)
            databases.append(database)
        archives = [tmp_path / "0", tmp_path / "1"]
        for database, path in zip(databases, archives, strict=True):
            export(database, path)
        for path in archives:
            with TuningDatabase.open("sqlite://") as alone:
                import_archive(alone, path)
                assert content(alone, tmp_path / "again") == path.read_bytes()
        merged = []
        for order in ((0, 1), (1, 0), (0, 1, 0, 1)):
            with TuningDatabase.open("sqlite://") as into:
                for side in order:
                    import_archive(into, archives[side])
                merged.append(content(into, tmp_path / "m"))
                assert {r.key for r in into.list_records()} == {r.key for side in sides for r in side}
        assert merged[0] == merged[1] == merged[2]
        for database in databases:
            database.close()

    def test_archive_reads_back_as_the_entries_written(self, database, samples, tmp_path):
        fill(database, samples)
        count = export(database, tmp_path / "a")
        assert len(list(read_archive(tmp_path / "a"))) == count


class TestPrune:
    @pytest.fixture
    def filled(self, database, samples):
        """Day by day 9, 7, 8, 5, 6 us at one place; two failures; and an old one elsewhere."""
        database.record_workload(samples.workload())
        for day, us in enumerate((9.0, 7.0, 8.0, 5.0, 6.0)):
            database.record_measurement(samples.record(latencies_us=(us,), created_at=START + timedelta(days=day)))
        for day in (0, 4):
            database.record_measurement(samples.failure(created_at=START + timedelta(days=day)))
        other = samples.environment(cores=64)
        database.record_measurement(samples.record(environment=other, latencies_us=(99.0,), created_at=START))
        return database

    def left(self, database):
        return sorted(record.latency_us or 0.0 for record in database.list_records())

    @pytest.mark.parametrize(
        ("rules", "left"),
        [
            (PruneRules(before=START + timedelta(days=2)), [0.0, 5.0, 6.0, 8.0, 99.0]),
            (PruneRules(before=START + timedelta(days=99)), [5.0, 99.0]),
            (PruneRules(keep=2), [0.0, 0.0, 5.0, 6.0, 99.0]),
            (PruneRules(keep=1), [0.0, 5.0, 99.0]),
            (PruneRules(dominated=True), [0.0, 0.0, 5.0, 6.0, 99.0]),
            (PruneRules(dominated=True, keep=1), [0.0, 5.0, 99.0]),
        ],
    )
    def test_rules_forget_what_they_say_and_keep_the_best(self, filled, rules, left):
        before = self.left(filled)
        counted = prune(filled, rules, dry_run=True)
        assert self.left(filled) == before
        assert counted.removed == len(before) - len(left)
        done = prune(filled, rules)
        assert self.left(filled) == left
        assert (done.removed, done.left) == (counted.removed, len(left))
        assert prune(filled, rules).removed == 0

    def test_filter_says_what_may_go(self, filled):
        prune(filled, PruneRules(keep=1), RecordFilter(status=Status.BUILD_ERROR))
        assert self.left(filled) == [0.0, 5.0, 6.0, 7.0, 8.0, 9.0, 99.0]

    def test_best_of_each_route_stays(self, filled, samples):
        filled.record_measurement(samples.record(route=Route.TEMPLATE, latencies_us=(50.0,), created_at=START))
        prune(filled, PruneRules(keep=1))
        assert self.left(filled) == [0.0, 5.0, 50.0, 99.0]

    def test_rules_that_say_nothing_are_refused(self):
        with pytest.raises(InvalidRecordError, match="Nothing says what to prune"):
            PruneRules()
        with pytest.raises(InvalidRecordError, match="keeps at least one"):
            PruneRules(keep=0)
        with pytest.raises(InvalidRecordError, match="no time zone"):
            PruneRules(before=datetime(2026, 1, 1))
