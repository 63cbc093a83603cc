"""The jobs people run, from request to result: `compile_model` from records alone, `tune_model` with measuring.

Both end with an artifact that was compared with ONNX Runtime where the target can run here. The result of a job has all
its findings, a failed validation too (`raise_if_failed`).
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from relaxtune.models.axis_profile import sizes_within
from relaxtune.pipeline.artifact.compile import CompiledModule, compile_module, runs_here
from relaxtune.pipeline.artifact.directory import check_destination, record_validation, stage_beside
from relaxtune.pipeline.artifact.export import CompiledBucket, write_artifact
from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.bench.measure import OWN_ARM, Peers
from relaxtune.pipeline.choose.meanwhile import Meanwhile, make_reference, meanwhile
from relaxtune.pipeline.choose.model_arm import LoadedArm, timed_calls
from relaxtune.pipeline.choose.selection import tasks_without_record
from relaxtune.pipeline.choose.shipping import COMPARE_S, Shipping, decide
from relaxtune.pipeline.errors import NothingMeasuredError, PipelineError, UsageError
from relaxtune.pipeline.gate.latency import slower_than_last
from relaxtune.pipeline.job_outcomes import artifact_of, note_benchmark, note_validation
from relaxtune.pipeline.jobs.refutation import refute_kernels
from relaxtune.pipeline.jobs.tuned_model import (
    TunedModel,
    bucket_kernels,
    choose_kernels,
    record_shipped,
    select_as_measured,
    tune_prepared,
    untuned_kernels,
    with_untuned_sizes,
)
from relaxtune.pipeline.jobs.values import CompileResult, TuneRequest, TuneResult
from relaxtune.pipeline.prepare import ModelRequest, PreparedModel, prepare_model, stage
from relaxtune.pipeline.tasks.sizes_of_tables import sizes_text
from relaxtune.pipeline.tuning.options import search_seconds
from relaxtune.pipeline.tuning.progress import OnCandidate, UntilTheEnd
from relaxtune.pipeline.validate.acceptance import FAILED, NO_LIMITS, Limits, check_key, settle, validate_written
from relaxtune.pipeline.validate.reference import Reference
from relaxtune.pipeline.validate.validation import sample_inputs
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.layers import open_databases
from relaxtune.tuning_db.records import Mode
from relaxtune.tuning_db.store import TuningDatabase
from relaxtune.tuning_db.urls import DatabasePlace

logger = logging.getLogger(__name__)

# The seconds of the steps after the search but for the comparison, and of those after that, for each second that the
# untuned model took; a tuned table has more kernels than an untuned one, up to twice as long to compile.
_AFTER, _AFTER_TABLES, _VALIDATE = 1.5, 2.0, 0.25
# The part of a budget that is for the search of the graph, and of the search half at most.
_GRAPH_SHARE = 1 / 4
# Seconds of a comparison at least, where a budget does not leave more.
_COMPARE_LEAST_S = 2.0


@dataclass(frozen=True)
class Beforehand:
    """Parts of the artifact that tuning does not change. They are built while the model is tuned."""

    untuned: CompiledModule  # The model compiled without records.
    reference: Reference | None  # Has computed the samples that the artifact is validated with.
    until: float | None = None  # When the comparison is to be over, on the clock of `time.monotonic`.


def make_beforehand(prepared: PreparedModel, samples: int, threads: int | None = None) -> Beforehand:
    """Return the parts that do not depend on tuned kernels; `threads` are ONNX Runtime's."""
    with stage("compile untuned"):
        untuned = compile_module(prepared.lowered, untuned_kernels(prepared), prepared.target)
    return Beforehand(untuned, make_reference(prepared, samples, threads))


def compile_model(
    request: ModelRequest,
    out: Path,
    *,
    database: DatabasePlace | None = None,
    shared: Sequence[DatabasePlace] = (),
    record: bool = False,
    samples: int = 3,
    sign: Path | None = None,
) -> CompileResult:
    """Compile a model from records alone; nothing is measured.

    Records are read from `database` and, under it, from `shared`; without one every kernel takes the fallback. `record`
    notes the artifact and its validation in `database`, which is else only read. The artifact is validated with
    `samples` random inputs, 0 leaves that out; `sign` is as in `TuneRequest`.

    Raises `ModelError`, `ScheduleError`, `TuningDatabaseError`, `PipelineError`: see `pipeline.errors`. Nothing is
    written then.
    """
    check_destination(out)
    check_key(sign)
    if record and database is None:
        raise UsageError("nothing says where to note the artifact: expected a database (--db URL) with --record")
    urls = [*([database] if database is not None else []), *shared]
    with ExitStack() as stack:
        mode = Mode.TUNE if record else Mode.READ_ONLY
        opened = stack.enter_context(open_databases(urls, mode=mode, create=False)) if urls else None
        prepared = prepare_model(request)
        if opened is None:
            choices = choose_kernels(prepared, None)
        else:
            prepared, choices = select_as_measured(prepared, opened)
        folder = stack.enter_context(stage_beside(out.absolute()))
        encoder = None
        if prepared.encoder is not None:
            alone = replace(request, shapes={}, buckets={}, generate=False, max_length=None)
            done = compile_model(alone, folder / "encoder", database=database, shared=shared, samples=samples)
            if done.validation is not None and not done.validation.passed:
                return replace(done, directory=settle(done.directory, out, FAILED, None))
            encoder = done.directory
        made = _compile(prepared, choices, opened)
        return _finish(
            *(prepared, *made, opened, out, folder, samples), record=record, places=urls, sign=sign, encoder=encoder
        )


def tune_model(
    request: ModelRequest, tune_request: TuneRequest, out: Path, *, progress: OnCandidate | None = None
) -> TuneResult:
    """Import, tune, compile, validate and export a model: the main job.

    Ctrl-C during the tuning keeps every finished measurement and still compiles.

    Raises `NothingMeasuredError`: not one candidate nor fallback was measured validly, and the database knew none (the
    failures are recorded, and the untuned artifact is written); `ModelError`, `ScheduleError`, `TuningDatabaseError`,
    `PipelineError`: see `pipeline.errors`.
    """
    check_destination(out)
    check_key(tune_request.sign)
    if request.generate:
        raise UsageError(
            "--generate is a word of compile: tune the decode step as it is, and `relaxtune compile --generate --db "
            "URL` takes the records"
        )
    urls = [tune_request.database, *tune_request.shared]
    began, beforehand = time.monotonic(), None
    with open_databases(urls, mode=tune_request.tuning.mode) as database:
        prepared = prepare_model(request)
        require_device(prepared)
        if prepared.target.kind != "cuda" and not tune_request.tuning.graph_on_cpus:
            tune_request = replace(tune_request, tuning=replace(tune_request.tuning, graph_s=0.0))
        if prepared.sizes:
            logger.info("%s", sizes_text(prepared.sizes, prepared.tasks))
        budget_s = tune_request.tuning.time_budget_s
        if budget_s is not None and prepared.tasks:
            # The steps after the search take as long again, and half as long to write and load what is compared.
            before = time.monotonic()
            beforehand = make_beforehand(prepared, tune_request.samples)
            now, compare_s = time.monotonic(), tune_request.compare_s or max(_COMPARE_LEAST_S, budget_s / 6)
            after = _AFTER_TABLES if prepared.sizes and prepared.target.kind == "cuda" else _AFTER
            follows_s = after * (now - before) + compare_s * tune_request.benchmark
            beforehand = replace(beforehand, until=began + budget_s - _VALIDATE * (now - before))
            tuning = replace(tune_request.tuning, reserved_s=now - began + follows_s)
            graph_s = min(tuning.graph_s, _GRAPH_SHARE * budget_s, (search_seconds(tuning) or 0.0) / 2)
            tuning = replace(tuning, graph_s=graph_s)
            tune_request = replace(tune_request, tuning=tuning, compare_s=compare_s)
            progress = None if progress is None else UntilTheEnd(progress, follows_s)
            logger.info(
                "time budget %.0f s: %.0f s are over, %.0f s are for the search (of the graph: about %.0f s), about "
                "%.0f s to compile, compare and validate",
                budget_s, now - began, search_seconds(tuning), graph_s, follows_s
            )  # fmt: skip
        try:
            untuned = None if beforehand is None else beforehand.untuned
            tuned = tune_prepared(prepared, tune_request.tuning, database, progress, untuned)
        except NothingMeasuredError as error:
            raise NothingMeasuredError(f"{error} {_write_untuned(prepared, tune_request, database, out)}") from error
        if beforehand is not None:
            logger.info(
                "the search is over after %.0f s; compiling, comparing and validating", time.monotonic() - began
            )
        return finish_tuned(prepared, tuned, tune_request, database, out, beforehand=beforehand)


def _write_untuned(prepared: PreparedModel, request: TuneRequest, database: TuningDatabase, out: Path) -> str:
    """Write the artifact that `compile_model` would make of a model; return the outcome, for the user."""
    places = (request.database, *request.shared)
    try:
        made = _compile(prepared, choose_kernels(prepared, database), database)
        with stage_beside(out.absolute()) as folder:
            compiled = _finish(
                *(prepared, *made, database, out, folder, request.samples),
                record=request.record,
                places=places,
                sign=request.sign,
            )
    except PipelineError as error:
        return f"The untuned artifact cannot be made either: {error}"
    if compiled.validation is not None and not compiled.validation.passed:
        return f"The untuned artifact failed its validation: it is at {compiled.directory}."
    return f"The untuned artifact was written: {compiled.directory}."


def require_device(prepared: PreparedModel) -> None:
    """Check that a model can be measured on this machine.

    Raises `PipelineError`: its target is another.
    """
    if not prepared.can_measure:
        raise PipelineError(not_here(prepared.target))


def not_here(target: ResolvedTarget) -> str:
    """Return what is said where a target cannot be measured."""
    return (
        f"tuning measures on the device, and {target.arch} is not on this machine; run the tune where it is, make the "
        "artifact from records alone with `relaxtune compile`, or, on a newer GPU, measure PTX there with --portable"
    )


def finish_tuned(
    requested: PreparedModel,
    tuned: TunedModel,
    request: TuneRequest,
    database: TuningDatabase,
    out: Path,
    *,
    lock: AbstractContextManager[object] | None = None,
    on_compiled: Callable[[], None] | None = None,
    beforehand: Beforehand | None = None,
) -> TuneResult:
    """Make the artifact of a tuned model: compile, compare with the untuned one, export, validate.

    `lock` is held while the model is timed or validated. `on_compiled` is called when the model is compiled, and about
    to be compared and validated. `beforehand` is of `requested`, where it was made while the model was tuned.
    """
    on_compiled = on_compiled or (lambda: None)
    known = None if beforehand is None else beforehand.reference
    prepared, shipping, shipped, missed = tuned.prepared, None, None, None
    of_buckets: dict[str, Shipping] = {}
    compare_s = request.compare_s or COMPARE_S
    with (
        stage_beside(out.absolute()) as folder,
        meanwhile(requested, benchmark=request.benchmark, samples=request.samples, reference=known) as ready,
    ):
        if request.benchmark:
            shipping, shipped, tuned = _decide_shipping(
                *(requested, tuned, database, folder, lock, on_compiled, beforehand, ready), compare_s
            )
            compiled = shipping.compiled
            if not shipping.tuned:
                prepared = requested
            own = shipping.report.arm(OWN_ARM)
            most_ms, share = request.limits.max_latency_ms, request.limits.max_slowdown
            if most_ms is not None and own.median_ms > most_ms:
                missed = f"the model takes {own.median_ms:.4g} ms, and max_latency_ms is {most_ms:g}"
            if missed is None and share is not None:
                missed = slower_than_last(shipped.directory, out, timed_calls(requested), share, lock)
            record = partial(record_shipped, database=database, tuning=request.tuning, job_id=tuned.job_id)
            record(requested, prepared, shipping, with_untuned=tuned.with_untuned)
            buckets, of_buckets = _ship_buckets(requested, database, folder / "bucket", lock, record, compare_s)
        else:
            compiled, buckets = _compile(prepared, tuned.choices, database)
            on_compiled()
        made = _finish(
            *(prepared, compiled, buckets, database, out, folder, request.samples),
            record=request.record,
            job_id=tuned.job_id,
            written=shipped,
            limits=request.limits,
            missed=missed,
            places=(request.database, *request.shared),
            sign=request.sign,
            lock=lock,
            reference=ready.reference,
        )
    if shipping is not None and request.record:
        artifact = artifact_of(made.manifest, made.directory, tuned.job_id)
        note_benchmark(database, artifact, prepared.environment, shipping.report)
    return TuneResult(tuned.job_id, tuned.summary, made, shipping, tuned.rerank, tuned.graph, missed, of_buckets)


def _decide_shipping(
    requested: PreparedModel,
    tuned: TunedModel,
    database: TuningDatabase,
    folder: Path,
    lock: AbstractContextManager[object] | None,
    on_compiled: Callable[[], None],
    beforehand: Beforehand | None,
    ready: Meanwhile,
    compare_s: float,
) -> tuple[Shipping, LoadedArm, TunedModel]:
    """Compile a model tuned and untuned; return which of them ships, and that one's artifact in a folder.

    If it is faster in the mean but slower at some sizes, its tables keep their untuned kernels there, and both are
    compared once more.
    """
    with stage("compile"):
        untuned = None if beforehand is None else beforehand.untuned
        made = compile_module(tuned.prepared.lowered, tuned.choices, requested.target, like=untuned)
        if untuned is None:
            untuned = compile_module(requested.lowered, untuned_kernels(requested), requested.target, like=made)
    on_compiled()
    until = None if beforehand is None else beforehand.until
    with stage("compare"):
        shipping, arm = decide(requested, made, untuned, folder, lock, ready.peers, compare_s, until)
    if requested.tasks and not any(task.valid or task.failed or task.known for task in tuned.summary.tasks):
        shipping = replace(shipping, unfound="no time was left to try a kernel; a longer --time-budget leaves some")
    if shipping.tuned or not shipping.slower or shipping.contrast is None or shipping.contrast.gain < 0:
        return shipping, arm, tuned
    kept = with_untuned_sizes(tuned, shipping.slower, database)
    with stage("compile"):
        again = compile_module(kept.prepared.lowered, kept.choices, requested.target, like=made)
    if again.kernel_hashes == made.kernel_hashes:
        return shipping, arm, tuned
    logger.info("tuned kernels are slower at %s, where untuned ones stay", ", ".join(shipping.slower))
    with stage("compare"):
        shipping, arm = decide(requested, again, untuned, folder / "again", lock, ready.peers, compare_s, until)
    return shipping, arm, kept


def _ship_buckets(
    requested: PreparedModel,
    database: TuningDatabase,
    folder: Path,
    lock: AbstractContextManager[object] | None,
    record: Callable[[PreparedModel, PreparedModel, Shipping], None],
    compare_s: float,
) -> tuple[list[CompiledBucket], dict[str, Shipping]]:
    """Compile each bucket tuned and untuned; return the form that ships, and the comparisons where they differ."""
    compiled, compared = [], {}
    for bucket in requested.buckets:
        prepared = requested.of_bucket(bucket)
        with stage("compile"):
            made = compile_module(prepared.lowered, choose_kernels(prepared, database), prepared.target)
            untuned = compile_module(prepared.lowered, untuned_kernels(prepared), prepared.target, like=made)
        if made.kernel_hashes != untuned.kernel_hashes:
            with stage("compare"):
                shipping, _ = decide(prepared, made, untuned, folder, lock, Peers, compare_s)
            record(prepared, prepared, shipping)
            shutil.rmtree(folder, ignore_errors=True)
            made, compared[bucket.bucket.name] = shipping.compiled, shipping
        compiled.append(CompiledBucket(bucket.bucket, made))
    return compiled, compared


def _compile(
    prepared: PreparedModel, choices: Sequence[KernelChoice], database: TuningDatabase | None
) -> tuple[CompiledModule, list[CompiledBucket]]:
    """Compile a model with the kernels chosen for it, and its buckets with those that records say."""
    with stage("compile"):
        compiled = compile_module(prepared.lowered, choices, prepared.target)
        buckets = [
            CompiledBucket(
                one.bucket,
                compile_module(one.lowered, bucket_kernels(prepared.of_bucket(one), database), prepared.target),
            )
            for one in prepared.buckets
        ]
    return compiled, buckets


def _finish(
    prepared: PreparedModel,
    compiled: CompiledModule,
    buckets: Sequence[CompiledBucket],
    database: TuningDatabase | None,
    out: Path,
    folder: Path,
    samples: int,
    *,
    record: bool,
    job_id: str | None = None,
    written: LoadedArm | None = None,
    limits: Limits = NO_LIMITS,
    missed: str | None = None,
    places: Sequence[DatabasePlace] = (),
    sign: Path | None = None,
    lock: AbstractContextManager[object] | None = None,
    reference: Callable[[], Reference | None] = lambda: None,
    encoder: Path | None = None,
) -> CompileResult:
    """Write a compiled model in a folder of this process, validate it, and move it to its place."""
    validates, loaded, place = bool(samples) and runs_here(prepared.target), None, folder / "artifact"
    with stage("export"):
        if written is None or buckets:
            manifest = write_artifact(compiled, place, buckets, encoder=encoder)
        else:
            loaded, manifest, place = written.module, written.module.manifest, written.directory
    validation = None
    if validates:
        with stage("validate"):
            loaded = loaded or Module.load(place)
            validation = validate_written(loaded, place, prepared.model, samples, limits, lock, reference())
        manifest = record_validation(place, validation.to_json())
        if not validation.passed:
            missed = FAILED
            if database is not None:
                with stage("refute"):
                    sizes = sizes_within(prepared.model, manifest.maxima)
                    drawn = sample_inputs(prepared.model, samples=samples, seed=0, dims=sizes)
                    wrong = drawn[validation.failed_sample or 0]
                    refute_kernels(prepared, compiled.choices, wrong, database, places)
    elif samples:
        logger.warning("not validated: code for %s does not run on this machine", prepared.target.arch)
    directory = settle(place, out, missed, sign)
    if database is not None and record:
        artifact = artifact_of(manifest, directory, job_id)
        database.record_artifact(artifact)
        if validation is not None:
            note_validation(database, artifact, prepared.environment, validation)
    every = (*compiled.choices, *(choice for bucket in buckets for choice in bucket.compiled.choices))
    return CompileResult(directory, manifest, compiled.choices, tasks_without_record(every), validation)
