"""`relaxtune bench`: the latency of an artifact beside other libraries, over sizes, of tokens, and under load."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from relaxtune.pipeline.cli.groups import option, takes_groups
from relaxtune.pipeline.cli.options import (
    DEFAULT_DATABASE,
    ArtifactArgument,
    DimOption,
    FormatOption,
    LengthsOption,
    OutcomeDatabaseOption,
    ReferenceOption,
    SeedOption,
    VerifyKeyOption,
    parse_dims,
    parse_sizes,
    require_signed,
)
from relaxtune.pipeline.cli.output import OutputFormat, emit, print_json, print_table, stdout_console, write_text
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.printed_tables import TableView

if TYPE_CHECKING:
    from relaxtune.pipeline.bench.generation import GenerationRequest
    from relaxtune.pipeline.bench.lengths import LengthsReport
    from relaxtune.pipeline.bench.open_loop import OpenLoad
    from relaxtune.pipeline.bench.request import BenchRequest


@dataclass(frozen=True)
class BenchOptions:
    """The peers of a benchmark, how long it takes, and how many callers there are."""

    against: str = option("ort", "Peers: ort, ort-cuda, torch, torch-compile; '' for none.", metavar="PEER,..")
    runs: int = option(50, "Timed runs of each arm.", min=1)
    warmup: int = option(10, "Untimed runs of each arm before the timed ones.", min=0)
    duration: float | None = option(None, "Seconds for each arm, in place of --runs.", metavar="SECONDS")
    streams: int = option(1, "Callers at once: throughput, and latencies under load.", min=1)
    dim: DimOption = None
    torch: str | None = option(
        None, "Function that returns the torch.nn.Module, for torch and torch-compile.", metavar="MODULE:FACTORY"
    )
    peer_python: Path | None = option(None, "Interpreter of the peers' processes. Default: this one.", metavar="PYTHON")
    seed: SeedOption = 0

    def request(self) -> BenchRequest:
        """Return the request that these options are."""
        from relaxtune.pipeline.bench.request import BenchRequest

        return BenchRequest(
            against=tuple(name.strip() for name in self.against.split(",") if name.strip()),
            runs=self.runs,
            warmup=self.warmup,
            duration_s=self.duration,
            streams=self.streams,
            torch_module=self.torch,
            python=self.peer_python,
            dims=parse_dims(self.dim),
            seed=self.seed,
        )


@dataclass(frozen=True)
class GenerationBenchOptions:
    """Options of `bench` for an artifact that generates."""

    generate: bool = option(False, "Measure tokens of an artifact that generates.", "--generate")
    prompt: str = option("128", "With --generate: tokens of a prompt.", metavar="N,..")
    new: int = option(128, "With --generate: tokens that follow.", min=2, metavar="N")
    batch: str = option("1", "With --generate: sequences at once.", metavar="N,..")
    price: float | None = option(None, "Price of an hour, for the cost of a million calls or tokens.", min=0.0)

    def request(self, others: BenchOptions) -> GenerationRequest:
        """Return the request that these options are."""
        from relaxtune.pipeline.bench.generation import GenerationRequest

        return GenerationRequest(
            tuple(parse_sizes(self.prompt, "--prompt")),
            self.new,
            tuple(parse_sizes(self.batch, "--batch")),
            self.price,
            others.request(),
        )


@dataclass(frozen=True)
class LoadOptions:
    """Calls that arrive at times of their own."""

    rate: float | None = option(None, "Send R calls a second to the artifact, for --duration (10 s).", metavar="R")
    arrivals: str = option("poisson", "Spread of arrivals: poisson, or bursty (eight at once).", metavar="SPREAD")
    slo_ms: float | None = option(None, "Goodput counts calls that end within this time.", metavar="X")

    def load(self, seconds: float | None, price: float | None) -> OpenLoad | None:
        """Return the planned load; None without a rate."""
        from relaxtune.pipeline.bench.open_loop import DEFAULT_SECONDS, Arrivals, OpenLoad

        if self.rate is None:
            if self.slo_ms is not None or self.arrivals != Arrivals.POISSON.value:
                raise UsageError("--arrivals and --slo-ms go with --rate; give --rate R in calls a second")
            return None
        if self.arrivals not in list(Arrivals):
            raise UsageError(f"--arrivals {self.arrivals}: expected {' or '.join(Arrivals)}")
        duration = DEFAULT_SECONDS if seconds is None else seconds
        return OpenLoad(self.rate, Arrivals(self.arrivals), self.slo_ms, duration, price)


@takes_groups()
def bench(
    directory: ArtifactArgument,
    options: BenchOptions,
    tokens: GenerationBenchOptions,
    load_options: LoadOptions,
    model: ReferenceOption = None,
    db: OutcomeDatabaseOption = None,
    lengths: LengthsOption = None,
    batch_sweep: str | None = option(None, "Sizes of the batch, the inputs' first axis.", metavar="1,2,4,8"),
    beside: list[Path] | None = option(
        None, "Another artifact of the model, at these sizes (repeatable).", metavar="DIR"
    ),
    plot: Path | None = option(None, "Where to draw latency and throughput over sizes.", metavar="FILE.svg"),
    verify_key: VerifyKeyOption = None,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Compare an artifact's latency with other libraries, by turns; each shape bucket has its own table.

    Each peer runs in its own process and is timed only if its outputs are right. Inputs are random, without padding.
    --lengths measures at the sizes of real calls, --batch-sweep at sizes of the batch. Peers that are not installed are
    skipped. Exits 1 if a peer cannot run the model, 3 if its outputs are wrong.

    --generate measures the time to the first token and for each later one; with --torch, of a transformers model too.

    --rate sends calls to the artifact alone, at planned times, whether earlier calls have ended or not.
    """
    from relaxtune.pipeline.bench.open_loop import render_load
    from relaxtune.pipeline.bench.tables import cost_of_a_million, render
    from relaxtune.pipeline.jobs.artifacts import bench_artifact, bench_batches, bench_lengths, bench_open_loop

    require_signed(verify_key, directory, *(beside or ()))
    if tokens.generate:
        from relaxtune.pipeline.bench.generation import bench_generation
        from relaxtune.pipeline.report.ceilings import measure_bandwidth

        generated = bench_generation(directory, tokens.request(options), measure_bandwidth)
        emit(output_format, asdict(generated), *generated.tables())
        return
    request = options.request()
    load = load_options.load(options.duration, tokens.price)
    if load is not None:
        if lengths is not None or batch_sweep is not None or db not in (None, DEFAULT_DATABASE):
            raise UsageError("--rate takes sizes from --dim and is not noted; leave --lengths, --batch-sweep, --db out")
        measured_load = bench_open_loop(directory, load, model, request)
        emit(output_format, measured_load.to_json(), render_load(measured_load))
        return
    if lengths is None and batch_sweep is None:
        if beside or plot is not None:
            raise UsageError("--beside and --plot go with --lengths FILE or --batch-sweep; give one of them too")
        module, reports = bench_artifact(directory, model, request, database=db)
        bucketed = module.manifest.buckets is not None
        if output_format is OutputFormat.JSON:
            routes = {name: report.to_json() for name, report in reports.items()}
            print_json(
                {"routes": routes, "statistics": module.statistics.to_json()}
                if bucketed
                else next(iter(routes.values()))
            )
        else:
            for report in reports.values():
                stdout_console().print(render(report))
                cost = cost_of_a_million(tokens.price, report.arms[0].calls_per_s)
                if cost is not None:
                    stdout_console().print(f"a million calls of {report.arms[0].name}, one after another: {cost:.4g}")
            if bucketed:
                calls = module.statistics
                rows = tuple((one.name, str(one.exact), str(one.padded)) for one in calls.buckets)
                print_table(TableView("calls by bucket", ("bucket", "exact", "padded"), rows))
                stdout_console().print(
                    f"{calls.slow_path} calls on the slow path (symbolic shapes); {calls.padding_waste:.1%} of the "
                    "work of buckets was padding"
                )
        for report in reports.values():
            report.raise_if_failed()
        return
    if lengths is not None and batch_sweep is not None:
        raise UsageError("--lengths and --batch-sweep both say the sizes; give one of them")
    if db not in (None, DEFAULT_DATABASE):
        raise UsageError("latencies over sizes are not noted in a database; leave --db out, --format json prints all")
    directories = [directory, *(beside or ())]
    if lengths is not None:
        measured = bench_lengths(directories, lengths, model, request)
    else:
        measured = bench_batches(directories, parse_sizes(batch_sweep or "", "--batch-sweep"), model, request)
    _show_points(measured, directory, plot, output_format, rows=batch_sweep is not None)
    for _, report in measured.points:
        report.raise_if_failed()


def _show_points(
    report: LengthsReport, directory: Path, plot: Path | None, output_format: OutputFormat, *, rows: bool
) -> None:
    """Show latencies over sizes; `rows`: of the batch, where what matters is rows a second, not the mean over calls."""
    from relaxtune.pipeline.bench.lengths import lengths_chart, median_ms, rows_per_s

    counted = () if rows else ("calls",)
    columns = ("sizes", *counted, *report.arms, *(f"{arm}, rows/s" for arm in report.arms if rows))
    lines = []
    for point, one in report.points:
        speeds = [rows_per_s(point, one, arm) for arm in report.arms if rows]
        counts = () if rows else (str(point.count),)
        medians = (_ms(median_ms(one, arm)) for arm in report.arms)
        lines.append((str(point), *counts, *medians, *("" if speed is None else f"{speed:.1f}" for speed in speeds)))
    if not rows:
        lines.append(("mean over calls", "", *(_ms(report.mean_ms(arm)) for arm in report.arms)))
    conditions = ", ".join(f"{name} {value}" for name, value in report.points[0][1].conditions.items())
    emit(output_format, report.to_json(), TableView(f"median latency in ms; {conditions}", columns, tuple(lines)))
    if plot is not None:
        write_text(plot, lengths_chart(report, f"{directory.name}: median latency of a call", rows=rows), "--plot")


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
