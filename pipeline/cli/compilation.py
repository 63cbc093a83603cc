"""`relaxtune tune` and `relaxtune compile`: from a model to an artifact."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relaxtune.pipeline.cli.options import (
    DEFAULT_DATABASE,
    BucketOption,
    DatabaseOption,
    DisablePassOption,
    DumpIrOption,
    EmbedWeightsOption,
    FormatOption,
    GroupSizeOption,
    ModelArgument,
    PrecisionOption,
    RoutesOption,
    SeedOption,
    ShapeOption,
    SharedDatabasesOption,
    TargetOption,
    parse_buckets,
    parse_routes,
    parse_shapes,
)
from relaxtune.pipeline.cli.output import (
    OutputFormat,
    TableView,
    print_json,
    print_table,
    stderr_console,
    stdout_console,
)
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.tuning.options import SEARCHED_ROUTES, Effort, options_for
from relaxtune.tuning_db.records import Mode

if TYPE_CHECKING:
    from relaxtune.pipeline.artifact.entries import BucketsEntry, KernelEntry
    from relaxtune.pipeline.artifact.manifest import Manifest
    from relaxtune.pipeline.choose.norm_forms import NormFormsReport
    from relaxtune.pipeline.choose.rerank import RerankReport
    from relaxtune.pipeline.jobs import CompileResult, TuneResult
    from relaxtune.pipeline.passes.module import LoweringOptions
    from relaxtune.pipeline.prepare import ModelRequest


class TuningMode(StrEnum):
    """The database modes under which a tuning run can write."""

    TUNE = Mode.TUNE.value
    FORCE = Mode.FORCE.value


OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Artifact directory. Default: out/MODEL-TARGET.")
]
SamplesOption = Annotated[
    int, typer.Option("--samples", min=0, help="Random inputs to validate with; 0 leaves the validation out.")
]


def tune(
    model: ModelArgument,
    target: TargetOption = "auto",
    db: DatabaseOption = DEFAULT_DATABASE,
    effort: Annotated[
        Effort, typer.Option("--effort", help="How much to try; --trials and --time-budget override its limits.")
    ] = Effort.NORMAL,
    trials: Annotated[
        int | None,
        typer.Option("--trials", min=1, help="Candidates over all tasks. Default: the effort's, or the time budget."),
    ] = None,
    time_budget: Annotated[
        float | None, typer.Option("--time-budget", min=1.0, metavar="S", help="Seconds of tuning.")
    ] = None,
    precision: PrecisionOption = None,
    group_size: GroupSizeOption = None,
    shape: ShapeOption = None,
    bucket: BucketOption = None,
    out: OutOption = None,
    seed: SeedOption = 0,
    mode: Annotated[
        TuningMode, typer.Option("--mode", help="force measures again what the database already knows.")
    ] = TuningMode.TUNE,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Build processes. Default: the cores.")
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            metavar="LIST",
            help="GPUs to measure on side by side, such as cuda:0,cuda:1. Default: all of the target's model.",
        ),
    ] = None,
    build_timeout: Annotated[
        float, typer.Option("--build-timeout", min=0.0, metavar="S", help="Seconds to build one candidate.")
    ] = 30.0,
    run_timeout: Annotated[
        float, typer.Option("--run-timeout", min=0.0, metavar="S", help="Seconds to measure one candidate.")
    ] = 10.0,
    rerank: Annotated[
        int | None,
        typer.Option("--rerank", min=0, metavar="N", help="Hot kernels tried inside the model. Default: the effort's."),
    ] = None,
    norm_forms: Annotated[
        bool | None,
        typer.Option(
            "--norm-forms/--no-norm-forms",
            help="Try norms inside the matmuls and apart, in the whole model. Default: the effort's.",
        ),
    ] = None,
    shared_db: SharedDatabasesOption = None,
    record: Annotated[
        bool, typer.Option("--record/--no-record", help="Note artifact, validation and latencies in the database too.")
    ] = True,
    bench: Annotated[bool, typer.Option("--bench/--no-bench", help="Time tuned, untuned and ONNX Runtime.")] = True,
    samples: SamplesOption = 3,
    disable_pass: DisablePassOption = None,
    dump_ir: DumpIrOption = None,
    embed_weights: EmbedWeightsOption = False,
    routes: RoutesOption = None,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Import, tune, compile, validate and export a model: the main job."""
    from relaxtune.pipeline.jobs import TuneRequest, tune_model
    from relaxtune.pipeline.tuning.progress import ConsoleProgress

    lowering = _lowering_options(precision, group_size, disable_pass, dump_ir, embed_weights)
    request = _model_request(model, shape, bucket, target, lowering, seed, routes)
    level = options_for(effort, trials, time_budget)
    options = replace(
        level,
        routes=request.routes & SEARCHED_ROUTES,
        seed=seed,
        mode=Mode(mode.value),
        workers=workers,
        devices=tuple(one.strip() for one in devices.split(",")) if devices else None,
        build_timeout_s=build_timeout,
        run_timeout_s=run_timeout,
        rerank=level.rerank if rerank is None else rerank,
        norm_forms=level.norm_forms if norm_forms is None else norm_forms,
    )
    destination = out or _default_out(model, target)
    with ConsoleProgress(stderr_console()) as progress:
        result = tune_model(
            request,
            TuneRequest(db, options, bench, samples, tuple(shared_db or ()), record),
            destination,
            progress=progress,
        )
    _print_tuned(result, output_format)
    _raise_if_invalid(result.compiled)


def compile_command(
    model: ModelArgument,
    target: TargetOption = "auto",
    db: Annotated[
        str | None, typer.Option("--db", metavar="URL", help="Tuning database to read. Default: none.")
    ] = None,
    shared_db: SharedDatabasesOption = None,
    record: Annotated[
        bool, typer.Option("--record/--no-record", help="Note the artifact and its validation in the database.")
    ] = False,
    precision: PrecisionOption = None,
    group_size: GroupSizeOption = None,
    shape: ShapeOption = None,
    bucket: BucketOption = None,
    out: OutOption = None,
    seed: SeedOption = 0,
    samples: SamplesOption = 3,
    disable_pass: DisablePassOption = None,
    dump_ir: DumpIrOption = None,
    embed_weights: EmbedWeightsOption = False,
    routes: RoutesOption = None,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Compile a model from records, without measuring; tasks without one take a template's default or the fallback."""
    from relaxtune.pipeline.jobs import compile_model

    lowering = _lowering_options(precision, group_size, disable_pass, dump_ir, embed_weights)
    request = _model_request(model, shape, bucket, target, lowering, seed, routes)
    result = compile_model(
        request,
        out or _default_out(model, target),
        database=db,
        shared=shared_db or (),
        record=record,
        samples=samples,
    )
    if output_format is OutputFormat.JSON:
        print_json(_compile_data(result))
    else:
        _print_compiled(result)
    _raise_if_invalid(result)


def register(app: typer.Typer) -> None:
    """Attach the commands to `app`."""
    app.command()(tune)
    app.command(name="compile")(compile_command)


def _lowering_options(
    precision: str | None,
    group_size: int | None,
    disable_pass: list[str] | None,
    dump_ir: Path | None,
    embed_weights: bool,
) -> LoweringOptions:
    from relaxtune.pipeline.passes.module import LoweringOptions

    return LoweringOptions(
        precision=precision,
        group_size=group_size,
        disabled_passes=frozenset(disable_pass or ()),
        dump_dir=dump_ir,
        embed_weights=embed_weights,
    )


def _model_request(
    model: str,
    shape: list[str] | None,
    bucket: list[str] | None,
    target: str,
    lowering: LoweringOptions,
    seed: int,
    routes: str | None,
) -> ModelRequest:
    from relaxtune.pipeline.prepare import ModelRequest

    return ModelRequest(
        source=model,
        shapes=parse_shapes(shape),
        target=target,
        lowering=lowering,
        seed=seed,
        routes=parse_routes(routes),
        buckets=parse_buckets(bucket),
    )


def _default_out(model: str, target: str) -> Path:
    if target.lstrip().startswith("{"):
        raise UsageError("--target is JSON, which gives no name for the artifact; name its directory with --out DIR")
    return Path("out") / f"{Path(model).stem}-{target.replace(':', '-').replace('/', '-')}"


def _print_tuned(result: TuneResult, output_format: OutputFormat) -> None:
    from relaxtune.pipeline.bench.measure import render as render_benchmark
    from relaxtune.pipeline.tuning.result_table import summary_table, to_data

    if output_format is OutputFormat.JSON:
        benchmark = result.shipping.report.to_json() if result.shipping else None
        shipping = result.shipping.to_json() if result.shipping else None
        tuned = {"job": result.job_id, "tuning": to_data(result.summary)}
        reranked = result.rerank.to_json() if result.rerank else None
        forms = result.norm_forms.to_json() if result.norm_forms else None
        made = {**tuned, **_compile_data(result.compiled)}
        print_json({**made, "benchmark": benchmark, "shipping": shipping, "rerank": reranked, "norm_forms": forms})
        return
    stdout_console().print(summary_table(result.summary))
    if result.norm_forms is not None:
        _print_norm_forms(result.norm_forms)
    if result.rerank is not None:
        _print_reranked(result.rerank)
    _print_compiled(result.compiled)
    if result.shipping is not None:
        stdout_console().print(render_benchmark(result.shipping.report))
        stdout_console().print(result.shipping.verdict, markup=False)
    directory = result.compiled.directory
    stdout_console().print(
        f"artifact: {directory}\nnext: relaxtune report {directory}; relaxtune bench {directory}", markup=False
    )


def _print_norm_forms(report: NormFormsReport) -> None:
    rows = tuple(
        (trial.form, str(trial.launches), f"{trial.model_ms:.4f}", "taken" if trial.taken else "")
        for trial in report.trials
    )
    columns = ("form", "kernels", "model ms", "")
    print_table(TableView(f"where norms are done, noise {report.noise:.1%}", columns, rows))


def _print_reranked(report: RerankReport) -> None:
    rows = tuple(
        (
            trial.task,
            trial.route.value,
            "" if trial.record_id is None else str(trial.record_id),
            f"{trial.alone_us:.1f}",
            f"{trial.model_ms:.4f}",
            f"{trial.baseline_ms:.4f}",
            f"{trial.gain:.2%}",
            f"{trial.least_gain:.2%}",
            "taken" if trial.taken else "",
        )
        for trial in report.trials
    )
    columns = ("task", "route", "record", "alone us", "model ms", "as tuned ms", "gain", "at least", "")
    gained = f", together {report.gain:.2%}" if report.gain else ""
    title = f"runners-up inside the model, {report.turns} turns, noise {report.noise:.1%}{gained}"
    print_table(TableView(title, columns, rows))


def _compile_data(result: CompileResult) -> dict[str, object]:
    return {
        "artifact": str(result.directory),
        "model": result.manifest.model,
        "target": asdict(result.manifest.target),
        "kernels": [asdict(kernel) for kernel in result.manifest.kernels],
        "launches": result.manifest.launches,
        "memory": asdict(result.manifest.memory) if result.manifest.memory else None,
        "without_record": list(result.without_record),
        "compile_seconds": dict(result.manifest.compile_seconds),
        "buckets": asdict(result.manifest.buckets) if result.manifest.buckets else None,
        "validation": result.validation.to_json() if result.validation else None,
    }


def _print_compiled(result: CompileResult) -> None:
    from relaxtune.pipeline.validate.report import render as render_validation

    rows = tuple(
        (
            kernel.function,
            str(kernel.calls),
            _shorten(kernel.onnx_nodes),
            kernel.route,
            "" if kernel.latency_us is None else f"{kernel.latency_us:.1f}",
            _record_place(kernel),
            kernel.note,
        )
        for kernel in result.manifest.kernels
    )
    columns = ("kernel", "calls", "ONNX nodes", "route", "us", "record", "note")
    print_table(TableView(f"kernels of {result.directory}", columns, rows))
    stdout_console().print(_footprint(result.manifest))
    if result.manifest.buckets is not None:
        print_table(_bucket_table(result.manifest.buckets))
    if result.validation is not None:
        stdout_console().print(render_validation(result.validation))


def _footprint(manifest: Manifest) -> str:
    """Return a line about what one inference takes: calls of kernels, launches on a GPU, memory."""
    parts = [f"{sum(kernel.calls for kernel in manifest.kernels)} kernels"]
    if manifest.launches is not None:
        parts.append(f"{manifest.launches} launches")
    if manifest.memory is not None:
        planned = manifest.memory.planned_bytes
        parts.append("memory depends on shapes" if planned is None else f"{planned / 1e6:,.2f} MB of planned memory")
        parts.append(f"{manifest.memory.weights_bytes / 1e6:,.2f} MB of weights")
    return ", ".join(parts)


def _bucket_table(buckets: BucketsEntry) -> TableView:
    """Return the buckets, and under them along which axes smaller calls are padded."""
    rows = tuple(
        (entry.bucket.name, str(sum(kernel.calls for kernel in entry.kernels)), _routes(entry.kernels))
        for entry in buckets.entries
    )
    padding = "; ".join(
        f"{one.axis} is padded on the {one.side.value}, as {one.cases} cases showed"
        if one.side is not None
        else f"{one.axis} is not padded: {one.reason}"
        for one in buckets.padding
    )
    title = f"shape buckets; {padding or 'nothing is padded, since it was not proved on this machine'}"
    return TableView(title, ("bucket", "kernels", "routes"), rows)


def _routes(kernels: tuple[KernelEntry, ...]) -> str:
    counts = Counter(kernel.route for kernel in kernels)
    return ", ".join(f"{route} {count}" for route, count in sorted(counts.items()))


def _record_place(kernel: KernelEntry) -> str:
    """Return the record's id, with its database where there were several."""
    if kernel.record_id is None:
        return ""
    return str(kernel.record_id) + (f" of {kernel.database}" if kernel.database is not None else "")


def _shorten(nodes: tuple[str, ...]) -> str:
    return nodes[0] + (f" and {len(nodes) - 1} more" if len(nodes) > 1 else "") if nodes else ""


def _raise_if_invalid(result: CompileResult) -> None:
    if result.validation is not None:
        result.validation.raise_if_failed()
