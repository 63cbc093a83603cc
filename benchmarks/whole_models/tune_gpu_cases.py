"""Make the artifacts that `bench_gpu` times: every case tuned into one database, each within its seconds.

    python -m benchmarks.whole_models.tune_gpu_cases [--cases bert-base,...] [--seconds 60] [--db out/gpu/tuning.db]
                                        [--artifacts out/gpu] [--target cuda] [--tune-layers 2] [--tune-only]
                                        [--rerank N] [--jobs N]
    python -m benchmarks.whole_models.tune_gpu_cases --compile-only --target cuda:sm_90a  # from records, no GPU needed

A case that fails is told and the others go on. Measured kernels are kept in the database, so that a second run takes
up where the first stopped. With `--jobs N`, so many cases at a time are imported and compiled, each in a process of its
own, and one of them is tuned: whose import is ready first goes first.

With `--tune-layers N`, what is tuned is the model with N layers: same widths, vocabulary and shapes, hence the same
tasks, weighed by how often each runs in the whole model (`benchmarks.gpu_arms.short_models`). The whole model is
compiled from these records afterwards, unless `--tune-only` leaves that to a run with `--compile-only`: to import and
compile the sixteen layers of Llama-1B takes longer than to tune its kernels. With `--rerank N`, runners-up of the N
hottest kernels are tried inside the whole model before that, as `relaxtune tune --rerank` does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from benchmarks.gpu_arms.artifact_facts import describe
from benchmarks.gpu_arms.cases import Case, find_cases
from benchmarks.gpu_arms.short_models import prepare_short
from benchmarks.whole_models.bench_gpu import DEFAULT_ARTIFACTS
from relaxtune.pipeline.choose.model_records import measured_model
from relaxtune.pipeline.choose.record_lookup import still_true_in
from relaxtune.pipeline.choose.rerank import RerankReport
from relaxtune.pipeline.cli.app import expected_errors
from relaxtune.pipeline.cli.output import stdout_console
from relaxtune.pipeline.environment import target_key
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.jobs.compile_and_tune import compile_model, tune_model
from relaxtune.pipeline.jobs.tuned_model import rerank_prepared, select_as_measured
from relaxtune.pipeline.jobs.values import CompileResult, TuneRequest
from relaxtune.pipeline.prepare import ModelRequest, prepare_model
from relaxtune.pipeline.tuning.measure.device_lock import DeviceLock
from relaxtune.pipeline.tuning.options import TuningOptions, TuningSummary
from relaxtune.pipeline.tuning.session import tune
from relaxtune.tuning_db.store import TuningDatabase


def main() -> None:
    """Tune or compile every case and print what became of it; exits 1 when one failed."""
    arguments = _parse()
    cases = find_cases(arguments.cases)
    if arguments.jobs > 1 and len(cases) > 1:
        sys.exit(_in_processes(cases, arguments))
    console = stdout_console()
    failed = 0
    for case in cases:
        started = time.monotonic()
        try:
            summary = tune_case(case, arguments) if _tunes_apart(arguments) else None
            if summary is not None:
                console.print(f"{case.name}: {_told(summary)}", markup=False, soft_wrap=True)
            if arguments.tune_only:
                continue
            if arguments.rerank and _tunes_apart(arguments):
                console.print(
                    f"{case.name}: {_told_rerank(rerank_case(case, arguments))}", markup=False, soft_wrap=True
                )
            compiled = make_artifact(case, arguments)
        except KeyboardInterrupt:
            raise
        except expected_errors() as error:
            failed += 1
            console.print(f"{case.name}: failed: {error}", style="bold red", markup=False, soft_wrap=True)
            continue
        validation = compiled.validation
        verdict = "not validated" if validation is None else "validated" if validation.passed else "WRONG RESULT"
        failed += validation is not None and not validation.passed
        facts = describe(compiled.manifest)
        console.print(
            f"{case.name}: {verdict}, {facts['launches']} launches {facts['launches_by_route']}, "
            f"{facts['kernels_without_record']} kernels without a record, {time.monotonic() - started:.0f} s",
            markup=False,
            soft_wrap=True,
        )
    sys.exit(1 if failed else 0)


def tune_case(case: Case, arguments: argparse.Namespace) -> TuningSummary:
    """Tune the tasks of one case, of its short model where there is a shorter one, and compile nothing."""
    layers = arguments.tune_layers
    prepared = prepare_short(case, layers, arguments.target) if layers is not None else None
    if prepared is None:
        prepared = prepare_model(_request(case, arguments))
    if not prepared.can_measure:
        raise PipelineError(f"{case.name} is tuned on its device, and {prepared.target.arch} is not on this machine")
    arguments.artifacts.mkdir(parents=True, exist_ok=True)
    with _turn(arguments), TuningDatabase.open(_database(arguments)) as database:
        job = database.start_job(
            model=prepared.model.name,
            model_sha256=prepared.lowered.graph.source_sha256,
            target=target_key(prepared.target),
            options=json.dumps({"seconds": arguments.seconds, "seed": arguments.seed, "tune_layers": layers}),
        )
        ended = "failed"
        try:
            summary = tune(
                prepared.tasks,
                target=prepared.target,
                database=database,
                environment=prepared.environment,
                still_true=still_true_in(database, prepared.target, prepared.environment),
                options=_tuning(arguments),
                job_id=job.id,
            )
            ended = "interrupted" if summary.interrupted else "done"
            return summary
        finally:
            database.finish_job(job.id, ended)


def rerank_case(case: Case, arguments: argparse.Namespace) -> RerankReport:
    """Try runners-up of the hottest kernels inside the whole model; what they gain is recorded."""
    plain = prepare_model(_request(case, arguments))
    tuning = TuningOptions(seed=arguments.seed, rerank=arguments.rerank)
    with TuningDatabase.open(_database(arguments)) as database:
        prepared, choices = select_as_measured(plain, database)
        model = measured_model(plain)
        return rerank_prepared(prepared, choices, database, tuning, model=model, lock=_turn(arguments))[1]


def make_artifact(case: Case, arguments: argparse.Namespace) -> CompileResult:
    """Return the artifact of one case, tuned unless that was done or only compiling is asked for."""
    request, directory = _request(case, arguments), arguments.artifacts / case.name
    if arguments.compile_only or _tunes_apart(arguments):
        return compile_model(request, directory, database=_database(arguments), samples=arguments.samples)
    directory.parent.mkdir(parents=True, exist_ok=True)
    tuned = TuneRequest(_database(arguments), _tuning(arguments), benchmark=False, samples=arguments.samples)
    with _turn(arguments):
        return tune_model(request, tuned, directory).compiled


def _turn(arguments: argparse.Namespace) -> AbstractContextManager[object]:
    """Return what to hold while kernels are measured: nothing where no other process does."""
    return DeviceLock(arguments.turn) if arguments.turn is not None else nullcontext()


def _in_processes(cases: Sequence[Case], arguments: argparse.Namespace) -> int:
    """Run each case by a process of its own, some at a time; return 1 when one failed."""
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(arguments.jobs) as pool:

        def run(case: Case) -> int:
            own = ["--cases", case.name, "--jobs", "1", "--turn", str(Path(directory) / "gpu.lock")]
            command = [sys.executable, "-m", "benchmarks.whole_models.tune_gpu_cases", *sys.argv[1:], *own]
            ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            print(ended.stdout or f"{case.name}: ended with {ended.returncode}\n", end="", flush=True)
            return ended.returncode

        return int(any(list(pool.map(run, cases))))


def _tunes_apart(arguments: argparse.Namespace) -> bool:
    return not arguments.compile_only and (arguments.tune_only or arguments.tune_layers is not None)


def _request(case: Case, arguments: argparse.Namespace) -> ModelRequest:
    return ModelRequest(case.source, shapes=case.shapes, target=arguments.target)


def _tuning(arguments: argparse.Namespace) -> TuningOptions:
    return TuningOptions(
        trials=None,
        time_budget_s=arguments.seconds,
        seed=arguments.seed,
        device_references=not arguments.host_references,
        rerank=arguments.rerank,
    )


def _database(arguments: argparse.Namespace) -> str | Path:
    return arguments.db or arguments.artifacts / "tuning.db"


def _told(summary: TuningSummary) -> str:
    failed = Counter[str]()
    for task in summary.tasks:
        failed.update({status.value: count for status, count in task.failures.items() if count})
    failures = ", ".join(f"{count} {status}" for status, count in failed.items()) or "none failed"
    return f"{summary.candidates} candidates in {summary.seconds:.0f} s, {failures}"


def _told_rerank(report: RerankReport) -> str:
    taken = sum(trial.taken for trial in report.trials)
    return f"{taken} of {len(report.trials)} runners-up taken, which gains {report.gain:.1%} in the model"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help="names of cases or models, separated by commas; default: all")
    parser.add_argument("--artifacts", type=Path, default=DEFAULT_ARTIFACTS, help="folder of the artifacts")
    parser.add_argument("--db", help="tuning database, by file or URL; default: tuning.db beside the artifacts")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of tuning for each case")
    parser.add_argument("--target", default="cuda", help="as `relaxtune tune --target`")
    parser.add_argument("--samples", type=int, default=1, help="random inputs to validate each artifact with, or 0")
    parser.add_argument("--seed", type=int, default=0, help="seed of the search")
    parser.add_argument("--compile-only", action="store_true", help="from the database's records, nothing measured")
    parser.add_argument("--tune-layers", type=int, help="tune the model with so many layers in place of the whole one")
    parser.add_argument(
        "--host-references", action="store_true", help="compute what candidates are compared with on the CPU alone"
    )
    parser.add_argument("--tune-only", action="store_true", help="make no artifacts")
    parser.add_argument("--rerank", type=int, default=0, help="hot kernels whose runners-up are tried inside the model")
    parser.add_argument("--jobs", type=int, default=1, help="cases that are imported, tuned or compiled at a time")
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tune_only and arguments.compile_only:
        parser.error("--tune-only and --compile-only: expected one of them, nothing is left to do")
    if arguments.rerank < 0:
        parser.error(f"--rerank {arguments.rerank}: expected at least 0")
    if arguments.rerank and (arguments.tune_only or arguments.compile_only):
        parser.error("--rerank measures and compiles: expected neither --tune-only nor --compile-only beside it")
    if arguments.jobs < 1:
        parser.error(f"--jobs {arguments.jobs}: expected at least 1")
    if arguments.tune_layers is not None and arguments.tune_layers < 1:
        parser.error(f"--tune-layers {arguments.tune_layers}: expected at least 1")
    try:
        find_cases(arguments.cases)
    except ValueError as error:
        parser.error(str(error))
    return arguments


if __name__ == "__main__":
    main()
