"""MetaSchedule's own JSON pair: `database_workload.json` and `database_tuning_record.json`, both ways.

The files say neither when nor where they were measured. The importer gets the environment, and takes the time of
the file's last change; a record that is there already (same workload, decision, latencies, target and environment) is
left as it is, so a file may be imported again after stock MetaSchedule added to it.

Nothing in a file is run: a workload becomes an IRModule whose structural hash must be the one in the same line, a
trace must be of instructions that this TVM knows, and is replayed only when a kernel is compiled from it. Anything
else is refused with its line, and nothing is kept.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from relaxtune.tuning_db.errors import ExchangeError, TuningDatabaseError
from relaxtune.tuning_db.metaschedule import (
    REPLAY_ERRORS,
    US_PER_S,
    args_info_json,
    check_trace,
    describe_unknown,
    ir_from_json,
    is_failure,
    stock_workload,
    target_to_json,
    tvm_version,
    workload_hash,
)
from relaxtune.tuning_db.records import (
    Environment,
    RecordFilter,
    Route,
    Status,
    TargetKey,
    TuningRecord,
    Workload,
    canonical_json,
)
from relaxtune.tuning_db.store import NO_FILTER, TuningDatabase

WORKLOAD_FILE = "database_workload.json"
RECORD_FILE = "database_tuning_record.json"
#: Latency of a failed candidate in stock MetaSchedule.
STOCK_FAILURE_S = 1e10
UNKNOWN_REASON = "MetaSchedule's file says that it failed, and no reason"
MAX_LINE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class StockImport:
    """The result of an import; `records` counts the lines, `new_records` those that were not there."""

    workloads: int
    records: int
    new_records: int
    failed: int


def import_stock(
    database: TuningDatabase, folder: Path, *, environment: Environment, target: TargetKey | None = None
) -> StockImport:
    """Keep what stock MetaSchedule wrote into `folder`, all or nothing.

    The records were measured in `environment`, whose TVM version must be the running one, since hashes are checked.
    Their target is `target`, or the one that each record names, which needs an `mcpu` or `arch` there.
    Raises `ExchangeError`: a file is missing, damaged, of another TVM version, or holds what must not be stored; with
    its line.
    """
    if environment.tvm_version != tvm_version():
        raise ExchangeError(
            f"{folder}: the environment says TVM {environment.tvm_version}, running is {tvm_version()}; hashes and "
            "traces belong to one version. Import with the TVM that wrote the files."
        )
    # Workloads of the family `unknown`; known ones stay as they are.
    workloads = [_read_workload(value, where) for value, where in _read_lines(folder / WORKLOAD_FILE)]
    known = [database.find_workload(one.workload_hash, one.tvm_version) or one for one in workloads]
    lines = _read_lines(folder / RECORD_FILE)
    moment = datetime.fromtimestamp((folder / RECORD_FILE).stat().st_mtime, UTC)
    records = [_read_record(value, where, known, environment, target, moment) for value, where in lines]
    there = {
        _sameness(record)
        for workload in known
        for record in database.list_records(
            RecordFilter(workload_hash=workload.workload_hash, route=Route.METASCHEDULE)
        )
    }
    new: dict[tuple[object, ...], TuningRecord] = {}
    for record in records:
        if _sameness(record) not in there:
            new.setdefault(_sameness(record), record)
    database.record_all(workloads=known, records=list(new.values()))
    failed = sum(record.status is not Status.OK for record in records)
    return StockImport(len(workloads), len(records), len(new), failed)


def export_stock(database: TuningDatabase, folder: Path, filters: RecordFilter = NO_FILTER) -> tuple[int, int]:
    """Write the traces of this TVM version as stock MetaSchedule does; return the numbers of workloads and records.

    Records of other routes are left out, as stock MetaSchedule has no form for them. The folder appears whole or not
    at all.

    Raises `ExchangeError`: the folder exists, or cannot be written; or a workload has no IR.
    """
    if folder.exists():
        raise ExchangeError(f"{folder} exists. Name a folder that does not, so that nothing is overwritten.")
    chosen = [
        record
        for record in database.list_records(filters)
        if record.route is Route.METASCHEDULE and record.environment.tvm_version == tvm_version()
    ]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(record.workload_hash for record in chosen))}
    modules = {}
    for key in numbers:
        text = database.get_workload(key, tvm_version()).ir_json
        if text is None:
            raise ExchangeError(
                f"Workload {key} has no IR, which MetaSchedule's file needs. Leave it out with a filter."
            )
        modules[key] = ir_from_json(text)
    try:
        staged = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    except OSError as e:
        raise ExchangeError(f"Cannot write {folder} ({e}). Name a folder whose parent exists.") from e
    try:
        with (staged / WORKLOAD_FILE).open("w") as stream:
            for key in numbers:
                stream.write(json.dumps(stock_workload(modules[key])) + "\n")
        with (staged / RECORD_FILE).open("w") as stream:
            for record in chosen:
                ok = record.status is Status.OK
                seconds = [us / US_PER_S for us in record.latencies_us] if ok else [STOCK_FAILURE_S]
                arguments = args_info_json(modules[record.workload_hash])
                written = [json.loads(record.decision), seconds, target_to_json(record.target), arguments]
                stream.write(json.dumps([numbers[record.workload_hash], written]) + "\n")
        staged.chmod(0o755)
        os.rename(staged, folder)
    except OSError as e:
        raise ExchangeError(f"Cannot write {folder} ({e}). Nothing was left there.") from e
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return len(numbers), len(chosen)


def _read_lines(path: Path) -> list[tuple[Any, str]]:
    found = []
    try:
        with path.open("rb") as stream:
            number = 0
            while line := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                where = f"{path}, line {number}"
                if len(line) > MAX_LINE_BYTES:
                    raise ExchangeError(f"{where}: longer than {MAX_LINE_BYTES} bytes; refused.")
                if line.strip():
                    try:
                        found.append((json.loads(line), where))
                    except (ValueError, RecursionError) as e:
                        raise ExchangeError(f"{where}: not JSON ({e}). The file is damaged.") from e
    except OSError as e:
        raise ExchangeError(
            f"Cannot read {path} ({e}). Expected the folder of MetaSchedule's {WORKLOAD_FILE} and {RECORD_FILE}."
        ) from e
    return found


def _read_workload(value: Any, where: str) -> Workload:
    match value:
        case [str() as expected, str() as encoded]:
            pass
        case _:
            raise ExchangeError(f"{where}: expected [hash, module], got {str(value)[:60]!r}.")
    try:
        # Eight bytes of length, then the text.
        raw = base64.b64decode(encoded, validate=True)
        length = int.from_bytes(raw[:8], "little")
        if len(raw) != 8 + length:
            raise ExchangeError(f"{where}: the module has {len(raw) - 8} bytes, expected {length}. It is damaged.")
        module = ir_from_json(raw[8:].decode())
    except (binascii.Error, UnicodeDecodeError, TuningDatabaseError) as e:
        raise ExchangeError(f"{where}: not a module of TVM {tvm_version()}: {e}") from e
    found = workload_hash(module)
    if found != expected:
        raise ExchangeError(
            f"{where}: the module has the structural hash {found}, expected {expected}. It was changed, or written by "
            f"another TVM than {tvm_version()}."
        )
    return describe_unknown(module)


def _sameness(record: TuningRecord) -> tuple[object, ...]:
    # Seconds to microseconds and back may change the last bit.
    measured = (record.decision, record.status, tuple(f"{us:.12g}" for us in record.latencies_us))
    return record.workload_hash, *measured, record.target, record.environment


def _read_record(
    value: Any,
    where: str,
    workloads: Sequence[Workload],
    environment: Environment,
    target: TargetKey | None,
    moment: datetime,
) -> TuningRecord:
    match value:
        case [int() as number, [trace, list() | None as run_secs, dict() | str() | None as written, _]]:
            pass
        case _:
            raise ExchangeError(
                f"{where}: expected [workload, [trace, seconds, target, arguments]], got {str(value)[:60]!r}."
            )
    if isinstance(number, bool) or not 0 <= number < len(workloads):
        raise ExchangeError(f"{where}: workload number {number}, but the workload file has {len(workloads)} lines.")
    seconds = run_secs or []
    if not all(isinstance(second, int | float) and not isinstance(second, bool) for second in seconds):
        raise ExchangeError(f"{where}: seconds must be numbers, got {str(seconds)[:60]!r}.")
    try:
        check_trace(trace)
        failed = is_failure(seconds)
        return TuningRecord(
            workload_hash=workloads[number].workload_hash,
            signature_key=workloads[number].signature_key,
            target=target or _target_of(written, where),
            environment=environment,
            route=Route.METASCHEDULE,
            decision=canonical_json(trace),
            status=Status.RUN_ERROR if failed else Status.OK,
            latencies_us=() if failed else tuple(float(second) * US_PER_S for second in seconds),
            error=UNKNOWN_REASON if failed else None,
            created_at=moment,
        )
    except ExchangeError:
        raise
    except (TuningDatabaseError, OverflowError, *REPLAY_ERRORS) as e:
        raise ExchangeError(f"{where}: refused as a record: {str(e).splitlines()[0] if str(e) else type(e)}") from e


def _target_of(written: Any, where: str) -> TargetKey:
    if isinstance(written, dict):
        kind, arch = written.get("kind"), written.get("mcpu") or written.get("arch")
        if isinstance(kind, str) and isinstance(arch, str):
            names = sorted(set(written) - {"kind", "keys", "tag", "host"})
            return TargetKey(kind, arch, canonical_json({name: written[name] for name in names}))
    raise ExchangeError(
        f"{where}: the target {str(written)[:80]!r} has no mcpu or arch, so it is not known where the record is "
        "true. Name the target it was measured for."
    )
