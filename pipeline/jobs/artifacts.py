"""The jobs on a written artifact: validate it, and measure it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from relaxtune.models import OnnxModel
from relaxtune.models.axis_profile import sizes_within
from relaxtune.models.buckets import batch_axis, check_axes
from relaxtune.models.size_histogram import SizePoint, few_points, read_histogram
from relaxtune.pipeline.artifact.directory import record_validation
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.bench.energy import energy_of
from relaxtune.pipeline.bench.lengths import LengthsReport, measure_lengths
from relaxtune.pipeline.bench.measure import OWN_ARM, BenchmarkReport, Call
from relaxtune.pipeline.bench.open_loop import OpenLoad, OpenLoadReport, run_open_loop
from relaxtune.pipeline.bench.request import BenchRequest
from relaxtune.pipeline.bench.side_by_side import LoadedArtifact, side_by_side
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.job_outcomes import artifact_of, environment_of, note_benchmark, note_validation
from relaxtune.pipeline.validate.builds import Arrays, reference_model
from relaxtune.pipeline.validate.padding_trials import route_inputs, route_sizes, try_and_record
from relaxtune.pipeline.validate.report import DriftOptions, ValidationReport
from relaxtune.pipeline.validate.validation import DEFAULT_REPEATS, DEFAULT_SAMPLES, sample_inputs, validate
from relaxtune.tuning_db.store import TuningDatabase
from relaxtune.tuning_db.urls import DatabasePlace

# Different sizes of a histogram that are measured.
_LENGTHS_MAX = 24


@dataclass(frozen=True)
class ValidationRequest:
    """How an artifact is validated."""

    # Allowed differences; None takes the table of tolerances.
    rtol: float | None = None
    atol: float | None = None
    # Random inputs, their seed, and how often each is run.
    samples: int = DEFAULT_SAMPLES
    seed: int = 0
    repeats: int = DEFAULT_REPEATS
    drift: DriftOptions = field(default_factory=DriftOptions)  # Options of the drift report.
    database: DatabasePlace | None = None  # Where the result is noted, by file or URL; None for nowhere.


@dataclass(frozen=True)
class ValidatedArtifact:
    """A validation with what it was made of: the module, the ONNX model, and the inputs that both were given."""

    module: Module
    model: OnnxModel
    inputs: Sequence[Arrays]
    report: ValidationReport


def validate_artifact(
    directory: Path, source: str | Path | None = None, request: ValidationRequest | None = None
) -> ValidatedArtifact:
    """Compare an artifact with ONNX Runtime, by every route if it has shape buckets, and note that in its manifest.

    Raises `ArtifactError`, `ModelError`, `TuningDatabaseError`, `UsageError`: the artifact, its model or the database
    cannot be had. A comparison that fails is a report.
    """
    request = request or ValidationRequest()
    module = Module.load(directory)
    model = reference_model(module, source)
    # Opened first: a database that cannot be had ends the command before the work.
    with nullcontext() if request.database is None else TuningDatabase.open(request.database) as database:
        if module.manifest.buckets is not None:
            module = try_and_record(directory, module, model)
        inputs: Sequence[Arrays] = route_inputs(module, model, samples=request.samples, seed=request.seed)
        report = validate(
            module, model, rtol=request.rtol, atol=request.atol, samples=request.samples, seed=request.seed,
            drift=request.drift, inputs=inputs or None, repeats=request.repeats,
        )  # fmt: skip
        record_validation(directory, report.to_json())
        if database is not None:
            manifest = module.manifest
            note_validation(database, artifact_of(manifest, directory), environment_of(manifest), report)
    sizes = sizes_within(model, module.manifest.maxima)
    return ValidatedArtifact(
        module, model, inputs or sample_inputs(model, samples=request.samples, seed=request.seed, dims=sizes), report
    )


def bench_artifact(
    directory: Path,
    source: str | Path | None = None,
    request: BenchRequest | None = None,
    *,
    database: DatabasePlace | None = None,
) -> tuple[Module, dict[str, BenchmarkReport]]:
    """Return an artifact's module, and its latencies with those of peers, in alternation.

    The latencies are by bucket and `symbolic`; without buckets, or at sizes that the request names, there is one,
    named "". Inputs are random, with masks that hide nothing.

    Raises `UsageError`: a peer does not compute on the artifact's device, or latencies under load are to be noted in a
    database.
    """
    request = request or BenchRequest()
    if database is not None and request.streams > 1:
        raise UsageError(
            "latencies of several callers at once are not noted in a database; leave --db or --streams out"
        )
    artifact = LoadedArtifact.load(directory, request.streams)
    module = artifact.module
    model = reference_model(module, source)
    check_axes(request.dims, model.inputs, "--dim")
    routes: Mapping[str, Mapping[str, int]] = {"": request.dims}
    if not request.dims:
        routes = route_sizes(module, model) or {"": {}}
    reports: dict[str, BenchmarkReport] = {}
    with (
        nullcontext() if database is None else TuningDatabase.open(database) as opened,
        side_by_side(artifact, model, request) as peers,
    ):
        for name, dims in routes.items():
            call = Call.at(model, sizes_within(model, module.manifest.maxima, dims), seed=request.seed)
            report = replace(peers.measure({OWN_ARM: artifact}, call.inputs), sizes={call.sizes: 1})
            reports[name] = replace(report, conditions={**report.conditions, "shape": name}) if name else report
            if opened is not None:
                manifest = module.manifest
                note_benchmark(opened, artifact_of(manifest, directory), environment_of(manifest), reports[name])
    return module, reports


def bench_open_loop(
    directory: Path, load: OpenLoad, source: str | Path | None = None, request: BenchRequest | None = None
) -> OpenLoadReport:
    """Return the latencies of an artifact whose calls arrive as planned, to so many callers; there are no peers.

    Raises `ValidationFailedError`: its outputs are not what ONNX Runtime gives.
    """
    request = replace(request or BenchRequest(), against=())
    artifact = LoadedArtifact.load(directory, request.streams)
    model = reference_model(artifact.module, source)
    check_axes(request.dims, model.inputs, "--dim")
    sizes = sizes_within(model, artifact.module.manifest.maxima, request.dims)
    call = Call.at(model, sizes, seed=request.seed)
    with side_by_side(artifact, model, request) as alone:
        alone.check({OWN_ARM: artifact}, call.inputs)
    callers = artifact.callers(call.inputs)
    for caller in callers:
        for _ in range(request.warmup):
            caller()
    with energy_of(artifact.module.device) as energy:
        latencies_ms, took_s = run_open_loop(callers, load, seed=request.seed)
    return OpenLoadReport(load, len(callers), latencies_ms, took_s, call.sizes, energy)


def bench_lengths(
    directories: Sequence[Path], histogram: Path, source: str | Path | None = None, request: BenchRequest | None = None
) -> LengthsReport:
    """Return the latencies of artifacts of one model, and of peers, at the sizes of a file.

    Of more than 24 different sizes, 24 that stand for about as many calls each are measured.

    Raises `ModelShapeError`, `UsageError`: the file cannot be read or is of other axes; an artifact is of another
    model, or two have one name.
    """
    points = read_histogram(histogram)
    return _bench_points(directories, source, request, lambda model: few_points(points, _LENGTHS_MAX))


def bench_batches(
    directories: Sequence[Path],
    sizes: Sequence[int],
    source: str | Path | None = None,
    request: BenchRequest | None = None,
) -> LengthsReport:
    """Return the latencies of artifacts of one model, and of peers, at sizes of the batch: the inputs' first axis.

    Raises `UsageError`: the batch of the first artifact has one size; an artifact is of another model, or two have one
    name.
    """

    def points(model: OnnxModel) -> list[SizePoint]:
        axis = batch_axis(model.inputs)
        if axis is None:
            shapes = "; ".join(map(str, model.inputs))
            raise UsageError(
                f"no first axis of the inputs is symbolic ({shapes}), so that the artifact takes one batch; compile it "
                "with a name there, such as --shape input_ids=batchx128"
            )
        return [SizePoint(((axis, size),), 1) for size in sizes]

    return _bench_points(directories, source, request, points)


def _bench_points(
    directories: Sequence[Path],
    source: str | Path | None,
    request: BenchRequest | None,
    choose: Callable[[OnnxModel], Sequence[SizePoint]],
) -> LengthsReport:
    request = request or BenchRequest()
    names = [directory.resolve().name for directory in directories]
    if len(set(names)) < len(names):
        raise UsageError(f"artifacts need directories of different names, got {', '.join(names)}")
    loaded = [LoadedArtifact.load(directory, request.streams) for directory in directories]
    first = loaded[0].module.manifest.source
    model, *_ = [reference_model(one.module, source or first) for one in loaded]
    points = choose(model)
    check_axes([axis for point in points for axis, _ in point.sizes], model.inputs, "the lengths")
    check_axes(request.dims, model.inputs, "--dim")
    return measure_lengths(dict(zip(names, loaded, strict=True)), model, points, request)
