"""The public API, one function for each word of the command line; `import relaxtune` has all of it.

Names imported `as` themselves are public too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np

from relaxtune.loading import load as load
from relaxtune.models import (
    ModelError as ModelError,
    OnnxModel as OnnxModel,
    list_models as list_models,
    load_model as load_model,
    random_inputs as random_inputs,
)
from relaxtune.models.axis_profile import AxisProfile
from relaxtune.models.size_histogram import profile_of, read_histogram
from relaxtune.pipeline.artifact.generation.generator import Sampling as Sampling
from relaxtune.pipeline.artifact.module import Module as Module
from relaxtune.pipeline.batch.driver import BatchRun as BatchRun
from relaxtune.pipeline.batch.events import (
    BatchEvent as BatchEvent,
    BatchResult as BatchResult,
    CandidateEvent as CandidateEvent,
    CellEvent as CellEvent,
)
from relaxtune.pipeline.batch.plan import nearest, read_plan
from relaxtune.pipeline.bench.measure import BenchmarkReport as BenchmarkReport
from relaxtune.pipeline.bench.request import BenchRequest as BenchRequest
from relaxtune.pipeline.errors import (
    ArtifactError as ArtifactError,
    ImportFailedError as ImportFailedError,
    LoweringError as LoweringError,
    NothingMeasuredError as NothingMeasuredError,
    PipelineError as PipelineError,
    UsageError as UsageError,
    ValidationFailedError as ValidationFailedError,
)
from relaxtune.pipeline.gate.call_recorder import CallRecorder as CallRecorder
from relaxtune.pipeline.gate.gate import GateLimits as GateLimits, GateReport as GateReport, run_gate
from relaxtune.pipeline.gate.latency import LatencyLimit as LatencyLimit
from relaxtune.pipeline.jobs.artifacts import ValidationRequest, bench_artifact, validate_artifact
from relaxtune.pipeline.jobs.calibrate import calibrate_model
from relaxtune.pipeline.jobs.compile_and_tune import compile_model, tune_model
from relaxtune.pipeline.jobs.explain import Explanation as Explanation, explain_model
from relaxtune.pipeline.jobs.inspect import Inspection as Inspection, inspect_model
from relaxtune.pipeline.jobs.values import CompileResult as CompileResult, TuneRequest, TuneResult as TuneResult
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.precision.calibration import CalibrationRecord as CalibrationRecord, Method
from relaxtune.pipeline.prepare import ModelRequest
from relaxtune.pipeline.registry.refit import Refit as Refit, refit_artifact
from relaxtune.pipeline.registry.registry import Registry as Registry
from relaxtune.pipeline.report.report import Report as Report, report_artifact
from relaxtune.pipeline.tasks.routes import DEFAULT_ROUTES
from relaxtune.pipeline.tuning.options import SEARCHED_ROUTES, Effort as Effort, options_for
from relaxtune.pipeline.validate.builds import compare_builds
from relaxtune.pipeline.validate.comparison import Comparison as Comparison
from relaxtune.pipeline.validate.report import ValidationReport as ValidationReport
from relaxtune.schedules.errors import ScheduleError as ScheduleError
from relaxtune.tuning_db.errors import TuningDatabaseError as TuningDatabaseError
from relaxtune.tuning_db.records import Mode as Mode, RecordFilter as RecordFilter, Route as Route
from relaxtune.tuning_db.store import TuningDatabase as TuningDatabase
from relaxtune.tuning_db.urls import DatabaseUrl


class ModelOptions(TypedDict, total=False):
    """Options of a model for `tune`, `compile` and `inspect`; each has the option's name on the command line.

    Attributes
    ----------
    target
        `auto` (a GPU, else this CPU), `llvm`, `cuda`, `cuda:sm_90a`, `cuda:sm_89@L4`, a TVM tag, or JSON.
    portable
        Whether PTX is kept beside a GPU's code, so that newer GPUs run it too.
    shapes
        Input name -> shape, where a name instead of a size stays symbolic; or axis -> `(size,)`, in all inputs.
    buckets
        Symbolic axis -> sizes that get code of their own.
    profile
        Symbolic axis -> its least, typical and largest size, which kernels are tuned at.
    lengths
        Instead of `profile`: a file with the sizes of real calls, lines of 'sequence,count'.
    precision, group_size
        `fp32`, `tf32`, `fp16`, `bf16`, `fp8`, `w8a16`, `w4a16` or `int8` (default: the graph's); weights that share a
        scale.
    calibration
        File of ranges for `fp8`, as `calibrate` returns and `CalibrationRecord.write` writes them.
    disabled_passes, dump_ir, embed_weights
        Passes to switch off, a folder for the IR of each phase, whether model.so holds the weights.
    unpad
        Whether padding is left out, so that an encoder's time goes with its tokens.
    generate, max_length
        Whether the artifact of a decoder generates tokens, and how many a sequence has at most (`Module.generate`).
    routes
        Who may make kernels.
    seed
        Of the search, the zoo's weights and the inputs.
    """

    target: str
    portable: bool
    shapes: Mapping[str, Sequence[int | str]]
    buckets: Mapping[str, Sequence[int]]
    profile: Mapping[str, tuple[int, int, int]]
    lengths: str | Path | None
    precision: str | None
    group_size: int | None
    calibration: str | Path | None
    disabled_passes: Sequence[str]
    dump_ir: Path | None
    embed_weights: bool
    unpad: bool
    generate: bool
    max_length: int | None
    routes: Sequence[Route]
    seed: int


def tune(
    source: str | Path,
    out: str | Path,
    *,
    database: str | Path = "relaxtune.db",
    shared: Sequence[str | Path] = (),
    effort: Effort | str = Effort.NORMAL,
    trials: int | None = None,
    time_budget_s: float | None = None,
    mode: Mode | str = Mode.TUNE,
    devices: Sequence[str] | None = None,
    benchmark: bool = True,
    samples: int = 3,
    sign: str | Path | None = None,
    **options: Unpack[ModelOptions],
) -> TuneResult:
    """Tune, compile, validate and export a model: an `.onnx` file or a zoo name.

    Parameters
    ----------
    source, out : str or Path
        The model, and the artifact's directory.
    database, shared : str or Path
        Where measurements are kept, by file or URL, and databases that are read under it.
    effort, trials, time_budget_s
        How much to try; the last two replace the effort's limits.
    mode : Mode or str
        `force` measures again what the database knows.
    devices : sequence of str or None
        GPUs to measure on side by side, such as `cuda:0`; None takes all of the target's model.
    benchmark, samples : bool, int
        Whether the artifact is timed at the end; random inputs to validate it with.
    sign : str, Path or None
        The Ed25519 private key (PEM) that the artifact is signed with.

    Raises
    ------
    PipelineError, ModelError, ScheduleError, TuningDatabaseError
        See `relaxtune.pipeline.errors`. A validation that failed is in the result: `compiled.validation`.
    """
    request = _request(source, options)
    tuning = replace(
        options_for(Effort(effort), trials, time_budget_s),
        routes=request.routes & SEARCHED_ROUTES,
        seed=request.seed,
        mode=Mode(mode),
        devices=None if devices is None else tuple(devices),
    )
    places = tuple(map(DatabaseUrl.of, shared))
    tune_request = TuneRequest(DatabaseUrl.of(database), tuning, benchmark, samples, places, sign=_path(sign))
    return tune_model(request, tune_request, Path(out))


def compile(
    source: str | Path,
    out: str | Path,
    *,
    database: str | Path | None = None,
    shared: Sequence[str | Path] = (),
    record: bool = False,
    samples: int = 3,
    sign: str | Path | None = None,
    **options: Unpack[ModelOptions],
) -> CompileResult:
    """Compile, validate and export a model from the database's records; nothing is measured.

    Parameters are those of `tune`. `record` notes the artifact and its validation in `database`.
    """
    request = _request(source, options)
    return compile_model(
        request, Path(out), database=database, shared=shared, record=record, samples=samples, sign=_path(sign)
    )


def calibrate(
    source: str | Path | OnnxModel, samples: Sequence[Mapping[str, np.ndarray]], *, method: str = "max"
) -> CalibrationRecord:
    """Return the ranges of the tensors that a model's matmuls read, over the inputs of some calls.

    `method`: `max`, `percentile`, `mse` or `entropy`. The record's `write` makes the file that the option `calibration`
    names.
    """
    if method not in list(Method):
        raise UsageError(f"unknown method {method!r}; expected {', '.join(Method)}")
    model = source if isinstance(source, OnnxModel) else load_model(source)
    return calibrate_model(model, samples, Method(method))


def batch(plan: str | Path, *, fail_fast: bool = False, cluster: str | None = None) -> BatchRun:
    """Tune, compile, compare and validate the cells of a plan, a TOML file; each task that cells share is tuned once.

    Iterate over what is returned: a `CellEvent` for each state of each cell, a `CandidateEvent` for each candidate. Its
    `result()` carries the plan out to its end and returns a `BatchResult`. `fail_fast` ends with the first cell that is
    not accepted; `cluster` is the address of a cluster.

    Raises
    ------
    UsageError, ArtifactError, TuningDatabaseError
        The plan, an artifact's place or the database cannot be had; nothing is started then. The error of one
        cell is in its event.
    """
    return BatchRun(read_plan(plan), fail_fast=fail_fast, cluster=cluster)


def inspect(source: str | Path, *, code: bool = False, **options: Unpack[ModelOptions]) -> Inspection:
    """Return what a model needs and would become, or every node that stops its import.

    `code` generates the code of the kernels too, and raises what compiling would.
    """
    return inspect_model(_request(source, options), code=code)


def explain(
    source: str | Path,
    *,
    database: str | Path = "relaxtune.db",
    shared: Sequence[str | Path] = (),
    **options: Unpack[ModelOptions],
) -> Explanation:
    """Return which records `compile` looks at for each kernel, and why each is taken or not; nothing is compiled."""
    return explain_model(_request(source, options), database, shared)


def validate(
    directory: str | Path,
    model: str | Path | None = None,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    samples: int = 3,
    seed: int = 0,
    database: str | Path | None = None,
) -> ValidationReport:
    """Compare an artifact with ONNX Runtime on random inputs; `raise_if_failed()` of the report raises.

    `model` is where the ONNX model is, if not where it was; `database` is where the result is noted.
    """
    request = ValidationRequest(
        rtol, atol, samples, seed, database=None if database is None else DatabaseUrl.of(database)
    )
    return validate_artifact(Path(directory), model, request).report


def bench(
    directory: str | Path,
    model: str | Path | None = None,
    request: BenchRequest | None = None,
    *,
    database: str | Path | None = None,
) -> dict[str, BenchmarkReport]:
    """Return the latencies of an artifact and its peers, by shape bucket; without buckets the one key is "".

    `request` says which peers, how long, how many callers at once; by default ONNX Runtime, 50 runs. A peer without a
    latency is in the report with the reason; `raise_if_failed()` raises for those that ran and failed.
    """
    return bench_artifact(Path(directory), model, request, database=database)[1]


def compare(
    first: str | Path, second: str | Path, *, inputs: Mapping[str, np.ndarray] | None = None, exact: bool = False
) -> Comparison:
    """Return how two artifacts differ: outputs on the same inputs (random if not given), kernels, versions."""
    return compare_builds(Path(first), Path(second), inputs=inputs, exact=exact)


def gate(
    new: str | Path,
    baseline: str | Path,
    limits: GateLimits | None = None,
    *,
    model: str | Path | None = None,
    inputs: Mapping[str, np.ndarray] | Sequence[Mapping[str, np.ndarray]] | None = None,
    database: str | Path | None = None,
) -> GateReport:
    """Return whether an artifact may take the place of another; `raise_if_refused()` of the report raises.

    Both run here, alternately. `inputs` is what they run on, one call or several, random if not given; `model` is where
    the ONNX model is, if not where it was. The report is kept in `database`, passed or refused.
    """
    with nullcontext() if database is None else TuningDatabase.open(database) as opened:
        return run_gate(Path(new), Path(baseline), limits, source=model, inputs=inputs, database=opened)


def refit(
    directory: str | Path,
    weights: str | Path | None = None,
    out: str | Path | None = None,
    *,
    lora: str | Path | None = None,
    seed: int = 0,
    samples: int = 3,
    sign: str | Path | None = None,
) -> Refit:
    """Give an artifact the weights of another model of the same graph, without compiling or tuning.

    Without `out` the new artifact takes the place of the old one. It is validated like a compiled one. Weights that do
    not fit the code are an `ArtifactError` that names them. `lora` is a LoRA adapter, merged into `weights` or into
    the artifact's own model.
    """
    return refit_artifact(
        Path(directory), weights, _path(out), lora=_path(lora), seed=seed, samples=samples, sign=_path(sign)
    )


def report(directory: str | Path, *, database: str | Path | None = None) -> Report:
    """Return where an artifact's time goes, kernel by kernel, by the records behind its kernels."""
    with nullcontext() if database is None else open_database(database) as opened:
        return report_artifact(Path(directory), database=opened)


def open_database(url: str | Path, *, mode: Mode | str = Mode.READ_ONLY, create: bool = False) -> TuningDatabase:
    """Return the tuning database at a file or URL, to read unless `mode` says `tune`; a context manager."""
    return TuningDatabase.open(url, mode=Mode(mode), create=create)


@contextmanager
def open_registry(store: str | Path, database: str | Path) -> Iterator[Registry]:
    """Give the artifacts of a folder or URL and their tags, whose history a database has; both are made if missing."""
    with TuningDatabase.open(database) as opened:
        yield Registry(store, opened)


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)


def _request(source: str | Path, options: ModelOptions) -> ModelRequest:
    known = ModelOptions.__annotations__
    for name in options.keys() - known.keys():
        raise UsageError(f"there is no option {name!r}{nearest(name, known)}; expected one of {', '.join(known)}")
    profile = {axis: AxisProfile(*sizes) for axis, sizes in options.get("profile", {}).items()}
    if (file := options.get("lengths")) is not None and profile:
        raise UsageError("lengths gives the profile too; leave profile out, or lengths")
    lengths = read_histogram(Path(file)) if file is not None else ()
    record = options.get("calibration")
    lowering = LoweringOptions(
        precision=options.get("precision"),
        group_size=options.get("group_size"),
        calibration=CalibrationRecord.read(Path(record)).scales() if record is not None else None,
        disabled_passes=frozenset(options.get("disabled_passes", ())),
        dump_dir=options.get("dump_ir"),
        embed_weights=options.get("embed_weights", False),
        unpad=options.get("unpad", False),
    )
    return ModelRequest(
        source=source,
        shapes=options.get("shapes", {}),
        target=options.get("target", "auto"),
        portable=options.get("portable", False),
        lowering=lowering,
        seed=options.get("seed", 0),
        routes=frozenset(options.get("routes", DEFAULT_ROUTES)),
        buckets=options.get("buckets", {}),
        profile=profile_of(lengths) if lengths else profile,
        lengths=lengths,
        generate=options.get("generate", False),
        max_length=options.get("max_length"),
    )
