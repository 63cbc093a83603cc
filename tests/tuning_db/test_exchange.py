"""Archives, merging and pruning, over every dialect."""

from __future__ import annotations

import gzip
import json
import math
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relaxtune.tuning_db.artifacts import Artifact, Benchmark, Validation
from relaxtune.tuning_db.errors import ExchangeError, InvalidRecordError
from relaxtune.tuning_db.exchange.archive import export_archive, import_archive, merge, read_archive
from relaxtune.tuning_db.exchange.entries import COVERED_TABLES, DERIVED_TABLES, merge_jobs, merge_workloads
from relaxtune.tuning_db.exchange.pruning import PruneRules, prune
from relaxtune.tuning_db.jobs import Job, JobTask
from relaxtune.tuning_db.records import RecordFilter, Route, Status
from relaxtune.tuning_db.sql.schema import Base
from relaxtune.tuning_db.store import SqlDatabase

START = datetime(2026, 1, 1, tzinfo=UTC)


def fill(database, samples, numbers=range(6)):
    """Record what every table can hold; equal numbers give equal content."""
    target = samples.target()
    for number in numbers:
        workload = samples.workload(number % 3)
        database.record_workload(workload)
        database.record_measurements(
            [
                samples.record(workload, seed=number, created_at=START + timedelta(days=number)),
                samples.failure(
                    workload,
                    seed=number,
                    created_at=START + timedelta(days=number, hours=1),
                    status=Status.RUN_ERROR,
                    latencies_us=(math.nan, math.inf, 1.5),
                ),
            ]
        )
    job = Job(f"job{min(numbers)}", "bert", "0" * 64, target, "{}", START, START + timedelta(hours=1), "done")
    with_job = samples.record(samples.workload(min(numbers) % 3), job_id=job.id, created_at=START, route=Route.TEMPLATE)
    artifact = Artifact("bert", "0" * 64, target, '{"kernels":[1]}', f"out{min(numbers)}", job.id, START)
    database.write(lambda session: put_all(session, job, samples.workload(min(numbers) % 3)))
    database.record_measurement(with_job)
    database.record_artifact(artifact)
    database.record_validation(Validation(artifact.key, samples.environment(), False, 1, math.nan, "{}", START))
    database.record_benchmark(Benchmark(artifact.key, samples.environment(), "ort", (3.0,), "{}", START))


def put_all(session, job, workload):
    from relaxtune.tuning_db.sql.writing import put_job, put_job_tasks

    put_job(session, job)
    session.flush()
    put_job_tasks(session, job.id, [JobTask(workload.workload_hash, workload.tvm_version, 3, ("n",), 1.0)])


def content(database, path):
    export_archive(database, path)
    return path.read_bytes()


def lines_of(path):
    return gzip.decompress(path.read_bytes()).decode().splitlines()


def test_archive_covers_every_table():
    # Batches are what one host did with its plans, tags are one store's: another database can do nothing with them.
    of_one_host = {"batches", "cells", "attempts", "tag_moves"}
    assert set(Base.metadata.tables) == COVERED_TABLES | DERIVED_TABLES | of_one_host
    assert not COVERED_TABLES & DERIVED_TABLES


class TestArchive:
    def test_everything_comes_back_in_another_database(self, database, samples, tmp_path):
        fill(database, samples)
        before = content(database, tmp_path / "one")
        with SqlDatabase.open("sqlite://") as other:
            done = import_archive(other, tmp_path / "one")
            assert (done.workloads, done.jobs, done.records, done.new_records) == (3, 1, 13, 13)
            assert (done.artifacts, done.validations, done.benchmarks) == (1, 1, 1)
            assert content(other, tmp_path / "two") == before
            ours = sorted(other.list_records(), key=lambda r: (r.created_at, r.key))
            theirs = sorted(database.list_records(), key=lambda r: (r.created_at, r.key))
            assert [r.key for r in ours] == [r.key for r in theirs]

    def test_archive_comes_back_into_each_dialect(self, database, samples, tmp_path):
        with SqlDatabase.open("sqlite://") as source:
            fill(source, samples)
            before = content(source, tmp_path / "one")
        import_archive(database, tmp_path / "one")
        assert content(database, tmp_path / "two") == before
        assert import_archive(database, tmp_path / "one").new_records == 0
        assert content(database, tmp_path / "two") == before

    def test_filter_takes_the_records_and_what_they_refer_to(self, database, samples, tmp_path):
        fill(database, samples)
        export_archive(database, tmp_path / "part", RecordFilter(workload_hash="hash1", status=Status.OK))
        with SqlDatabase.open("sqlite://") as other:
            done = import_archive(other, tmp_path / "part")
            assert (done.workloads, done.records, done.artifacts) == (1, 2, 0)
            assert {record.workload_hash for record in other.list_records()} == {"hash1"}

    def test_nothing_is_left_when_the_folder_is_missing(self, database, tmp_path):
        with pytest.raises(ExchangeError, match=r"Cannot write the archive .*folder that exists"):
            export_archive(database, tmp_path / "no" / "a")
        assert list(tmp_path.glob("no*")) == []

    def test_existing_archive_is_kept_when_the_export_fails(self, database, samples, tmp_path, monkeypatch):
        path = tmp_path / "a"
        path.write_bytes(b"earlier")

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("relaxtune.tuning_db.exchange.archive.os.fsync", full)
        with pytest.raises(ExchangeError, match="No space left on device"):
            export_archive(database, path)
        assert path.read_bytes() == b"earlier"
        assert list(tmp_path.glob(".a.*")) == []


@pytest.fixture(scope="module")
def empty():
    with SqlDatabase.open("sqlite://") as database:
        yield database


class TestHostileArchive:
    @pytest.fixture
    def archive(self, samples, tmp_path):
        with SqlDatabase.open("sqlite://") as source:
            fill(source, samples)
            export_archive(source, tmp_path / "a")
        return tmp_path / "a"

    @pytest.fixture(autouse=True)
    def _into_empty(self, empty):
        self.database = empty

    def refused(self, path, match):
        with pytest.raises(ExchangeError, match=match):
            import_archive(self.database, path)
        info = self.database.info()
        assert (info.records, info.workloads, info.signatures, info.targets, info.jobs) == (0, 0, 0, 0, 0)

    def rewrite(self, path, change):
        """Change the lines and make the checksum fit again, as somebody who means harm would."""
        import hashlib

        lines = change(lines_of(path)[:-1])
        body = "".join(line + "\n" for line in lines).encode()
        end = json.dumps({"lines": len(lines), "sha256": hashlib.sha256(body).hexdigest()})
        path.write_bytes(gzip.compress(body + b'["end",' + end.encode() + b"]\n"))

    def test_half_a_surrogate_pair_is_refused(self, archive):
        self.rewrite(archive, lambda lines: [line.replace("matmul1", "\\ud800") for line in lines])
        self.refused(archive, r"line \d+: not JSON .*surrogates not allowed")

    def test_nested_json_is_refused(self, archive):
        self.rewrite(archive, lambda lines: [*lines, '["job",' + '{"a":' * 200_000 + "1" + "}" * 200_001])
        self.refused(archive, r"line \d+: not JSON")

    def test_too_many_places_are_refused(self, archive, monkeypatch):
        monkeypatch.setattr("relaxtune.tuning_db.exchange.archive.MAX_PLACES", 1)
        self.refused(archive, "more than 1 targets and environments")

    def test_flipped_bytes_are_refused_wherever_they_are(self, archive):
        whole = archive.read_bytes()
        # The header of gzip holds bytes without meaning: time, flags, system.
        for place in range(10, len(whole), max(1, len(whole) // 40)):
            archive.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
            self.refused(archive, r"line \d+|ends after line|Cannot read")

    def test_cut_archive_is_refused_wherever_it_ends(self, archive):
        whole = archive.read_bytes()
        for end in range(0, len(whole), max(1, len(whole) // 40)):
            archive.write_bytes(whole[:end])
            self.refused(archive, r"line \d+|ends after line")

    def test_missing_last_line_is_refused(self, archive):
        archive.write_bytes(gzip.compress("\n".join(lines_of(archive)[:-1]).encode() + b"\n"))
        self.refused(archive, "without its last line. It is cut off")

    def test_changed_text_is_refused_by_the_checksum(self, archive):
        text = gzip.decompress(archive.read_bytes()).replace(b"matmul1", b"matmul9")
        archive.write_bytes(gzip.compress(text))
        self.refused(archive, r"line \d+: the checksum does not fit: expected [0-9a-f]{64}, got")

    def test_text_after_the_end_is_refused(self, archive):
        archive.write_bytes(gzip.compress(gzip.decompress(archive.read_bytes()) + b'["signature",{}]\n'))
        self.refused(archive, "there is text after the end")

    def test_newer_version_is_refused_with_the_way_on(self, archive):
        self.rewrite(archive, lambda lines: [lines[0].replace("1", "2"), *lines[1:]])
        self.refused(archive, r"line 1: archive version 2, this relaxtune reads 1\. Run: pip install --upgrade")

    def test_other_files_are_refused(self, archive):
        archive.write_text("hello")
        self.refused(archive, "line 1: not a whole gzip file")
        archive.write_bytes(gzip.compress(b"hello\n"))
        self.refused(archive, "line 1: not JSON")
        archive.write_bytes(gzip.compress(b'{"a":1}\n'))
        self.refused(archive, r"line 1: expected \[kind, fields\]")
        archive.write_bytes(gzip.compress(b'["other",{}]\n'))
        self.refused(archive, "line 1: expected 'relaxtune-archive', got 'other'")
        archive.unlink()
        self.refused(archive, "Cannot read the archive")

    @pytest.mark.parametrize("limit", ["MAX_BYTES", "MAX_LINES"])
    def test_archive_that_unpacks_to_too_much_is_refused_whole(self, archive, monkeypatch, limit):
        monkeypatch.setattr(f"relaxtune.tuning_db.exchange.archive.{limit}", 3)
        with (
            SqlDatabase.open("sqlite://") as database,
            pytest.raises(ExchangeError, match=r"line \d: the archive unpacks to more than"),
        ):
            import_archive(database, archive)

    def test_long_line_is_refused_before_it_fills_the_memory(self, archive, monkeypatch):
        monkeypatch.setattr("relaxtune.tuning_db.exchange.archive.MAX_LINE_BYTES", 1000)
        archive.write_bytes(gzip.compress(b" " * 10_000_000))
        self.refused(archive, "line 1: longer than 1000 bytes")

    @pytest.mark.parametrize(
        ("kind", "change", "match"),
        [
            ("record", {"status": "fast"}, "'fast' is not a valid Status"),
            ("record", {"latencies_us": []}, "status ok and latencies_us"),
            ("record", {"latencies_us": [-1.0]}, "status ok and latencies_us"),
            ("record", {"latencies_us": [[1]]}, "refused as a record"),
            ("record", {"latencies_us": "1"}, "latencies_us must be tuple"),
            ("record", {"target": 99}, "refused as a record"),
            ("record", {"target": -1}, "refers to no TargetKey"),
            ("record", {"environment": 0}, "refers to no Environment"),
            ("record", {"decision": {"__import__": "os"}}, "decision must be str"),
            ("record", {"seed": 2**70}, "does not fit 64 bits"),
            ("record", {"seed": True}, "seed must be int"),
            ("record", {"id": 7}, "it has no field 'id'"),
            ("record", {"__class__": "os.system"}, "it has no field '__class__'"),
            ("record", {"created_at": "2026-01-01T00:00:00"}, "has no time zone"),
            ("record", {"created_at": "yesterday"}, "refused as a record"),
            ("record", {"duration_s": -1}, "at least 0"),
            ("workload", {"signature": "{"}, "is not valid JSON"),
            ("workload", {"flops": "1"}, "flops must be float"),
            ("job", {"options": "{"}, "is not valid JSON"),
            ("task", {"onnx_nodes": [1]}, "onnx_nodes must be texts"),
            ("task", {"job_id": 3}, "job_id must be a text"),
            ("signature", {"family": None}, "family must be str"),
            ("artifact", {"manifest": "["}, "is not valid JSON"),
            ("validation", {"passed": True}, "passed with max_abs"),
            ("benchmark", {"latencies_us": [0]}, "latencies_us"),
        ],
    )
    def test_false_value_is_refused_with_its_line_even_when_the_checksum_fits(self, archive, kind, change, match):
        lines = lines_of(archive)
        number = next(i for i, line in enumerate(lines) if json.loads(line)[0] == kind)

        def falsify(lines):
            fields = json.loads(lines[number])[1]
            return [*lines[:number], json.dumps([kind, {**fields, **change}]), *lines[number + 1 :]]

        self.rewrite(archive, falsify)
        self.refused(
            archive, rf"line {number + 1}: refused as a {kind}: .*{match}" if "refused" not in match else match
        )

    @pytest.mark.parametrize(
        "line", ['["format_disk",{}]', "[1,2]", '["record",{}]', "[" * 100_000, '["record",NaN]', "\u0000", '"x"']
    )
    def test_line_of_no_kind_is_refused(self, archive, line):
        self.rewrite(archive, lambda lines: [*lines[:2], line, *lines[2:]])
        self.refused(archive, r"line 3: ")

    def test_record_without_its_workload_is_refused(self, archive):
        self.rewrite(archive, lambda lines: [line for line in lines if not line.startswith('["workload"')])
        self.refused(archive, r"line \d+ or before: .* is not a workload of the database")


class TestMerge:
    def test_merge_takes_everything_of_the_source(self, database, samples, tmp_path):
        with SqlDatabase.open(tmp_path / "source.db") as source:
            fill(source, samples)
            assert merge(database, source).new_records == 13
            assert content(database, tmp_path / "a") == content(source, tmp_path / "b")
            assert merge(database, source).new_records == 0

    def test_merge_is_commutative_associative_and_idempotent(self, samples, tmp_path):
        parts = [range(4), range(2, 6), range(3, 8)]
        sources = []
        for number, part in enumerate(parts):
            source = SqlDatabase.open("sqlite://")
            fill(source, samples, part)
            # The same workload, told differently by each.
            source.record_workload(samples.workload(2, name=f"name{number}", flops=float(number)))
            sources.append(source)
        results = set()
        for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2, 1, 0)):
            with SqlDatabase.open("sqlite://") as database:
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
            database = SqlDatabase.open("sqlite://")
            for number in range(3):
                name = data.draw(st.sampled_from(["a", "b"]))
                database.record_workload(samples.workload(number, name=name, flops=float(side)))
            database.record_measurements(records)
            databases.append(database)
        archives = [tmp_path / "0", tmp_path / "1"]
        for database, path in zip(databases, archives, strict=True):
            export_archive(database, path)
        for path in archives:
            with SqlDatabase.open("sqlite://") as alone:
                import_archive(alone, path)
                assert content(alone, tmp_path / "again") == path.read_bytes()
        merged = []
        for order in ((0, 1), (1, 0), (0, 1, 0, 1)):
            with SqlDatabase.open("sqlite://") as into:
                for side in order:
                    import_archive(into, archives[side])
                merged.append(content(into, tmp_path / "m"))
                assert {r.key for r in into.list_records()} == {r.key for side in sides for r in side}
        assert merged[0] == merged[1] == merged[2]
        for database in databases:
            database.close()

    def test_archive_reads_back_as_the_entries_written(self, database, samples, tmp_path):
        fill(database, samples)
        count = export_archive(database, tmp_path / "a")
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
