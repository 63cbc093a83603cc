"""`Report`: where a model's time goes, kernel by kernel, put together from an artifact or from a tuning database.

An artifact's manifest says which kernels it has, what each does, and what the record behind it says: latency, device,
registers, shared memory and spills. A database checks that these records are there, and has those of artifacts of
earlier versions; a profile takes the times anew on the device that is here.
Nothing is estimated: what was not measured stays empty, and `notes` says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.artifact.entries import KernelEntry, MeasuredEntry
from relaxtune.pipeline.artifact.manifest import Manifest
from relaxtune.pipeline.choose.model_records import ModelDecision, read_decision
from relaxtune.pipeline.job_outcomes import artifact_of, record_of
from relaxtune.pipeline.report.ceilings import Ceilings, known_ceilings
from relaxtune.pipeline.report.kernel import KernelRow, TimeSource, float_dtype, judged
from relaxtune.tuning_db.jobs import Job, JobTask
from relaxtune.tuning_db.lookup import Question, device_of
from relaxtune.tuning_db.questions.artifacts import ArmSummary, artifacts
from relaxtune.tuning_db.questions.progress import job_progress
from relaxtune.tuning_db.questions.queries import TaskBest, query, top
from relaxtune.tuning_db.records import MODEL_FAMILY, RecordFilter, Status, TuningRecord, Workload, signature_key
from relaxtune.tuning_db.store import TuningDatabase
from relaxtune.tuning_db.winner import Choice, impossible_latency, judge, summary, winner

if TYPE_CHECKING:
    from relaxtune.pipeline.report.profile import Profile

_NAMES_LISTED = 4
# Records of a kernel that are looked at, the best first.
_LISTED = 1000
# A kernel above its arithmetic ceiling by more than a measurement can err.
_BEYOND = 1.1
_SHIPS_UNTUNED = (
    "the model ships untuned, since it is not surely faster with tuned kernels. The table lists the kernels that are "
    "the fastest alone; compiling takes untuned kernels"
)


@dataclass(frozen=True)
class Report:
    """Where a model's time goes."""

    #: Its name, and the artifact or job that the report is of.
    model: str
    source: str
    #: Target of the code, and the device of the times; None where no time says.
    target: str
    device: str | None
    kernels: tuple[KernelRow, ...]  #: The slowest first.
    created_at: datetime
    model_us: float | None = None  #: The whole module, measured with the profile.
    #: Device memory by the static plan, and of the weights.
    planned_bytes: int | None = None
    weights_bytes: int | None = None
    observed_bytes: int | None = None  #: Device memory that the module really took, measured with the profile on a GPU.
    validation: Mapping[str, object] | None = None  #: The last validation, from the manifest.
    ceilings: Ceilings | None = None  #: Highest rates of the device.
    versions: Mapping[str, str] | None = None  #: Versions that made the artifact, or the record's TVM.
    #: The shape bucket whose code it is of; and the same of the code of each bucket, of the artifact's own code.
    bucket: str | None = None
    buckets: tuple[Report, ...] = ()
    #: Points of its tuning, as seconds since the job began and microseconds of all calls by the best kernels then.
    curve: tuple[tuple[float, float], ...] = ()
    #: The artifact and the peers that alternated with it, in the last benchmark on each device.
    arms: tuple[ArmSummary, ...] = ()
    #: Missing times, missing ceilings, and records of another database.
    notes: tuple[str, ...] = ()

    @property
    def kernels_us(self) -> float:
        """Time of all calls of all kernels whose time is known."""
        return sum(row.total_us or 0.0 for row in self.kernels)

    @property
    def launches(self) -> int:
        """Kernel calls of one inference."""
        return sum(row.calls for row in self.kernels)

    def to_json(self) -> dict[str, object]:
        """Return plain JSON data."""
        own = {"kernels", "ceilings", "created_at", "curve", "arms", "buckets"}
        plain = {
            **{name: value for name, value in vars(self).items() if name not in own},
            "curve": [list(point) for point in self.curve],
            "arms": [{**vars(arm), "created_at": arm.created_at.isoformat(timespec="seconds")} for arm in self.arms],
            "created_at": self.created_at.isoformat(timespec="seconds"),
            "kernels_us": self.kernels_us,
            "launches": self.launches,
            "ceilings": asdict(self.ceilings) if self.ceilings else None,
            "kernels": [row.to_json() for row in self.kernels],
            "buckets": [one.to_json() for one in self.buckets],
        }
        return {**plain, "notes": list(self.notes)}


def report_artifact(
    directory: Path,
    *,
    database: TuningDatabase | None = None,
    profile: Profile | None = None,
    ceilings: Ceilings | None = None,
) -> Report:
    """Return the report of an artifact.

    `directory`: the artifact; only its manifest is read. `database`: the one it was compiled from: its records are
    looked up and checked against the manifest, and it has the course of the tuning and the benchmarks. `profile`: times
    that replace those of the records. `ceilings`: by default those known of the device, if any.
    Raises `ArtifactError`: there is no artifact, or its manifest is damaged.
    """
    manifest = load_manifest(directory)
    found = _report_of_code(manifest, str(directory), database, profile, ceilings)
    if database is not None and (noted := artifacts(database, key=artifact_of(manifest, directory).key)):
        curve = () if noted[0].job_id is None else job_progress(database, noted[0].job_id).curve
        found = replace(found, curve=curve, arms=noted[0].benchmarks)
    if manifest.buckets is None:
        return found
    buckets = []
    for entry in manifest.buckets.entries:
        named = replace(manifest.of_bucket(entry), model=f"{manifest.model} [{entry.bucket.name}]", validation=None)
        of_bucket = _report_of_code(named, f"{directory}, {entry.file}", database, None, ceilings)
        buckets.append(replace(of_bucket, bucket=entry.bucket.name))
    names = _listed([entry.bucket.name for entry in manifest.buckets.entries])
    note = f"the table lists the kernels of symbolic sizes; the kernels of {names} follow below"
    if profile is not None:
        note += ", with times from records: --profile times only kernels of symbolic sizes"
    return replace(found, buckets=tuple(buckets), notes=(note, *found.notes))


def _report_of_code(
    manifest: Manifest, source: str, database: TuningDatabase | None, profile: Profile | None, ceilings: Ceilings | None
) -> Report:
    """Return the report of an artifact's own code, or of a bucket's."""
    notes: list[str] = []
    records = _records_of(manifest, database, notes)
    rows = [_row_of_kernel(kernel, records.get(kernel.function), profile) for kernel in manifest.kernels]
    devices = sorted({kernel.measured.device for kernel in manifest.kernels if kernel.measured is not None})
    device = profile.device if profile else ", ".join(devices) or None
    found = ceilings or known_ceilings(device)
    kernels = judged(rows, found)
    return Report(
        model=manifest.model,
        source=source,
        target=manifest.target.text,
        device=device,
        kernels=kernels,
        created_at=datetime.now(UTC),
        model_us=profile.model_us if profile else None,
        planned_bytes=manifest.memory.planned_bytes if manifest.memory else None,
        weights_bytes=manifest.memory.weights_bytes if manifest.memory else None,
        observed_bytes=profile.observed_bytes if profile else None,
        validation=_validation(manifest),
        ceilings=found,
        versions=manifest.versions,
        notes=(*notes, *_notes(kernels, found, device)),
    )


def report_database(database: TuningDatabase, *, ceilings: Ceilings | None = None) -> tuple[Report, ...]:
    """Return a report of each model and device that a database has records of: the kernels that compiling takes.

    The tasks and how often each runs are those of the newest job of the model for that target.
    """
    newest: dict[tuple[str, str, str], Job] = {}
    for job in database.list_jobs():
        newest.setdefault((job.model, job.target.kind, job.target.arch), job)
    reports = []
    for (model, kind, arch), job in sorted(newest.items()):
        tasks = {task.workload_hash: task for task in database.list_job_tasks(job.id)}
        best = top(database, RecordFilter(model=model, target_kind=kind, arch=arch), limit=None)
        for device in sorted({one.best.environment.device_name for one in best}):
            mine = {
                one.best.workload_hash: one
                for one in best
                if one.best.environment.device_name == device and one.best.workload_hash in tasks
            }
            if mine:
                reports.append(_report_of_job(database, job, tasks, mine, device, ceilings))
    return tuple(reports)


def _report_of_job(
    database: TuningDatabase,
    job: Job,
    tasks: Mapping[str, JobTask],
    best: Mapping[str, TaskBest],
    device: str,
    ceilings: Ceilings | None,
) -> Report:
    rows = []
    shipped = _model_record(database, job, tasks, device)
    decision = None if shipped is None else read_decision(shipped)
    for workload_hash, task in tasks.items():
        workload = database.get_workload(workload_hash, task.tvm_version)
        found = best.get(workload_hash)
        chosen = _that_ships(database, workload, found.best, decision) if found else None
        rows.append(_row_of_task(task, workload, chosen))
    known = ceilings or known_ceilings(device)
    kernels = judged(rows, known)
    tvm_versions = sorted({one.best.environment.tvm_version for one in best.values()})
    untuned = () if decision is None or not decision.untuned else (_SHIPS_UNTUNED,)
    return Report(
        model=job.model,
        source=f"job {job.id} of {job.started_at:%Y-%m-%d %H:%M} UTC",
        target=f"{job.target.kind} {job.target.arch}",
        device=device,
        kernels=kernels,
        created_at=datetime.now(UTC),
        ceilings=known,
        versions={"tvm": ", ".join(tvm_versions)},
        curve=job_progress(database, job.id).curve,
        arms=made[0].benchmarks if (made := artifacts(database, job_id=job.id, limit=1)) else (),
        notes=(*untuned, *_notes(kernels, known, device)),
    )


def _model_record(database: TuningDatabase, job: Job, tasks: Mapping[str, JobTask], device: str) -> TuningRecord | None:
    """Return the newest record of a whole model on a device, as a job of the same tasks made it."""
    wanted = {workload_hash: task.weight for workload_hash, task in tasks.items()}
    kind, arch = job.target.kind, job.target.arch
    filters = RecordFilter(family=MODEL_FAMILY, target_kind=kind, arch=arch, device_name=device, status=Status.OK)
    for line in query(database, filters, limit=None):
        made_by = line.record.job_id
        if line.name == job.model and made_by is not None:
            made_of = {task.workload_hash: task.weight for task in database.list_job_tasks(made_by)}
            if made_of == wanted:
                return line.record
    return None


def _that_ships(
    database: TuningDatabase, workload: Workload, best: TuningRecord, decision: ModelDecision | None
) -> Choice:
    """Return which record compiling takes where `best` was measured; without a look at the code that makes kernels."""
    question = Question(workload.workload_hash, signature_key(workload.signature), best.target, best.environment, None)
    here = device_of(best.environment)
    listed = [one for one in database.list_top(question, k=_LISTED) if device_of(one.environment) == here]
    judged = judge(
        listed,
        best.environment,
        lambda: database.list_failed(question, status=Status.WRONG_RESULT),
        lambda record: impossible_latency(record, workload.flops, workload.bytes),
    )
    return winner(judged, preferred=None if decision is None else decision.preferred(workload.workload_hash))


def _records_of(manifest: Manifest, database: TuningDatabase | None, notes: list[str]) -> dict[str, TuningRecord]:
    """Return the record behind each kernel; one whose decision is not the manifest's is left out, with a note."""
    if database is None:
        return {}
    named = [kernel for kernel in manifest.kernels if kernel.record_id is not None]
    found = {kernel.function: record_of(database, kernel) for kernel in named}
    strangers = [name for name, record in found.items() if record is None]
    if strangers:
        notes.append(
            f"the database lacks the records of {len(strangers)} kernels: {_listed(strangers)}; was the artifact "
            "compiled from another database?"
        )
    return {name: record for name, record in found.items() if record is not None}


def _row_of_kernel(kernel: KernelEntry, record: TuningRecord | None, profile: Profile | None) -> KernelRow:
    row = KernelRow(
        name=kernel.function,
        family=kernel.work.family if kernel.work else None,
        onnx_nodes=kernel.onnx_nodes,
        calls=kernel.calls,
        route=kernel.route,
        record_id=kernel.record_id,
        note=kernel.note,
        flops=kernel.work.flops if kernel.work else None,
        bytes=kernel.work.bytes if kernel.work else None,
        dtype=float_dtype([one.dtype for one in kernel.work.arguments]) if kernel.work else None,
        kernel_hash=kernel.kernel_hash,
    )
    if profile is not None and kernel.function in profile.kernels_us:
        row = replace(row, time_us=profile.kernels_us[kernel.function], time_source=TimeSource.PROFILE)
    elif profile is None and kernel.latency_us is not None:
        row = replace(row, time_us=kernel.latency_us, time_source=TimeSource.RECORD)
    known = record or kernel.measured
    return row if known is None else _with_resources(row, known)


def _row_of_task(task: JobTask, workload: Workload, chosen: Choice | None) -> KernelRow:
    record = None if chosen is None else chosen.record
    parameters = json.loads(workload.signature).get("inputs", [])
    row = KernelRow(
        name=workload.name,
        family=workload.family,
        onnx_nodes=task.onnx_nodes,
        calls=task.weight,
        route=record.route.value if record else "",
        record_id=record.id if record else None,
        note="" if chosen is None else summary(chosen.trace),
        flops=workload.flops,
        bytes=workload.bytes,
        dtype=float_dtype([str(dtype) for _, dtype in parameters]),
        kernel_hash=record.kernel_hash if record else None,
    )
    if record is None:
        return row
    return _with_resources(replace(row, time_us=record.latency_us, time_source=TimeSource.RECORD), record)


def _with_resources(row: KernelRow, known: TuningRecord | MeasuredEntry) -> KernelRow:
    return replace(row, registers=known.registers, smem_bytes=known.smem_bytes, spill_bytes=known.spill_bytes)


def _validation(manifest: Manifest) -> dict[str, object] | None:
    if manifest.validation is None:
        return None
    names = ("passed", "samples", "tolerance", "reference", "repeats")
    found = {name: manifest.validation[name] for name in names if name in manifest.validation}
    kept = ("name", "dtype", "worst", "histogram")
    outputs = manifest.validation.get("outputs")
    if isinstance(outputs, list):
        found["outputs"] = [{name: output[name] for name in kept if name in output} for output in outputs]
    return found


def _notes(rows: Sequence[KernelRow], ceilings: Ceilings | None, device: str | None) -> list[str]:
    notes = []
    untimed = [row.name for row in rows if row.time_us is None]
    if untimed:
        notes.append(
            f"{len(untimed)} of {len(rows)} kernels have no time and no share: {_listed(untimed)}. "
            "`relaxtune report DIR --profile` times every kernel on this machine's device"
        )
    if ceilings is None:
        notes.append(
            f"no bottlenecks: the ceilings of {device or 'the device'} are unknown; give them with --ceilings FILE, or "
            "use --profile on the artifact's CPU"
        )
    beyond = [row.name for row in rows if (row.compute_use or 0.0) > _BEYOND]
    if beyond:
        notes.append(
            f"{_listed(beyond)}: faster than the measured ceiling, which is too low; was the machine busy with other "
            "work?"
        )
    return notes


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_LISTED])
    return shown if len(names) <= _NAMES_LISTED else f"{shown} and {len(names) - _NAMES_LISTED} more"
