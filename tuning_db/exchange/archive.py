"""An archive: one file that holds a database, or a part of it, to be kept or sent.

gzip over lines of JSON, each `[kind, fields]`. The first is `["relaxtune-archive", {"version": 1}]`; the last is
`["end", {"lines": n, "sha256": ...}]`, the hash of all bytes before it. Targets and environments are written once and
referred to by their number. The content decides every byte, so two databases that hold the same give the same file.

Reading trusts nothing: first the hash at the end has to fit, then every line is checked as the value it claims to be,
and the whole is committed or nothing. Texts are stored, never run.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, cast

from sqlalchemy.orm import Session

from relaxtune.tuning_db.artifacts import Artifact, Benchmark, Validation
from relaxtune.tuning_db.errors import ExchangeError, NotFoundError, TuningDatabaseError
from relaxtune.tuning_db.exchange.entries import Entry, Signature, TaskOfJob, Transfer, list_entries, merge_entries
from relaxtune.tuning_db.jobs import Job, JobTask
from relaxtune.tuning_db.json_values import read_value
from relaxtune.tuning_db.records import Environment, RecordFilter, TargetKey, TuningRecord, Workload, canonical_json
from relaxtune.tuning_db.sql.rows import latencies_from_text, latencies_to_text
from relaxtune.tuning_db.store import NO_FILTER, TuningDatabase

FORMAT = "relaxtune-archive"
VERSION = 1
#: No true line is longer; a hostile one would otherwise fill the memory.
MAX_LINE_BYTES = 64 * 2**20
#: All lines together, unpacked, and their number: what ten million records take. 8 MB may unpack to 8 GB.
MAX_BYTES = 32 * 2**30
MAX_LINES = 10_000_000
#: Targets and environments, which are held in memory while the rest is read.
MAX_PLACES = 100_000

_END = b'["end",'

Fields = dict[str, Any]


def export_archive(database: TuningDatabase, file: BinaryIO, filters: RecordFilter = NO_FILTER) -> int:
    """Write an archive of one moment of a database to an empty file that can seek; return the number of entries."""
    return database.read(lambda session: _write(file, list_entries(session, filters)))


def import_archive(database: TuningDatabase, path: Path) -> Transfer:
    """Merge an archive into a database, all or nothing.

    Raises `ExchangeError`: the file is no archive, of a newer version, damaged, or holds what must not be stored; the
    message has the line.
    """
    check_archive(path)
    position = _Position()

    def work(session: Session) -> Transfer:
        try:
            return merge_entries(session, read_archive(path, position))
        except NotFoundError as e:
            # Records are written in batches: the record may be on an earlier line.
            raise ExchangeError(
                f"{path}, line {position.line} or before: {e} The archive was not made by relaxtune."
            ) from e

    return database.write(work)


def merge(database: TuningDatabase, source: TuningDatabase, filters: RecordFilter = NO_FILTER) -> Transfer:
    """Merge what `source` holds into `database`, all or nothing, by the rules of `exchange.entries`."""
    return source.read(
        lambda reading: database.write(lambda writing: merge_entries(writing, list_entries(reading, filters)))
    )


def _write(raw: BinaryIO, entries: Iterable[Entry]) -> int:
    # No name and no time in the header: equal contents are equal bytes. A retried read begins again.
    raw.seek(0)
    raw.truncate()
    digest = hashlib.sha256()
    count = 0
    numbers: dict[TargetKey | Environment, int] = {}
    with gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0, compresslevel=6) as stream:

        def put(kind: str, fields: Fields) -> None:
            nonlocal count
            line = canonical_json([kind, fields]).encode() + b"\n"
            digest.update(line)
            stream.write(line)
            count += 1

        def number(value: TargetKey | Environment) -> int:
            if value not in numbers:
                put("target" if isinstance(value, TargetKey) else "environment", asdict(value))
                numbers[value] = len(numbers)
            return numbers[value]

        put(FORMAT, {"version": VERSION})
        entries_written = 0
        for entry in entries:
            put(*_encode(entry, number))
            entries_written += 1
        stream.write(_END + canonical_json({"lines": count, "sha256": digest.hexdigest()}).encode() + b"]\n")
    return entries_written


def _encode(entry: Entry, number: Callable[[TargetKey | Environment], int]) -> tuple[str, Fields]:
    if isinstance(entry, TaskOfJob):
        return "task", {"job_id": entry.job_id, **asdict(entry.task)}
    fields = {one.name: getattr(entry, one.name) for one in dataclasses.fields(entry)}
    fields = {name: value for name, value in fields.items() if name not in _not_kept(type(entry))}
    for name, value in fields.items():
        if isinstance(value, TargetKey | Environment):
            fields[name] = number(value)
        elif isinstance(value, datetime):
            fields[name] = value.isoformat()
    if isinstance(entry, TuningRecord):
        fields["latencies_us"] = json.loads(latencies_to_text(entry.latencies_us))
    if isinstance(entry, Validation):
        fields["max_abs"] = entry.max_abs if math.isfinite(entry.max_abs) else repr(entry.max_abs)
    return next(kind for kind, cls in _CLASSES.items() if cls is type(entry)), fields


_CLASSES: dict[str, type] = {
    "target": TargetKey,
    "environment": Environment,
    "signature": Signature,
    "workload": Workload,
    "job": Job,
    "task": JobTask,
    "record": TuningRecord,
    "artifact": Artifact,
    "validation": Validation,
    "benchmark": Benchmark,
}


@dataclass
class _Position:
    """The line that is being read."""

    line: int = 0


def check_archive(path: Path) -> None:
    """Read an archive through, and accept it when nothing was changed since it was written.

    Raises `ExchangeError`: it is no archive, of another version, damaged or cut off.
    """
    digest = hashlib.sha256()
    end: tuple[int, Fields] | None = None
    number = 0
    for number, line in _lines(path):
        if end is not None:
            raise ExchangeError(
                f"{path}, line {number}: there is text after the end of the archive. It was changed; get it again."
            )
        if number == 1:
            kind, fields = _parse(line, f"{path}, line 1")
            if kind != FORMAT:
                raise ExchangeError(f"{path}, line 1: expected {FORMAT!r}, got {kind[:40]!r}. This is no archive.")
            if fields != {"version": VERSION}:
                raise ExchangeError(
                    f"{path}, line 1: archive version {fields.get('version')!r}, this relaxtune reads {VERSION}. "
                    "Run: pip install --upgrade relaxtune"
                )
        if line.startswith(_END):
            end = number, _parse(line, f"{path}, line {number}")[1]
        else:
            digest.update(line)
    if end is None:
        raise ExchangeError(f"{path} ends after line {number} without its last line. It is cut off; get it again.")
    if end[1] != {"lines": end[0] - 1, "sha256": digest.hexdigest()}:
        raise ExchangeError(
            f"{path}, line {end[0]}: the checksum does not fit: expected {end[1].get('sha256')}, got "
            f"{digest.hexdigest()}. The archive is damaged; get it again."
        )


def read_archive(path: Path, position: _Position | None = None) -> Iterator[Entry]:
    """Yield the entries of an archive that `check_archive` accepted, each checked as what it claims to be.

    Raises `ExchangeError`: a line holds what must not be stored.
    """
    position = position or _Position()
    places: list[TargetKey | Environment] = []
    for number, line in _lines(path):
        position.line = number
        if number == 1 or line.startswith(_END):
            continue
        where = f"{path}, line {number}"
        kind, fields = _parse(line, where)
        try:
            entry = _make(kind, dict(fields), places)
        except (TuningDatabaseError, TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as e:
            raise ExchangeError(f"{where}: refused as a {kind[:40]}: {e}") from e
        if isinstance(entry, TargetKey | Environment):
            places.append(entry)
            if len(places) > MAX_PLACES:
                raise ExchangeError(f"{where}: more than {MAX_PLACES} targets and environments; refused.")
        else:
            yield entry


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = size = 0
    try:
        with gzip.open(path, "rb") as stream:
            while line := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                size += len(line)
                if len(line) > MAX_LINE_BYTES:
                    raise ExchangeError(f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes; refused.")
                if size > MAX_BYTES or number > MAX_LINES:
                    raise ExchangeError(
                        f"{path}, line {number}: the archive unpacks to more than {MAX_BYTES} bytes or {MAX_LINES} "
                        "lines; refused. Export it in parts, for instance with --since and --until."
                    )
                yield number, line
    except (gzip.BadGzipFile, EOFError, zlib.error) as e:
        raise ExchangeError(
            f"{path}, line {number + 1}: not a whole gzip file ({e}). It is no archive of `relaxtune db export`, or is "
            "damaged."
        ) from e
    except OSError as e:
        raise ExchangeError(f"Cannot read the archive {path} ({e}).") from e


def _parse(line: bytes, where: str) -> tuple[str, Fields]:
    try:
        value = json.loads(line, parse_constant=_refuse_constant)
        if b"\\u" in line:
            # JSON can name half of a surrogate pair, which is no text and which no database stores.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as e:
        raise ExchangeError(f"{where}: not JSON ({e}). The archive is damaged.") from e
    match value:
        case [str() as kind, dict() as fields]:
            return kind, fields
    raise ExchangeError(f"{where}: expected [kind, fields], got {line[:80]!r}. This is no archive.")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _make(kind: str, fields: Fields, places: list[TargetKey | Environment]) -> Entry | TargetKey | Environment:
    cls = _CLASSES[kind]
    job_id = fields.pop("job_id") if cls is JobTask else None
    unknown = fields.keys() - {field.name for field in dataclasses.fields(cls)} | fields.keys() & _not_kept(cls)
    if unknown:
        raise TypeError(f"it has no field {min(unknown)[:40]!r}")
    for name, of in (("target", TargetKey), ("environment", Environment)):
        if name in fields:
            number = fields[name]
            fields[name] = places[number] if type(number) is int and number >= 0 else None
            if not isinstance(fields[name], of):
                raise TypeError(f"{name} refers to no {of.__name__}")
    if isinstance(fields.get("latencies_us"), list):
        fields["latencies_us"] = [*latencies_from_text(canonical_json(fields["latencies_us"]))]
    if cls is Validation and fields.get("max_abs") in ("nan", "inf", "-inf"):
        fields["max_abs"] = float(fields["max_abs"])
    value: object = read_value(cls, fields)
    return TaskOfJob(read_value(str, job_id), value) if isinstance(value, JobTask) else cast(Entry, value)


def _not_kept(cls: type) -> frozenset[str]:
    """Return the fields that a value gets where it is read."""
    return frozenset({"layer", "id"} if cls is TuningRecord else ())
