"""`relaxtune validate`, `bench` and `run`: what can be done with an artifact."""

from __future__ import annotations

import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from pipeline.cli.options import ArtifactArgument, FormatOption, OutcomeDatabaseOption, SeedOption
from pipeline.cli.output import OutputFormat, TableView, emit, print_json, stdout_console
from pipeline.errors import PipelineError, UsageError

if TYPE_CHECKING:
    from models import OnnxModel
    from pipeline.runtime import Module

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
    from pipeline.artifact import record_validation
    from pipeline.drift import DriftOptions, render_drift
    from pipeline.outcomes import artifact_of, environment_of, note_validation
    from pipeline.runtime import Module
    from pipeline.validate import render, validate
    from tuning_db.store import TuningDatabase

    module = Module.load(directory)
    reference = _reference_model(module, model)
    # Opened first: a database that cannot be had is told before the work.
    with nullcontext() if db is None else TuningDatabase.open(db) as database:
        wanted = DriftOptions(tuple(logits or ()), tokens)
        report = validate(module, reference, rtol=rtol, atol=atol, samples=samples, seed=seed, drift=wanted)
        record_validation(directory, report.to_json())
        if database is not None:
            manifest = module.manifest
            note_validation(database, artifact_of(manifest, directory), environment_of(manifest), report)
    if output_format is OutputFormat.JSON:
        print_json(report.to_json())
    else:
        stdout_console().print(render(report))
        if report.drift is not None:
            stdout_console().print(render_drift(report.drift))
    report.raise_if_failed()


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
    """Measure the latency of an artifact, side by side with peers, taking turns."""
    from models.inputs import random_inputs
    from pipeline.measure import measure_module, render
    from pipeline.outcomes import artifact_of, environment_of, note_benchmark
    from pipeline.runtime import Module
    from pipeline.validate import default_dims
    from tuning_db.store import TuningDatabase

    module = Module.load(directory)
    reference = _reference_model(module, model)
    inputs = random_inputs(reference, seed=seed, dims=default_dims(reference))
    peers = frozenset(name.strip() for name in against.split(",") if name.strip())
    with nullcontext() if db is None else TuningDatabase.open(db) as database:
        report = measure_module(module, reference, inputs, against=peers, runs=runs, warmup=warmup)
        if database is not None:
            manifest = module.manifest
            note_benchmark(database, artifact_of(manifest, directory), environment_of(manifest), report)
    if output_format is OutputFormat.JSON:
        print_json(report.to_json())
    else:
        stdout_console().print(render(report))


def run(
    directory: ArtifactArgument,
    inputs: Annotated[Path, typer.Option("--inputs", metavar="X.npz", help="An array for each input, by name.")],
    outputs: Annotated[Path, typer.Option("--outputs", metavar="Y.npz", help="Where to write the outputs.")],
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Run an artifact once on the arrays of a .npz file."""
    from pipeline.runtime import Module

    module = Module.load(directory)
    results = module.run(_read_arrays(inputs))
    _write_arrays(outputs, results)
    rows = tuple((name, str(array.dtype), "x".join(map(str, array.shape))) for name, array in results.items())
    data = {name: {"dtype": str(array.dtype), "shape": list(array.shape)} for name, array in results.items()}
    emit(output_format, data, TableView(f"written to {outputs}", ("output", "dtype", "shape"), rows))


def register(app: typer.Typer) -> None:
    """Attach the commands to `app`."""
    app.command(name="validate")(validate_command)
    app.command()(bench)
    app.command()(run)


def _reference_model(module: Module, source: str | None) -> OnnxModel:
    """Return the ONNX model an artifact is compared with, at the artifact's shapes; it must be the one it came from.

    Raises
    ------
    UsageError
        The model's content is not that which the artifact was compiled from.
    """
    from models import load_model

    manifest = module.manifest
    shapes = {spec.name: spec.shape for spec in module.inputs}
    model = load_model(source or manifest.source, shapes=shapes, seed=manifest.seed or 0)
    if model.sha256 != manifest.model_sha256:
        raise UsageError(
            f"{source or manifest.source} is not the model this artifact was compiled from: expected sha256 "
            f"{manifest.model_sha256}, got {model.sha256}. Name that model with --model, or compile this one"
        )
    return model


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, zipfile.BadZipFile, AttributeError) as error:
        raise UsageError(
            f"--inputs {path} cannot be read ({error}); expected a .npz file with one array for each input, "
            "as numpy.savez(path, input_ids=..., ...) writes"
        ) from error


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
