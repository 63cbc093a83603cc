"""`relaxtune validate`, `compare`, `bench` and `run`: what can be done with an artifact."""

from __future__ import annotations

import logging
import zipfile
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from relaxtune.pipeline.cli.options import ArtifactArgument, FormatOption, OutcomeDatabaseOption, SeedOption
from relaxtune.pipeline.cli.output import OutputFormat, TableView, emit, print_json, print_table, stdout_console
from relaxtune.pipeline.errors import PipelineError, UsageError, ValidationFailedError

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from relaxtune.models import OnnxModel
    from relaxtune.pipeline.artifact.runtime import Module
    from relaxtune.pipeline.bisect import Bisection, FaultyKernel
    from relaxtune.pipeline.validate.report import ValidationReport

_INPUTS_FILE = "for --inputs a .npz file with one array for each input, as numpy.savez(path, input_ids=..., ...) writes"
_OUTPUTS_FILE = "an artifact, or a .npz file of outputs, as `relaxtune run DIR --inputs X.npz --outputs Y.npz` writes"

ReferenceOption = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="The ONNX model. Default: the one it was compiled from."),
]


def validate_command(
    directory: ArtifactArgument,
    model: ReferenceOption = None,
    rtol: Annotated[float | None, typer.Option("--rtol", min=0.0, help="Default: by dtype and precision.")] = None,
    atol: Annotated[float | None, typer.Option("--atol", min=0.0, help="Default: by dtype and precision.")] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Random inputs to compare.")] = 3,
    seed: SeedOption = 0,
    repeat: Annotated[
        int, typer.Option("--repeat", min=1, help="Runs of each input; from 2 on their bits are compared.")
    ] = 2,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Compare each kernel with its unscheduled form too, on one input.")
    ] = False,
    bisect: Annotated[
        bool, typer.Option("--bisect", help="If it fails, find the ONNX node, and the pass or the kernel to blame.")
    ] = False,
    repro: Annotated[
        Path | None,
        typer.Option("--repro", metavar="DIR", help="Where --bisect writes a reproduction. Default: DIR-repro."),
    ] = None,
    logits: Annotated[
        list[str] | None,
        typer.Option("--logits", metavar="NAME", help="Output that is logits, for the drift (repeatable)."),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option("--tokens", metavar="FILE", help="Token ids (.npy or text) to take the perplexity of."),
    ] = None,
    db: OutcomeDatabaseOption = None,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Compare an artifact with ONNX Runtime on random inputs. Exits 3 when they disagree."""
    from relaxtune.pipeline.artifact.directory import record_validation
    from relaxtune.pipeline.artifact.runtime import Module
    from relaxtune.pipeline.bisect import check_kernels
    from relaxtune.pipeline.bisect import render as render_bisection
    from relaxtune.pipeline.job_outcomes import artifact_of, environment_of, note_validation
    from relaxtune.pipeline.validate.drift import DriftOptions, render_drift
    from relaxtune.pipeline.validate.padding_proof import prove_and_record, route_inputs
    from relaxtune.pipeline.validate.report import render
    from relaxtune.pipeline.validate.validation import sample_inputs, validate
    from relaxtune.tuning_db.store import SqlDatabase

    module = Module.load(directory)
    reference = _reference_model(module, model)
    # Opened first: a database that cannot be had is told before the work.
    with nullcontext() if db is None else SqlDatabase.open(db) as database:
        wanted = DriftOptions(tuple(logits or ()), tokens)
        if module.manifest.buckets is not None:
            module = prove_and_record(directory, module, reference)
        given = route_inputs(module, reference, samples=samples, seed=seed) or None
        report = validate(
            module, reference, rtol=rtol, atol=atol, samples=samples, seed=seed, drift=wanted, inputs=given,
            repeats=repeat,
        )  # fmt: skip
        record_validation(directory, report.to_json())
        if database is not None:
            manifest = module.manifest
            note_validation(database, artifact_of(manifest, directory), environment_of(manifest), report)
    data = report.to_json()
    faulty: tuple[FaultyKernel, ...] = ()
    if kernels:
        given_first = (given or sample_inputs(reference, samples=1, seed=seed))[0]
        faulty = check_kernels(module, reference, given_first, database=db)
        data["faulty_kernels"] = [asdict(kernel) for kernel in faulty]
        record_validation(directory, data)
    found = None
    if bisect:
        found = _bisect(module, reference, report, directory, repro, db, given)
        data["bisection"] = None if found is None else found.to_json()
        record_validation(directory, data)
    if output_format is OutputFormat.JSON:
        print_json(data)
    else:
        stdout_console().print(render(report))
        if report.drift is not None:
            stdout_console().print(render_drift(report.drift))
        if found is not None:
            stdout_console().print(render_bisection(found))
        if kernels:
            rows = tuple((one.function, one.route, ", ".join(one.onnx_nodes), one.reason) for one in faulty)
            print_table(
                TableView(f"{len(faulty)} faulty kernels", ("kernel", "route", "ONNX nodes", "difference"), rows)
            )
    report.raise_if_failed()
    if faulty:
        raise ValidationFailedError(
            f"{report.model}: its outputs are within tolerance, and {len(faulty)} kernels are not: "
            + "; ".join(f"{one.function} ({one.route}): {one.reason}" for one in faulty)
        )


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="An artifact, or a .npz of outputs that `run` saved.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The same of another build, or from another machine.")],
    inputs: Annotated[
        Path | None,
        typer.Option(
            "--inputs", metavar="X.npz", help="What artifacts are run on. Default: random, for two artifacts."
        ),
    ] = None,
    model: ReferenceOption = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Random inputs to compare.")] = 3,
    seed: SeedOption = 0,
    exact: Annotated[bool, typer.Option("--exact", help="Exit 3 unless all bits are the same.")] = False,
    rtol: Annotated[float | None, typer.Option("--rtol", min=0.0, help="Exit 3 beyond this (--atol: 0 then).")] = None,
    atol: Annotated[float | None, typer.Option("--atol", min=0.0, help="Exit 3 beyond this (--rtol: 0 then).")] = None,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Measure the drift between two builds of a model. Exits 3 only where equal bits or a tolerance are asked for."""
    from relaxtune.pipeline.artifact.runtime import Module
    from relaxtune.pipeline.validate.comparison import Comparison, compare_manifests, compare_outputs, render
    from relaxtune.pipeline.validate.tolerances import Tolerance
    from relaxtune.pipeline.validate.validation import sample_inputs

    loaded = [Module.load(path) if path.is_dir() else None for path in (first, second)]
    a, b = loaded
    saved = [
        None if module is not None else [_read_arrays(path, _OUTPUTS_FILE)]
        for path, module in zip((first, second), loaded, strict=True)
    ]
    asked = "no bit" if exact else ""
    tolerance = None
    if not exact and (rtol is not None or atol is not None):
        tolerance = Tolerance(rtol or 0.0, atol or 0.0)
        asked = f"rtol {tolerance.rtol:g} and atol {tolerance.atol:g} x max(1, RMS)"
    if inputs is not None:
        given = [_read_arrays(inputs)]
    elif a is not None and b is not None:
        given = sample_inputs(_reference_model(a, model), samples=samples, seed=seed)
    elif a is not None or b is not None:
        raise UsageError(
            f"{first if a is None else second} holds outputs, and nothing says of which inputs; give those that it was "
            "run on with --inputs X.npz"
        )
    else:
        given = []
    outputs = [
        found if found is not None else [module.run(sample) for sample in given] if module is not None else []
        for found, module in zip(saved, loaded, strict=True)
    ]
    drift = compare_outputs(outputs[0], outputs[1], exact=exact, tolerance=tolerance)
    kernels, builds = compare_manifests(a.manifest, b.manifest) if a is not None and b is not None else ((), ())
    comparison = Comparison(str(first), str(second), drift, kernels, builds, asked)
    if output_format is OutputFormat.JSON:
        print_json(comparison.to_json())
    else:
        for table in render(comparison):
            stdout_console().print(table)
    comparison.raise_if_failed()


def bench(
    directory: ArtifactArgument,
    model: ReferenceOption = None,
    against: Annotated[str, typer.Option("--against", metavar="ort,...", help="Peers, or nothing: ''.")] = "ort",
    runs: Annotated[int, typer.Option("--runs", min=1, help="Timed runs of each arm.")] = 50,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Runs of each arm before.")] = 10,
    seed: SeedOption = 0,
    db: OutcomeDatabaseOption = None,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Measure the latency of an artifact, of each shape bucket if it has any, side by side with peers, taking turns.

    Inputs are random, with masks that hide nothing.
    """
    from relaxtune.models import axis_sizes, unpadded_inputs
    from relaxtune.pipeline.artifact.bucket_routing import render_statistics
    from relaxtune.pipeline.artifact.runtime import Module
    from relaxtune.pipeline.bench.measure import BenchmarkReport, measure_module, render
    from relaxtune.pipeline.job_outcomes import artifact_of, environment_of, note_benchmark
    from relaxtune.pipeline.validate.padding_proof import route_sizes
    from relaxtune.tuning_db.store import SqlDatabase

    module = Module.load(directory)
    reference = _reference_model(module, model)
    peers = frozenset(name.strip() for name in against.split(",") if name.strip())
    sizes = route_sizes(module, reference) or {"": {}}
    reports: dict[str, BenchmarkReport] = {}
    with nullcontext() if db is None else SqlDatabase.open(db) as database:
        for name, dims in sizes.items():
            inputs = unpadded_inputs(reference, seed=seed, dims=axis_sizes(reference, dims))
            report = measure_module(module, reference, inputs, against=peers, runs=runs, warmup=warmup)
            reports[name] = replace(report, conditions={**report.conditions, "shape": name}) if name else report
            if database is not None:
                manifest = module.manifest
                note_benchmark(database, artifact_of(manifest, directory), environment_of(manifest), reports[name])
    if output_format is OutputFormat.JSON:
        if module.manifest.buckets is None:
            print_json(reports[""].to_json())
        else:
            routes = {name: report.to_json() for name, report in reports.items()}
            print_json({"routes": routes, "statistics": module.statistics.to_json()})
        return
    for report in reports.values():
        stdout_console().print(render(report))
    if module.manifest.buckets is not None:
        stdout_console().print(render_statistics(module.statistics))


def run(
    directory: ArtifactArgument,
    inputs: Annotated[Path, typer.Option("--inputs", metavar="X.npz", help="An array for each input, by name.")],
    outputs: Annotated[Path, typer.Option("--outputs", metavar="Y.npz", help="Where to write the outputs.")],
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Run an artifact once on the arrays of a .npz file."""
    from relaxtune.pipeline.artifact.runtime import Module

    module = Module.load(directory)
    results = module.run(_read_arrays(inputs))
    _write_arrays(outputs, results)
    rows = tuple((name, str(array.dtype), "x".join(map(str, array.shape))) for name, array in results.items())
    data = {name: {"dtype": str(array.dtype), "shape": list(array.shape)} for name, array in results.items()}
    emit(output_format, data, TableView(f"written to {outputs}", ("output", "dtype", "shape"), rows))


def register(app: typer.Typer) -> None:
    """Attach the commands to `app`."""
    app.command(name="validate")(validate_command)
    app.command()(compare)
    app.command()(bench)
    app.command()(run)


def _bisect(
    module: Module,
    model: OnnxModel,
    report: ValidationReport,
    directory: Path,
    repro: Path | None,
    database: str | None,
    given: list[dict[str, np.ndarray]] | None,
) -> Bisection | None:
    """Return what makes a validation fail, with a reproduction written; None when it passed or nothing was found.

    A bisection that is not possible is told and changes nothing: the validation has failed all the same.
    """
    from relaxtune.pipeline.bisect import bisect, write_reproduction
    from relaxtune.pipeline.validate.validation import sample_inputs

    if report.passed:
        return None
    compared = given or sample_inputs(model, samples=report.samples, seed=report.seed)
    inputs = compared[report.failed_sample or 0]
    try:
        found = bisect(module, model, inputs, report.tolerance, database=database)
    except PipelineError as e:
        logger.warning("not bisected: %s", e)
        return None
    if found is None:
        logger.warning("not bisected: run again on the input that failed, the module was right")
        return None
    folder = repro or directory.with_name(f"{directory.name}-repro")
    made = write_reproduction(
        found, module.manifest, directory, model, inputs, report.tolerance, folder, database=database
    )
    return replace(found, reproduction=str(made.script))


def _reference_model(module: Module, source: str | None) -> OnnxModel:
    """Return the ONNX model an artifact is compared with, at the artifact's shapes; it must be the one it came from.

    Raises
    ------
    UsageError
        The model's content is not that which the artifact was compiled from.
    """
    from relaxtune.models import load_model

    manifest = module.manifest
    shapes = {spec.name: spec.shape for spec in module.inputs}
    model = load_model(source or manifest.source, shapes=shapes, seed=manifest.seed or 0)
    if model.sha256 != manifest.model_sha256:
        raise UsageError(
            f"{source or manifest.source} is not the model this artifact was compiled from: expected sha256 "
            f"{manifest.model_sha256}, got {model.sha256}. Name that model with --model, or compile this one"
        )
    return model


def _read_arrays(path: Path, expected: str = _INPUTS_FILE) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, zipfile.BadZipFile, AttributeError) as error:
        raise UsageError(f"{path} cannot be read ({error}); expected {expected}") from error


def _write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a .npz file whole or not at all."""
    staged = path.with_name(f".{path.name}.staged")
    try:
        with staged.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # the stub takes every keyword for `allow_pickle`
        staged.replace(path)
    except OSError as error:
        raise PipelineError(f"--outputs {path} cannot be written: {error.strerror or error}") from error
    finally:
        staged.unlink(missing_ok=True)
