"""Make an artifact again from its manifest and the database alone, and say whether it is the same, bit for bit.

The manifest says how the model was lowered and, for each kernel, the route and the hash of the decision. The database
has the decisions. Nothing is chosen anew: a decision that is not there, or that makes another kernel by now, is named.
Where the device is here, both artifacts run on the same inputs; elsewhere hashes of kernels and weights are compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from relaxtune.models import OnnxModel, load_model
from relaxtune.models.axis_profile import sizes_within
from relaxtune.models.buckets import bucket_shapes
from relaxtune.pipeline.artifact.compile import compile_module, runs_here
from relaxtune.pipeline.artifact.directory import verify_artifact
from relaxtune.pipeline.artifact.entries import KernelEntry
from relaxtune.pipeline.artifact.export import CompiledBucket, write_artifact
from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.artifact.manifest import PARAMS_FILE, Manifest
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.bisect.subject import lowering_options
from relaxtune.pipeline.choose.replay import replay_record
from relaxtune.pipeline.errors import ArtifactError, LoweringError
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from relaxtune.pipeline.passes.module import LoweredModule
from relaxtune.pipeline.tasks.extract import as_workload, extract_tasks
from relaxtune.pipeline.tasks.sizes_of_tables import untuned_function
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.validate.builds import manifest_model
from relaxtune.pipeline.validate.comparison import Difference, OutputDifference, compare_manifests, compare_outputs
from relaxtune.pipeline.validate.validation import sample_inputs
from relaxtune.schedules.marks import as_scheduled
from relaxtune.schedules.registry import apply_decision, list_candidates
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.schedules.templates.base import TemplateError
from relaxtune.tuning_db.layers import open_databases
from relaxtune.tuning_db.records import Mode, RecordFilter, Route, TuningRecord, signature_key
from relaxtune.tuning_db.store import TuningDatabase
from relaxtune.tuning_db.urls import DatabasePlace

_SAMPLES = 2


@dataclass(frozen=True)
class Rebuild:
    """An artifact made again."""

    kernels: int  # How many there are, those of shape buckets included.
    # Differences that shape the code or the results: kernels by their hashes, weights, outputs.
    changed: tuple[Difference, ...]
    noted: tuple[Difference, ...]  # Differences that need not be: versions, notes of passes.
    same_files: Mapping[str, bool]  # File -> whether it has the same bytes.
    outputs: tuple[OutputDifference, ...] | None  # Both on the same inputs; None where the device is not here.

    @property
    def same(self) -> bool:
        """Whether nothing changed that counts."""
        return not self.changed

    def to_json(self) -> dict[str, object]:
        """Return the report as plain JSON data."""
        return {**asdict(self), "same": self.same}

    def raise_if_changed(self) -> None:
        """Raise `ArtifactError` with the changes, if there are any."""
        if self.changed:
            listed = "; ".join(f"{one.subject}: {one.field} {one.a} -> {one.b}" for one in self.changed[:10])
            more = f"; and {len(self.changed) - 10} more" if len(self.changed) > 10 else ""
            versions = "; ".join(f"{one.field} {one.a} -> {one.b}" for one in self.noted if one.subject == "version")
            raise ArtifactError(
                f"made again, the artifact is another: {listed}{more}. Versions that differ: {versions or 'none'}"
            )


def rebuild_artifact(
    directory: Path,
    out: Path,
    *,
    database: DatabasePlace | None = None,
    shared: Sequence[DatabasePlace] = (),
    source: str | Path | None = None,
) -> Rebuild:
    """Make an artifact again in another place, and return what is not the same.

    `database` and `shared` are as of `compile_model`. `source` is the ONNX model, where it is not where the manifest
    says.

    Raises `ArtifactError`: a decision is not in the database, or makes another kernel by now: each kernel is named, and
    nothing is written; `ModelError`, `ScheduleError`, `TuningDatabaseError`, `PipelineError`: the model is another, or
    does not lower or compile.
    """
    manifest = verify_artifact(directory)
    model = manifest_model(manifest, source)
    target = resolve_target(manifest.target.config)
    modules = lower_again(manifest, model, source or manifest.source, target)
    places = [*([database] if database is not None else []), *shared]
    with open_databases(places, mode=Mode.READ_ONLY, create=False) if places else nullcontext() as opened:
        chosen = _stated(modules, target, opened)
    compiled = [
        compile_module(lowered, choices, target, cuda_graph=manifest.target.cuda_graph)
        for (lowered, _), choices in zip(modules, chosen, strict=True)
    ]
    buckets = () if manifest.buckets is None else manifest.buckets.entries
    with_buckets = [CompiledBucket(one.bucket, code) for one, code in zip(buckets, compiled[1:], strict=True)]
    again = write_artifact(compiled[0], out, with_buckets)
    outputs = None
    if runs_here(target):
        first, second = Module.load(directory, verify=False), Module.load(out, verify=False)
        inputs = sample_inputs(model, samples=_SAMPLES, seed=0, dims=sizes_within(model, first.manifest.maxima))
        outputs = compare_outputs([first.run(one) for one in inputs], [second.run(one) for one in inputs], exact=True)
    return _compared(manifest, again, outputs)


def lower_again(
    manifest: Manifest, model: OnnxModel, source: str | Path, target: ResolvedTarget
) -> list[tuple[LoweredModule, tuple[KernelEntry, ...]]]:
    """Return a model lowered as an artifact was, then so for each of its shape buckets, with the artifact's kernels.

    `source` is where the model is, to load it in the buckets' shapes.
    """
    options = lowering_options(manifest)
    modules = [(lower(import_model(model), target.target, options), manifest.kernels)]
    for entry in () if manifest.buckets is None else manifest.buckets.entries:
        pinned = load_model(source, shapes=bucket_shapes(model.inputs, entry.bucket), seed=model.seed or 0)
        named = replace(pinned, name=f"{model.name}[{entry.bucket.name}]")
        modules.append((lower(import_model(named), target.target, options), entry.kernels))
    return modules


def _stated(
    modules: Sequence[tuple[LoweredModule, Sequence[KernelEntry]]],
    target: ResolvedTarget,
    database: TuningDatabase | None,
) -> list[list[KernelChoice]]:
    """Return the choices that manifests state, module by module."""
    missing: list[str] = []
    found: list[list[KernelChoice]] = []
    for lowered, entries in modules:
        tasks = {name: task for task in extract_tasks([lowered]) for name in task.functions[lowered.graph.name]}
        of_module = []
        for entry in entries:
            if entry.function not in lowered.kernels:
                missing.append(f"{entry.function}: the passes make no such kernel by now")
                continue
            try:
                of_module.append(_choice(entry, tasks.get(entry.function), lowered, target, database))
            except LoweringError as e:
                missing.append(f"{entry.function} ({entry.route}): {e}")
        missing += [
            f"{name}: the passes make this kernel by now, and the artifact has none of that name"
            for name in lowered.kernels.keys() - {entry.function for entry in entries}
        ]
        found.append(of_module)
    if missing:
        raise ArtifactError(
            f"the artifact cannot be made again; {len(missing)} kernels: {'; '.join(missing[:10])}"
            + (f"; and {len(missing) - 10} more" if len(missing) > 10 else "")
        )
    return found


def _choice(
    entry: KernelEntry,
    task: TuningTask | None,
    lowered: LoweredModule,
    target: ResolvedTarget,
    database: TuningDatabase | None,
) -> KernelChoice:
    """Return the choice that a manifest states.

    Raises `LoweringError`: its decision is not in the database, or makes another kernel by now.
    """
    choice = KernelChoice(
        function=entry.function,
        task=None if task is None else task.name,
        route=Route(entry.route),
        record_id=entry.record_id,
        latency_us=entry.latency_us,
        note=entry.note,
        database=entry.database,
        measured=entry.measured,
    )
    if entry.decision_sha256 is None or choice.route is Route.FALLBACK:
        # The default schedules are code alone; the hash of the kernel tells whether they are the same.
        return choice
    if entry.table is not None:
        func = as_workload(lowered.mod[entry.function])["main"]
        try:
            scheduled = as_scheduled(apply_decision(func, target, entry.table))
        except TemplateError as e:
            raise LoweringError(f"its table of kernels cannot be made any more: {e}") from e
        return replace(choice, decision=entry.table, of_sizes=True, scheduled=scheduled)
    if entry.record_id is None or task is None:
        func = untuned_function(lowered, entry.function) if task is None else task.mod["main"]
        offered = (one.to_json() for one in list_candidates(func, target)[0])
        decision = next((one for one in offered if _sha256(one) == entry.decision_sha256), None)
        if decision is None:
            raise LoweringError("no template proposes its parameters any more")
        return replace(choice, decision=decision, scheduled=as_scheduled(apply_decision(func, target, decision)))
    record = _record(entry, task, database)
    return replace(choice, decision=record.decision, scheduled=replay_record(task, record, target))


def _record(entry: KernelEntry, task: TuningTask, database: TuningDatabase | None) -> TuningRecord:
    """Return a record with the decision that a manifest names; its number may be another in this database."""
    if database is None:
        raise LoweringError(f"its record {entry.record_id} is in a database; name it with --db")
    for filters in (
        RecordFilter(workload_hash=task.workload_hash, route=Route(entry.route)),
        RecordFilter(signature_key=signature_key(task.signature), route=Route(entry.route)),
    ):
        same = [one for one in database.list_records(filters) if _sha256(one.decision) == entry.decision_sha256]
        if same:
            return next((one for one in same if one.kernel_hash == entry.kernel_hash), same[-1])
    known = (entry.decision_sha256 or "")[:12]
    raise LoweringError(f"{database.url} has no record of decision {known} (it was record {entry.record_id})")


def _compared(before: Manifest, again: Manifest, outputs: tuple[OutputDifference, ...] | None) -> Rebuild:
    changed: list[Difference] = []
    pairs = [(before.kernels, again.kernels)]
    if before.buckets is not None and again.buckets is not None:
        pairs += [(a.kernels, b.kernels) for a, b in zip(before.buckets.entries, again.buckets.entries, strict=True)]
    for old, new in pairs:
        made = {kernel.function: kernel.kernel_hash for kernel in new}
        changed += [
            Difference(kernel.function, "kernel hash", str(kernel.kernel_hash), str(made[kernel.function]))
            for kernel in old
            if kernel.kernel_hash != made[kernel.function]
        ]
    same_files = {name: again.files.get(name) == entry for name, entry in before.files.items()}
    if not same_files.get(PARAMS_FILE, True):
        changed.append(Difference(PARAMS_FILE, "weights", "their bytes", "others"))
    changed += [
        Difference(output.name, "output", "its bits", output.reason) for output in outputs or () if not output.passed
    ]
    _, noted = compare_manifests(before, again)
    return Rebuild(sum(len(old) for old, _ in pairs), tuple(changed), noted, same_files, outputs)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
