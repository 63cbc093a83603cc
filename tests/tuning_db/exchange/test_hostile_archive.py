"""Archives that are damaged, or written to do harm."""

from __future__ import annotations

import gzip
import json

import pytest

from relaxtune.tuning_db.errors import ExchangeError
from relaxtune.tuning_db.exchange.archive import import_archive
from relaxtune.tuning_db.store import TuningDatabase
from tests.tuning_db.exchange.filled import export, fill, lines_of


@pytest.fixture(scope="module")
def empty():
    with TuningDatabase.open("sqlite://") as database:
        yield database


class TestHostileArchive:
    @pytest.fixture
    def archive(self, samples, tmp_path):
        with TuningDatabase.open("sqlite://") as source:
            fill(source, samples)
            export(source, tmp_path / "a")
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
        """Change the lines and make the checksum fit again, as an attacker would."""
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
            TuningDatabase.open("sqlite://") as database,
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
            ("record", {"status": "fast"}, "status: expected one of ok, .*, got a text"),
            ("record", {"latencies_us": []}, "status ok and latencies_us"),
            ("record", {"latencies_us": [-1.0]}, "status ok and latencies_us"),
            ("record", {"latencies_us": [[1]]}, "refused as a record"),
            ("record", {"latencies_us": "1"}, "latencies_us: expected a list, got a text"),
            ("record", {"target": 99}, "refused as a record"),
            ("record", {"target": -1}, "refers to no TargetKey"),
            ("record", {"environment": 0}, "refers to no Environment"),
            ("record", {"decision": {"__import__": "os"}}, "decision: expected a text, got an object"),
            ("record", {"seed": 2**70}, "does not fit 64 bits"),
            ("record", {"seed": True}, "seed: expected a whole number, got true or false"),
            ("record", {"id": 7}, "it has no field 'id'"),
            ("record", {"__class__": "os.system"}, "it has no field '__class__'"),
            ("record", {"created_at": "2026-01-01T00:00:00"}, "has no time zone"),
            ("record", {"created_at": "yesterday"}, "refused as a record"),
            ("record", {"duration_s": -1}, "at least 0"),
            ("workload", {"signature": "{"}, "is not valid JSON"),
            ("workload", {"flops": "1"}, "flops: expected a number, got a text"),
            ("job", {"options": "{"}, "is not valid JSON"),
            ("task", {"onnx_nodes": [1]}, "onnx_nodes.0: expected a text, got a whole number"),
            ("task", {"job_id": 3}, "expected a text, got a whole number"),
            ("signature", {"family": None}, "family: expected a text, got null"),
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
