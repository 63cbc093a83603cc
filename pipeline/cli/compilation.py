"""`relaxtune tune` and `relaxtune compile`: from a model to an artifact."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from relaxtune.pipeline.cli.groups import option, takes_groups
from relaxtune.pipeline.cli.options import (
    DEFAULT_DATABASE,
    OUTPUT,
    RECORDS,
    SEARCH,
    DatabaseOption,
    FormatOption,
    ModelOptions,
    SharedDatabasesOption,
    optional_database,
)
from relaxtune.pipeline.cli.output import OutputFormat, print_json, print_table, stderr_console, stdout_console
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.printable import short
from relaxtune.pipeline.printed_tables import TableView, first_of
from relaxtune.pipeline.tuning.options import SEARCHED_ROUTES, Effort, TuningOptions, options_for
from relaxtune.tuning_db.records import Mode
from relaxtune.tuning_db.urls import DatabaseUrl

if TYPE_CHECKING:
    from relaxtune.pipeline.artifact.entries import BucketsEntry
    from relaxtune.pipeline.artifact.manifest import Manifest
    from relaxtune.pipeline.choose.rerank import RerankReport
    from relaxtune.pipeline.jobs.values import CompileResult, TuneResult
    from relaxtune.pipeline.prepare import ModelRequest


# Exporters give these names to the files of every model: model_fp16, encoder_model, decoder_with_past_model, ...
_GENERIC_FILE = re.compile(
    r"(model|(text|vision|audio|prompt|mask)?_?(encoder|decoder)|(text|vision|image|audio)_model|unet|vae)([_.-].*)?"
)


class TuningMode(StrEnum):
    """The database modes under which a tuning run can write."""

    TUNE = Mode.TUNE.value
    FORCE = Mode.FORCE.value


@dataclass(frozen=True)
class ArtifactOptions:
    """Where the artifact goes, and how it is validated."""

    out: Path | None = option(None, "Artifact directory. Default: out/MODEL-TARGET.", metavar="DIR", panel=OUTPUT)
    samples: int = option(3, "Random inputs to validate with; 0 skips the validation.", min=0, panel=OUTPUT)
    sign: Path | None = option(
        None, "Sign the artifact with this Ed25519 private key (PEM).", metavar="KEY", panel=OUTPUT
    )

    def directory(self, model: ModelOptions) -> Path:
        """Return the artifact's directory, by default named after the model and the target."""
        return self.out or _default_out(model.model, model.target)


@dataclass(frozen=True)
class SearchOptions:
    """How much is tried and how it is measured; `tuning` is what the tuner takes."""

    effort: Effort = option(
        Effort.NORMAL, "How much to try. --trials or --time-budget replaces its limit of candidates.", panel=SEARCH
    )
    trials: int | None = option(
        None, "Limit of candidates over all tasks. Default: set by --effort, or by --time-budget.", min=1, panel=SEARCH
    )
    time_budget: float | None = option(
        None, "Limit of seconds for the whole command.", min=1.0, metavar="S", panel=SEARCH
    )
    mode: TuningMode = option(TuningMode.TUNE, "force measures recorded candidates again.", rare=True)
    workers: int | None = option(None, "Build processes. Default: the cores.", min=1, rare=True)
    devices: str | None = option(
        None,
        "GPUs to measure on, such as cuda:0,cuda:1. Default: all GPUs of the target's model.",
        metavar="LIST",
        rare=True,
    )
    build_timeout: float = option(30.0, "Seconds to build one candidate.", min=0.0, metavar="S", rare=True)
    run_timeout: float = option(10.0, "Seconds to measure one candidate.", min=0.0, metavar="S", rare=True)
    rerank: int | None = option(
        None,
        "Number of hot kernels whose runners-up are tried inside the model. Default: set by --effort.",
        min=0,
        metavar="N",
        rare=True,
    )
    graph_search: bool | None = option(
        None,
        "Time the whole model with passes left out; keep what is faster. Default: on GPUs.",
        "--graph-search/--no-graph-search",
        rare=True,
    )
    compare_seconds: float | None = option(
        None, "Seconds to compare tuned and untuned. Default: 8, or a sixth of --time-budget.", min=1.0, rare=True
    )

    def tuning(self, request: ModelRequest) -> TuningOptions:
        """Return the tuner's options for a model."""
        level = options_for(self.effort, self.trials, self.time_budget)
        return replace(
            level,
            routes=request.routes & SEARCHED_ROUTES,
            seed=request.seed,
            mode=Mode(self.mode.value),
            workers=self.workers,
            devices=tuple(one.strip() for one in self.devices.split(",")) if self.devices else None,
            build_timeout_s=self.build_timeout,
            run_timeout_s=self.run_timeout,
            rerank=level.rerank if self.rerank is None else self.rerank,
            graph_s=0.0 if self.graph_search is False else level.graph_s,
            graph_on_cpus=level.graph_on_cpus or self.graph_search is True,
        )


@takes_groups(without=("generate", "max_length"))
def tune(
    model: ModelOptions,
    search: SearchOptions,
    artifact: ArtifactOptions,
    db: DatabaseOption = DEFAULT_DATABASE,
    shared_db: SharedDatabasesOption = None,
    record: bool = option(
        True, "Record artifact, validation and latencies in the database.", "--record/--no-record", panel=RECORDS
    ),
    bench: bool = option(
        True, "Time the tuned and the untuned model and ONNX Runtime.", "--bench/--no-bench", panel=OUTPUT
    ),
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Tune a model on the device of this machine, then compile, compare and validate it."""
    from relaxtune.pipeline.jobs.compile_and_tune import tune_model
    from relaxtune.pipeline.jobs.values import TuneRequest
    from relaxtune.pipeline.tuning.progress import ConsoleProgress

    request = model.request()
    wanted = TuneRequest(
        *(db, search.tuning(request), bench, artifact.samples, tuple(shared_db or ()), record),
        sign=artifact.sign,
        compare_s=search.compare_seconds,
    )
    with ConsoleProgress(stderr_console()) as progress:
        result = tune_model(request, wanted, artifact.directory(model), progress=progress.show)
    _print_tuned(result, output_format)
    _raise_if_invalid(result.compiled)


@takes_groups()
def compile_command(
    model: ModelOptions,
    artifact: ArtifactOptions,
    db: Annotated[DatabaseUrl | None, optional_database("Tuning database to read.")] = None,
    shared_db: SharedDatabasesOption = None,
    record: bool = option(
        False, "Record the artifact and its validation in the database.", "--record/--no-record", panel=RECORDS
    ),
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Compile a model without measuring, and validate it.

    Each kernel comes from its best record, else from a template's first proposal, else from a default schedule.
    """
    from relaxtune.pipeline.jobs.compile_and_tune import compile_model

    result = compile_model(
        model.request(),
        artifact.directory(model),
        database=db,
        shared=shared_db or (),
        record=record,
        samples=artifact.samples,
        sign=artifact.sign,
    )
    if output_format is OutputFormat.JSON:
        print_json(_compile_data(result))
    else:
        _print_compiled(result)
        _print_place(result)
    _raise_if_invalid(result)


def _default_out(model: str, target: str) -> Path:
    if target.lstrip().startswith("{"):
        raise UsageError("--target is JSON, which gives no name for the artifact; name its directory with --out DIR")
    return Path("out") / f"{_name_of(Path(model))}-{target.replace(':', '-').replace('/', '-')}"


def _name_of(model: Path) -> str:
    """Return a name for a model's artifact; a file called model.onnx or encoder.onnx has its folder's name in it."""
    if model.suffix != ".onnx":  # a zoo name, a folder or a repository
        return model.absolute().name.removeprefix("hf:")
    if not _GENERIC_FILE.fullmatch(model.stem.lower()):
        return model.stem
    folders = [folder.name for folder in model.absolute().parents if folder.name not in ("", "onnx")]
    names = [*folders[:1], model.stem]
    return folders[0] if folders and model.stem.lower() == "model" else "-".join(names)


def _print_tuned(result: TuneResult, output_format: OutputFormat) -> None:
    from relaxtune.pipeline.bench.tables import render as render_benchmark, render_sizes
    from relaxtune.pipeline.tuning.result_table import headline, summary_table, to_data

    if output_format is OutputFormat.JSON:
        benchmark = result.shipping.report.to_json() if result.shipping else None
        shipping = result.shipping.to_json() if result.shipping else None
        buckets = {name: one.to_json() for name, one in result.bucket_shipping.items()}
        tuned = {"job": result.job_id, "tuning": to_data(result.summary)}
        reranked = result.rerank.to_json() if result.rerank else None
        graph = result.graph.to_json() if result.graph else None
        made = {**tuned, **_compile_data(result.compiled)}
        found = {"benchmark": benchmark, "shipping": shipping, "bucket_shipping": buckets}
        print_json({**made, **found, "rerank": reranked, "graph": graph})
        return
    stdout_console().print(summary_table(result.summary) if result.summary.tasks else headline(result.summary))
    if result.graph is not None and result.graph.trials:
        columns = {
            "decision": lambda trial: trial.decision,
            "model ms": lambda trial: "-" if trial.model_ms is None else f"{trial.model_ms:.4f}",
            "without ms": lambda trial: "-" if trial.baseline_ms is None else f"{trial.baseline_ms:.4f}",
            "found": lambda trial: trial.reason,
            "record": lambda trial: trial.record_id,
        }
        title = f"decisions about the graph, {result.graph.seconds:.0f} s"
        print_table(TableView.of(title, result.graph.trials, columns))
    if result.rerank is not None:
        _print_reranked(result.rerank)
    _print_compiled(result.compiled)
    if result.shipping is not None:
        report = result.shipping.report
        stdout_console().print(render_benchmark(report))
        if len(report.sizes) > 1:
            stdout_console().print(render_sizes(report))
        stdout_console().print(result.shipping.verdict)
    for name, one in result.bucket_shipping.items():
        stdout_console().print(f"bucket {name}: {one.verdict}")
    _print_place(result.compiled)


def _print_place(result: CompileResult) -> None:
    directory = result.directory
    following = f"relaxtune report {directory}; relaxtune bench {directory}"
    if result.manifest.generation is not None:
        following = f"relaxtune generate {directory} --prompt ..., or --ids ..."
    stdout_console().print(f"artifact: {directory}\nnext: {following}")


def _print_reranked(report: RerankReport) -> None:
    columns = {
        "task": lambda trial: short(trial.task),
        "route": lambda trial: trial.route.value,
        "record": lambda trial: trial.record_id,
        "alone us": lambda trial: f"{trial.alone_us:.1f}",
        "model ms": lambda trial: f"{trial.model_ms:.4f}",
        "as tuned ms": lambda trial: f"{trial.baseline_ms:.4f}",
        "gain": lambda trial: f"{trial.gain:.2%}",
        "at least": lambda trial: f"{trial.least_gain:.2%}",
        "": lambda trial: "taken" if trial.taken else None,
    }
    gained = f", together {report.gain:.2%}" if report.gain else ""
    title = f"runners-up inside the model, {report.runs} runs of each{gained}"
    print_table(TableView.of(title, report.trials, columns))


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

    columns = {
        "kernel": lambda kernel: short(kernel.function),
        "calls": lambda kernel: kernel.calls,
        "ONNX nodes": lambda kernel: first_of(kernel.onnx_nodes),
        "route": lambda kernel: kernel.route,
        "us alone": lambda kernel: None if kernel.latency_us is None else f"{kernel.latency_us:.1f}",
        "record": lambda kernel: " of ".join(str(one) for one in (kernel.record_id, kernel.database) if one),
    }
    kernels = result.manifest.kernels
    notes = {kernel.note for kernel in kernels}
    if len(notes) > 1:
        columns["note"] = lambda kernel: kernel.note
    caption = notes.pop() if len(notes) == 1 else ""
    title = f"kernels of {result.directory}"
    print_table(TableView.of(title, kernels, columns, caption, optional=("ONNX nodes",)))
    stdout_console().print(_footprint(result.manifest))
    if result.manifest.buckets is not None:
        generates = result.manifest.generation is not None
        print_table(_bucket_table(result.manifest.buckets, "steps of one token" if generates else ""))
    if result.validation is not None:
        stdout_console().print(render_validation(result.validation))


def _footprint(manifest: Manifest) -> str:
    """Return a line about what one inference takes: calls of kernels, launches on a GPU, memory."""
    parts = [f"{sum(kernel.calls for kernel in manifest.kernels)} kernel calls"]
    if manifest.launches is not None:
        parts.append(f"{manifest.launches} launches")
    if manifest.memory is not None:
        planned = manifest.memory.planned_bytes
        parts.append("memory depends on shapes" if planned is None else f"{planned / 1e6:,.2f} MB of planned memory")
        kept = manifest.memory
        weights = f"{kept.weights_bytes / 1e6:,.2f} MB of weights"
        if kept.weights_dtypes:
            weights += f" as {' and '.join(kept.weights_dtypes)}"
        parts.append(
            weights if kept.model_bytes is None else f"{weights} ({kept.model_bytes / 1e6:,.2f} MB in the model)"
        )
    return ", ".join(parts)


def _bucket_table(buckets: BucketsEntry, title: str) -> TableView:
    """Return the buckets; without a title, it says along which axes smaller calls are padded."""
    rows = []
    for entry in buckets.entries:
        routes = sorted(Counter(kernel.route for kernel in entry.kernels).items())
        calls = str(sum(kernel.calls for kernel in entry.kernels))
        rows.append((entry.bucket.name, calls, ", ".join(f"{route} {count}" for route, count in routes)))
    padding = "; ".join(
        f"{one.axis} is padded on the {one.side.value}, tried with {one.cases} calls"
        if one.side is not None
        else f"{one.axis} is not padded: {one.reason}"
        for one in buckets.padding
    )
    title = title or f"shape buckets; {padding or 'nothing is padded, since it was not tried on this machine'}"
    return TableView(title, ("bucket", "kernels", "routes"), tuple(rows))


def _raise_if_invalid(result: CompileResult) -> None:
    if result.validation is not None:
        result.validation.raise_if_failed()
